"""What one part of a model has of its own, where a step trains several in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import attrs

from pipeline.records._trees import register
from pipeline.records.counters import LossScale
from pipeline.records.optimizer_state import OptimizerState
from pipeline.records.window import Window
from pipeline.tensors import Tensors

__all__ = ["Part"]


@attrs.frozen(eq=False)
class Part:
    """The durable state of one part: its optimizer's, its open window, its loss scale and its counts.

    `updates`, `skipped` and `skips_in_row` are as in `Progress`, of this part alone.
    """

    optimizer: OptimizerState = attrs.field(factory=OptimizerState)
    window: Window = attrs.field(factory=Window)
    loss_scale: LossScale | None = None
    updates: int = 0
    skipped: int = 0
    skips_in_row: int = 0

    @property
    def is_stale(self) -> bool:
        """Whether a later record has taken its buffers over."""
        return self.window.grads.is_stale or self.optimizer.is_stale

    def renewed(self) -> Self:
        """The part as it is now, whoever wrote to it since; an open window whose sums are lost is empty."""
        window = Window() if self.window.grads.is_stale else self.window
        return attrs.evolve(self, optimizer=self.optimizer.renewed(), window=window)

    def each(
        self, tensors: Callable[[Tensors], Tensors], optimizer: Callable[[OptimizerState], OptimizerState]
    ) -> Self:
        """The same part with its records of buffers as these make of them."""
        window = attrs.evolve(self.window, grads=tensors(self.window.grads))
        return attrs.evolve(self, optimizer=optimizer(self.optimizer), window=window)


register(Part)

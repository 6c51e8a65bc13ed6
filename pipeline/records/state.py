"""`TrainState`: all that outlives a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import nn

from pipeline._binding import load
from pipeline.records._quick import Record, positional
from pipeline.records._trees import clone_tree, register
from pipeline.records.counters import LossScale, Progress, Rng
from pipeline.records.optimizer_state import OptimizerState
from pipeline.records.part import Part
from pipeline.records.window import Window
from pipeline.tensors import Tensors

__all__ = ["TrainState"]

_EMPTY = Tensors()
_NOTHING: Mapping[str, Any] = {}


@attrs.frozen(eq=False, repr=False)
class TrainState(Record):
    """All that outlives a step, and so all that a checkpoint holds.

    Make one with `init(step, model, seed=0)`. `slots` holds, by name, the durable state of transforms that users
    write: any pytree of tensors and numbers. `rate_factor` multiplies the scheduled learning rates: what a monitor such
    as `Plateau` has asked for.
    """

    params: Tensors
    buffers: Tensors = _EMPTY
    optimizer: OptimizerState = attrs.field(factory=OptimizerState)
    window: Window = attrs.field(factory=Window)
    loss_scale: LossScale | None = None
    progress: Progress = attrs.field(factory=Progress)
    rng: Rng = attrs.field(factory=Rng)
    slots: Mapping[str, Any] = _NOTHING
    rate_factor: float = 1.0

    @property
    def is_open(self) -> bool:
        """Whether a window is open: the state's own, or that of a part of the model."""
        parts = (slot.window for slot in self.slots.values() if isinstance(slot, Part))
        return any(window.micro_batches for window in (self.window, *parts))

    def copy(self) -> TrainState:
        """The same values in memory of their own: nothing that happens to this state or its module reaches the copy."""
        window = attrs.evolve(
            self.window,
            grads=self.window.grads.copy(),
            buffers=None if self.window.buffers is None else self.window.buffers.copy(),
            **{k: clone_tree(getattr(self.window, k)) for k in ("weight", "reference", "loss", "measures", "probes")},
        )
        return attrs.evolve(
            self,
            params=self.params.copy(),
            buffers=self.buffers.copy(),
            optimizer=self.optimizer.copy(),
            window=window,
            slots=clone_tree(self.slots),
        )

    def load_into(self, model: nn.Module) -> TrainState:
        """Write parameters and buffers into `model`; returns this state bound to it, so that a fold trains `model`.

        Names must match, whatever their order; a state that holds both names of a tied tensor must hold one value.

        Raises: StateMismatchError naming what is missing, unexpected or of another shape; nothing is written then.
        """
        own = self.params.lease.holds(model)
        params, buffers = load(self.params, self.buffers, model, self.progress.updates)
        rest = self if own else attrs.evolve(self, params=_EMPTY, buffers=_EMPTY).copy()  # two models, two states
        return attrs.evolve(rest, params=params, buffers=buffers)

    def owned(self) -> TrainState:
        """Take the buffers over: this state goes stale, the returned one is updated in place (as `fold` does)."""
        at = self.progress.updates
        return self._each(lambda t: t.owned(at), lambda o: o.owned(at))

    def borrowed(self) -> TrainState:
        """The same state in a record that transforms leave untouched (as `apply` does)."""
        return self._each(Tensors.borrowed, OptimizerState.borrowed)

    def _each(
        self, tensors: Callable[[Tensors], Tensors], optimizer: Callable[[OptimizerState], OptimizerState]
    ) -> TrainState:
        return attrs.evolve(
            self,
            params=tensors(self.params),
            buffers=tensors(self.buffers),
            optimizer=optimizer(self.optimizer),
            window=attrs.evolve(self.window, grads=tensors(self.window.grads)),
            slots={name: _each_slot(value, tensors, optimizer) for name, value in self.slots.items()},
        )

    def __repr__(self) -> str:
        p = self.progress
        return f"TrainState(update {p.updates}, micro-step {p.micro_steps}, epoch {p.epoch}, params={self.params!r})"


def _each_slot(
    value: Any, tensors: Callable[[Tensors], Tensors], optimizer: Callable[[OptimizerState], OptimizerState]
) -> Any:
    """A slot's value with the records of buffers in it as these make of them."""
    if isinstance(value, Part):
        return value.each(tensors, optimizer)
    return tensors(value) if isinstance(value, Tensors) else value


new_state = positional(TrainState)

register(TrainState)

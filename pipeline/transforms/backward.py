"""`ScaledBackward`: the gradients of one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import attrs
import torch
from torch import Tensor

from pipeline.records import Frame
from pipeline.tensors import Tensors
from pipeline.transforms._gradients import counts_for_nothing, root_of, trainable

__all__ = ["ScaledBackward"]


@attrs.frozen
class ScaledBackward:
    """Differentiate the loss by the parameters that require a gradient.

    Reads:    `loss`, 0-d with a graph; `weight`; `window`, what weights are relative to; `loss_scale`; `params`.
    Writes:   `grads`: gradient × weight relative to the window's first micro-batch × loss scale, for each parameter
              that the loss depends on, in the parameter's shape and dtype.
    Edges:    weight 0 on the host: no gradients, whatever the loss is. A parameter that the loss does not use has no
              entry. Directly before Accumulate the two run as one, and gradients are added into the window as they
              come, with no second set of them in memory.
    Raises:   NoGraphError where the loss has no graph: every parameter frozen, or computed without gradients;
              HiddenGraphError for a reentrant checkpoint in the graph of the first micro-batch.
    """

    reads = frozenset({"loss", "weight", "params", "window", "loss_scale"})
    writes = frozenset({"grads"})

    def __call__(self, frame: Frame) -> Frame:
        if counts_for_nothing(frame.weight):
            return frame.having(grads=Tensors())
        loss, start = root_of(frame)
        names, tensors = trainable(frame.state.params)
        start_from = None if start is None else (start,)
        found = cast(  # torch's stub forgets that unused ones are None
            "Sequence[Tensor | None]", torch.autograd.grad((loss,), tensors, start_from, allow_unused=True)
        )
        return frame.having(grads=Tensors((n, g) for n, g in zip(names, found, strict=True) if g is not None))

"""`MeasureNoise`: how large single micro-batches' gradients are, which with the window's tells how they differ."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from pipeline.errors import MissingFieldError
from pipeline.records import Frame
from pipeline.transforms._gradients import counts_for_nothing, widened
from pipeline.transforms._norm import global_norm

__all__ = ["MeasureNoise"]


@attrs.frozen
class MeasureNoise:
    """Measure the squared norm of each micro-batch's own mean gradient, from which the gradient noise scale follows.

    Reads:    `grads`, `weight`, `measures`: of one micro-batch; `window`, what weights are relative to; `loss_scale`.
    Writes:   `measures`, with `micro_grad_square` added: (the squared L2 norm of the gradient, without loss scale and
              relative weight, 0-d; 1). Over a window it comes to (sum, micro-batches that count) in `UpdateDone`.
    Edges:    a micro-batch of weight 0 adds nothing. Stands between ScaledBackward and Accumulate, which then do not
              run as one: a second set of gradients is in memory meanwhile, and where they are narrow a third, in
              float32. `every(n, MeasureNoise())` measures in each n-th window alone.
    Source:   McCandlish et al. 2018, arXiv:1812.06162, appendix A.1: the small batch is the micro-batch, the big one
              the window. Its estimates are unbiased where the window's micro-batches have equal weights.
    """

    reads = frozenset({"grads", "weight", "measures", "window", "loss_scale"})
    writes = frozenset({"measures"})

    def __call__(self, frame: Frame) -> Frame:
        if frame.grads is None:
            raise MissingFieldError("MeasureNoise", "grads", "put it between ScaledBackward and Accumulate")
        state, weight = frame.state, frame.weight
        if counts_for_nothing(weight):
            return frame
        scale = state.window.relative(weight)
        if state.loss_scale is not None:
            scale = scale * state.loss_scale.scale
        square = (global_norm(widened(grad) for grad in frame.grads.flat) / scale).square()
        measured = (square, 1.0)
        if isinstance(weight, Tensor):
            counts = weight > 0
            measured = (torch.where(counts, square, 0.0), counts.to(square.dtype))
        return frame.having(measures={**frame.measures, "micro_grad_square": measured})

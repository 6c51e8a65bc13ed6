"""`ClipByValue`: a bound on each element of the gradient."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from pipeline._checks import positive
from pipeline.records import Frame, Scalar
from pipeline.transforms._clipping import has_something, is_due, rewritten
from pipeline.transforms._norm import global_norm, normalised, sum_norm

__all__ = ["ClipByValue"]


@attrs.frozen
class ClipByValue:
    """Limit each element of the normalised gradient to ±`limit`. This changes the gradient's direction.

    Reads:    `window.grads`, one tensor per parameter: any shape, dense or sparse, real or complex; `update_factor`,
              what normalises them.
    Writes:   `window.grads`, normalised and limited; `update_factor`, 1.
    Measures: `grad_norm`, the global norm before clipping, in units of the normalised gradient; `clip_factor`, the
              norm afterwards over that; 0-d, both stay on their device.
    Edges:    nothing while the window is open; complex numbers are limited in magnitude and keep their phase; where any
              gradient is not finite all stay as they are, and the update will be skipped.
    Args:     limit: positive and finite.
    Raises:   SettingError, when built, for anything else.
    Source:   `torch.nn.utils.clip_grad_value_`.
    """

    limit: float

    reads = frozenset({"window.grads", "update_factor", "ready"})
    writes = frozenset({"window.grads", "update_factor", "facts"})

    def __attrs_post_init__(self) -> None:
        positive("ClipByValue.limit", self.limit)

    def __call__(self, frame: Frame) -> Frame:
        if not is_due(frame, "ClipByValue") or not has_something(frame):
            return frame
        factor = frame.update_factor
        before = normalised(sum_norm(frame), factor)
        limit = torch.where(before.isfinite(), before.new_full((), self.limit), torch.inf)
        sums = frame.state.window.grads.writable(frame.began.updates)
        sums = sums.replace([_limited(grad, factor, limit.to(grad.device)) for grad in sums.flat])
        return rewritten(frame, sums, before, global_norm(sums.flat))


def _limited(grad: Tensor, factor: Scalar, limit: Tensor) -> Tensor:
    """`grad` × `factor` within ±`limit`: in place, but for a sparse one whose duplicates have to be added up."""
    if grad.layout is torch.sparse_coo:
        grad = grad.coalesce()
        _limited(grad.values(), factor, limit)
        return grad
    if not (isinstance(factor, float) and factor == 1.0):
        grad.mul_(factor.to(grad.device) if isinstance(factor, Tensor) else factor)
    if grad.is_complex():
        return grad.mul_(torch.clamp(limit / grad.abs(), max=1.0))
    # One after the other: `clamp_` with tensors takes three times as long.
    return grad.clamp_max_(limit).clamp_min_(-limit)

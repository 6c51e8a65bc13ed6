"""`AdaptiveClip`: gradients limited relative to the weights that they change."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from functools import partial

import attrs
import torch
from torch import Tensor

from pipeline._checks import positive
from pipeline._patterns import as_patterns, places
from pipeline.errors import SettingError
from pipeline.records import Frame, TrainState
from pipeline.tensors import Tensors
from pipeline.transforms._clipping import has_something, is_due, rewritten
from pipeline.transforms._norm import global_norm, normalised, row_norms, rows

__all__ = ["AdaptiveClip"]


@attrs.frozen
class AdaptiveClip:
    """Scale the gradient of each unit down to at most `clip` times the norm of the unit's weights (AGC).

    A unit is what feeds one output: a row of a matrix, a filter of a convolution; a vector or a number (bias, gain) is
    one as a whole.

    Reads:    `window.grads`, one tensor per parameter: any shape, dense or sparse, real or complex; `update_factor`,
              what normalises them; `params`.
    Writes:   `window.grads`, normalised and clipped; `update_factor`, 1.
    Measures: `grad_norm`, the global norm before clipping, in units of the normalised gradient; `clip_factor`, the
              global norm afterwards over that; 0-d, both stay on their device.
    Edges:    nothing while the window is open; a weight norm below `eps` counts as `eps`, so that zero weights can
              move; zero gradient: unchanged; where any gradient is not finite none is clipped, and the update will be
              skipped.
    Args:     clip: the largest ratio, positive; eps: positive; leave: patterns on the names of parameters that are not
              clipped, such as the last layer, which the paper advises to leave alone.
    Raises:   SettingError, when built, for anything else; when the state is made, for a pattern that matches nothing.
    Source:   Brock, De, Smith, Simonyan 2021, arXiv:2102.06171, equation 3.
    """

    clip: float = 0.01
    eps: float = 1e-3
    leave: tuple[str, ...] = attrs.field(default=(), converter=partial(as_patterns, "AdaptiveClip.leave"))

    reads = frozenset({"window.grads", "update_factor", "ready", "params"})
    writes = frozenset({"window.grads", "update_factor", "facts"})

    def __attrs_post_init__(self) -> None:
        positive("AdaptiveClip.clip", self.clip)
        positive("AdaptiveClip.eps", self.eps)

    def init(self, state: TrainState) -> TrainState:
        """Check the patterns against the parameters."""
        for pattern in self.leave:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in state.params):
                known = ", ".join(list(state.params)[:8])
                raise SettingError(
                    "AdaptiveClip.leave", "of patterns that some parameter matches", pattern, f"{known}."
                )
        return state

    def __call__(self, frame: Frame) -> Frame:
        if not is_due(frame, "AdaptiveClip") or not has_something(frame):
            return frame
        sums = frame.state.window.grads.writable(frame.began.updates)
        flat = [_by_rows(grad) for grad in sums.flat]
        values = [grad.values() if grad.layout is torch.sparse_coo else grad for grad in flat]
        counts = [rows(value) for value in values]
        sizes = normalised(row_norms(values), frame.update_factor)
        before = global_norm([sizes])
        limits = self._limits(frame.state.params, dict(zip(sums, flat, strict=True)), counts).to(sizes.device)
        clips = torch.where(before.isfinite(), torch.clamp(limits / sizes, max=1.0), 1.0)
        parts = normalised(clips, frame.update_factor).split(counts)
        for value, part in zip(values, parts, strict=True):
            value.mul_(part.view([-1, *[1] * (value.ndim - 1)] if value.ndim else []).to(value.device))
        return rewritten(frame, sums.replace(flat), before, global_norm([sizes * clips]))

    def _limits(self, params: Tensors, grads: Mapping[str, Tensor], counts: Sequence[int]) -> Tensor:
        """What the gradient of each unit may be at most, in one row; infinite for those that are left alone."""
        limits = self.clip * torch.clamp(
            row_norms([_same_rows(params[name].detach(), grad) for name, grad in grads.items()]), min=self.eps
        )
        for part, place in zip(limits.split(counts), places(self.leave, tuple(grads)), strict=True):
            if place < len(self.leave):
                part.fill_(math.inf)
        return limits


def _same_rows(param: Tensor, grad: Tensor) -> Tensor:
    """Those rows of a parameter that its gradient has."""
    return param.index_select(0, grad.indices()[0]) if grad.layout is torch.sparse_coo else param


def _by_rows(grad: Tensor) -> Tensor:
    """A sparse gradient with one entry for each row that has any; dense where it is not sparse by rows."""
    if grad.layout is not torch.sparse_coo:
        return grad
    return grad.coalesce() if grad.ndim > 1 and grad.sparse_dim() == 1 else grad.to_dense()

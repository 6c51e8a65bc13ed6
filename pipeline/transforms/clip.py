"""Clipping: gradients scaled down before the update."""

from __future__ import annotations

import math

import attrs
import torch

from pipeline.errors import MissingFieldError, SettingError
from pipeline.records import Frame
from pipeline.transforms._norm import normalised, sum_norm

__all__ = ["ClipByGlobalNorm"]


@attrs.frozen
class ClipByGlobalNorm:
    """Scale the window's gradients down to at most `max_norm` in global L2 norm.

    Reads:    `window.grads`, one tensor per parameter, any shape; `update_factor`, what normalises them.
    Writes:   `update_factor`, what the optimizer multiplies the gradients by.
    Measures: `grad_norm`, before clipping, 0-d, in units of the normalised gradient; `clip_factor`, at most 1; both
              stay on their device.
    Edges:    nothing while the window is open; zero norm: unchanged; non-finite norm: the update will be skipped.
    Args:     max_norm: positive and finite.
    Raises:   SettingError, when built, for any other `max_norm`.
    Source:   Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, algorithm 1; the 1e-6 of `torch.nn.utils.clip_grad_norm_`.
    """

    max_norm: float

    reads = frozenset({"window.grads", "update_factor", "ready"})
    writes = frozenset({"update_factor", "facts"})

    def __attrs_post_init__(self) -> None:
        good = isinstance(self.max_norm, (int, float)) and self.max_norm is not True and 0 < self.max_norm < math.inf  # pyright: ignore[reportUnnecessaryIsInstance]
        if not good:
            raise SettingError("ClipByGlobalNorm.max_norm", "positive and finite", self.max_norm)

    def __call__(self, frame: Frame) -> Frame:
        if not frame.ready:
            return frame
        if not frame.state.window.micro_batches:
            raise MissingFieldError("ClipByGlobalNorm", "window.grads", "put it after ScaledBackward and Accumulate")
        factor, raw = frame.update_factor, sum_norm(frame)
        norm = normalised(raw, factor)
        clip = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
        facts = {"grad_norm": norm, "clip_factor": clip}
        if frame.sum_norm is not None:  # not the first clip of this window: what was measured before clipping stays
            facts = {"clip_factor": frame.facts.get("clip_factor", 1.0) * clip}
        return frame.having(
            update_factor=clip if isinstance(factor, float) and factor == 1.0 else clip * factor,
            sum_norm=(frame.state.window.grads, raw),
            facts={**frame.facts, **facts},
        )

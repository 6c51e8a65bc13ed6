"""`ClipByGlobalNorm`: one factor on all gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs

from pipeline._checks import positive
from pipeline.errors import SettingError
from pipeline.records import Frame, Scalar
from pipeline.transforms._clipping import factor_to, facts_with, is_due
from pipeline.transforms._norm import global_norm, normalised, sum_norm

__all__ = ["ClipByGlobalNorm"]


@attrs.frozen(repr=False)
class ClipByGlobalNorm:
    """Scale the window's gradients down to at most `max_norm` in global norm, all by one factor.

    Reads:    `window.grads`, one tensor per parameter: any shape, dense or sparse, real or complex; `update_factor`,
              what normalises them.
    Writes:   `update_factor`, what the optimizer multiplies the gradients by.
    Measures: `grad_norm`, the L2 norm before clipping, 0-d, in units of the normalised gradient; where `p` is not 2
              also the norm that is clipped, as `grad_norm_1` or `grad_norm_inf`; `clip_factor`, at most 1; all stay on
              their device.
    Edges:    nothing while the window is open; zero norm: unchanged; non-finite norm: the update will be skipped. A
              norm whose squares overflow float32 is not one of these, see `global_norm`.
    Args:     max_norm: positive and finite; p: the norm, 2, 1 or infinity.
    Raises:   SettingError, when built, for anything else.
    Source:   Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, algorithm 1; the 1e-6 of `torch.nn.utils.clip_grad_norm_`.
    """

    max_norm: float
    p: float = 2.0

    reads = frozenset({"window.grads", "update_factor", "ready"})
    writes = frozenset({"update_factor", "facts"})

    def __attrs_post_init__(self) -> None:
        positive("ClipByGlobalNorm.max_norm", self.max_norm)
        if not isinstance(self.p, (int, float)) or isinstance(self.p, bool) or self.p not in (1, 2, math.inf):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SettingError("ClipByGlobalNorm.p", "1, 2 or infinity", self.p)

    def __call__(self, frame: Frame) -> Frame:
        if not is_due(frame, "ClipByGlobalNorm"):
            return frame
        grads, factor, raw = frame.state.window.grads, frame.update_factor, sum_norm(frame)
        norm = clipped = normalised(raw, factor)
        more: Mapping[str, Scalar] = {}
        if self.p != 2:
            clipped = normalised(global_norm(grads.flat, self.p), factor)
            more = {f"grad_norm_{self.p:g}": clipped}
        clip = factor_to(self.max_norm, clipped)
        return frame.having(
            update_factor=clip if isinstance(factor, float) and factor == 1.0 else clip * factor,
            sum_norm=(grads, raw),
            facts={**facts_with(frame, norm, clip), **more},
        )

    def __repr__(self) -> str:
        return f"ClipByGlobalNorm(max_norm={self.max_norm!r}{'' if self.p == 2 else f', p={self.p!r}'})"

"""`ClipByGroupNorm` and `ClipPerParameter`: a norm, and a factor, for each of several sets of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import attrs
import torch
from torch import Tensor

from pipeline._checks import positive
from pipeline._patterns import places
from pipeline.errors import SettingError
from pipeline.records import Frame, TrainState
from pipeline.transforms._clipping import factor_to, has_something, is_due, rewritten, scaled
from pipeline.transforms._norm import global_norm, normalised, norms

__all__ = ["ClipByGroupNorm", "ClipPerParameter"]


def _rescaled(frame: Frame, sizes: Tensor, clips: Tensor, sets: Iterable[int]) -> Frame:
    """Scale each gradient by the factor of its set: `sizes` are the sets' norms, `sets` says which one each is in."""
    before = global_norm([sizes])
    clips = torch.where(before.isfinite(), clips, 1.0)
    factors = normalised(clips, frame.update_factor).unbind()
    sums = scaled(frame, [factors[i] for i in sets])
    return rewritten(frame, sums, before, global_norm([sizes * clips]))


def _pairs(limits: object) -> tuple[tuple[str, float], ...]:
    """What was given, in order, as (pattern, max_norm)."""
    expected = "a mapping or a list of pairs: pattern on parameter names -> max_norm"
    given: Iterable[Any] = limits.items() if isinstance(limits, Mapping) else cast("Iterable[Any]", limits)
    try:
        pairs = tuple((pattern, max_norm) for pattern, max_norm in given)
    except (TypeError, ValueError) as error:
        raise SettingError("ClipByGroupNorm.limits", expected, limits) from error
    if not pairs or not all(isinstance(pattern, str) for pattern, _ in pairs):
        raise SettingError("ClipByGroupNorm.limits", expected, limits)
    for pattern, max_norm in pairs:
        positive(f"ClipByGroupNorm.limits[{pattern!r}]", max_norm)
    return pairs


@attrs.frozen
class ClipByGroupNorm:
    """Scale the gradients of each group of parameters down to at most its own `max_norm` in L2 norm.

    Reads:    `window.grads`, one tensor per parameter: any shape, dense or sparse, real or complex; `update_factor`,
              what normalises them.
    Writes:   `window.grads`, normalised and clipped; `update_factor`, 1.
    Measures: `grad_norm`, the global norm before clipping, in units of the normalised gradient; `grad_norm/<pattern>`,
              that of each group, and `grad_norm/the rest`; `clip_factor`, the global norm afterwards over that before;
              0-d, all stay on their device.
    Edges:    nothing while the window is open. Each parameter belongs to the first pattern that matches its name; the
              rest is not clipped. Zero norm: unchanged; where any norm is not finite no gradient is clipped, and the
              update will be skipped.
    Args:     limits: pattern on parameter names, as in `fnmatch`, -> max_norm, positive and finite; a mapping or pairs.
    Raises:   SettingError, when built, for anything else; when the state is made, for a pattern that matches nothing.
    """

    limits: tuple[tuple[str, float], ...] = attrs.field(converter=_pairs)

    reads = frozenset({"window.grads", "update_factor", "ready"})
    writes = frozenset({"window.grads", "update_factor", "facts"})

    def init(self, state: TrainState) -> TrainState:
        """Check the patterns against the parameters."""
        used = set(places(self._patterns, tuple(state.params)))
        for i, pattern in enumerate(self._patterns):
            if i not in used:
                setting, known = f"ClipByGroupNorm.limits[{pattern!r}]", ", ".join(list(state.params)[:8])
                raise SettingError(setting, "the first to match some parameter", pattern, f"{known}.")
        return state

    def __call__(self, frame: Frame) -> Frame:
        if not is_due(frame, "ClipByGroupNorm") or not has_something(frame):
            return frame
        grads, factor = frame.state.window.grads, frame.update_factor
        groups = places(self._patterns, tuple(grads))
        there = sorted(set(groups))  # those with gradients in this window
        first = grads.flat[0].device
        members = {i: [grad for grad, group in zip(grads.flat, groups, strict=True) if group == i] for i in there}
        sizes = {i: normalised(global_norm(members[i]).to(first), factor) for i in there}
        limits = [*self.limits, ("the rest", math.inf)]
        # One by one, with limits as plain numbers: copying them to a device would make the host wait.
        clips = torch.stack([factor_to(limits[i][1], size) for i, size in sizes.items()])
        frame = _rescaled(frame, torch.stack(list(sizes.values())), clips, [there.index(i) for i in groups])
        measured = {f"grad_norm/{limits[i][0]}": size for i, size in sizes.items()}
        return frame.having(facts={**frame.facts, **measured})

    @property
    def _patterns(self) -> tuple[str, ...]:
        return tuple(pattern for pattern, _ in self.limits)


@attrs.frozen
class ClipPerParameter:
    """Scale the gradient of each parameter down to at most `max_norm` in L2 norm.

    Reads:    `window.grads`, one tensor per parameter: any shape, dense or sparse, real or complex; `update_factor`,
              what normalises them.
    Writes:   `window.grads`, normalised and clipped; `update_factor`, 1.
    Measures: `grad_norm`, the global norm before clipping, in units of the normalised gradient; `clip_factor`, the
              global norm afterwards over that; 0-d, both stay on their device.
    Edges:    nothing while the window is open; zero norm: unchanged; where any norm is not finite no gradient is
              clipped, and the update will be skipped.
    Args:     max_norm: positive and finite.
    Raises:   SettingError, when built, for anything else.
    """

    max_norm: float

    reads = frozenset({"window.grads", "update_factor", "ready"})
    writes = frozenset({"window.grads", "update_factor", "facts"})

    def __attrs_post_init__(self) -> None:
        positive("ClipPerParameter.max_norm", self.max_norm)

    def __call__(self, frame: Frame) -> Frame:
        if not is_due(frame, "ClipPerParameter") or not has_something(frame):
            return frame
        grads = frame.state.window.grads.flat
        sizes = normalised(norms(grads), frame.update_factor)
        return _rescaled(frame, sizes, factor_to(self.max_norm, sizes), range(len(grads)))

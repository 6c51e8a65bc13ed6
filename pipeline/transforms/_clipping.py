"""What the clips share: when they are due, what they report, and how they rewrite the gradient sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from pipeline.errors import MissingFieldError
from pipeline.records import Frame, Scalar
from pipeline.tensors import Tensors


def is_due(frame: Frame, clip: str) -> bool:
    """Whether the window is full; raises MissingFieldError where there is none."""
    if not frame.ready:
        return False
    if not frame.state.window.micro_batches:
        raise MissingFieldError(clip, "window.grads", "put it after ScaledBackward and Accumulate")
    return True


def has_something(frame: Frame) -> bool:
    """Whether there are gradients to rewrite, of a window that is not known to weigh nothing."""
    factor = frame.update_factor
    return bool(frame.state.window.grads) and not (isinstance(factor, float) and factor == 0.0)


def factor_to(max_norm: float, norm: Tensor) -> Tensor:
    """What takes `norm` down to `max_norm`, at most 1: in the steps, and so to the bit, of torch's clip."""
    return (norm + 1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0)


def facts_with(frame: Frame, norm: Tensor, clip: Tensor) -> Mapping[str, Scalar]:
    """The frame's facts, with `grad_norm` from before the window's first clip, and `clip_factor` of all its clips."""
    if frame.sum_norm is None:
        return {**frame.facts, "grad_norm": norm, "clip_factor": clip}
    return {**frame.facts, "clip_factor": frame.facts.get("clip_factor", 1.0) * clip}


def scaled(frame: Frame, factors: Sequence[Tensor]) -> Tensors:
    """The window's sums, each times its factor (0-d or broadcasting): in place where the record owns them."""
    sums = frame.state.window.grads.writable(frame.began.updates)
    flat = sums.flat
    here = [f if f.device == g.device else f.to(g.device) for f, g in zip(factors, flat, strict=True)]
    torch._foreach_mul_(flat, here)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportArgumentType]
    return sums


def rewritten(frame: Frame, sums: Tensors, before: Tensor, after: Tensor) -> Frame:
    """The frame with clipped and normalised `sums`, whose global norm went from `before` to `after`.

    A norm that was not finite stays so, whatever a factor of 0 made of the sums: the update will be skipped.
    """
    after = torch.where(before.isfinite(), after, before)
    clip = torch.clamp(torch.where(before == 0, 1.0, after / before), max=1.0)
    window = attrs.evolve(frame.state.window, grads=sums)
    return frame.having(
        state=attrs.evolve(frame.state, window=window),
        update_factor=1.0,
        sum_norm=(sums, after),
        facts=facts_with(frame, before, clip),
    )

"""Norms member by member, and the clip by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from pipeline.ensembles._members import precise
from pipeline.records import Frame, Scalar
from pipeline.transforms import ClipByGlobalNorm
from pipeline.transforms._clipping import factor_to, facts_with, is_due
from pipeline.transforms._norm import normalised, row_norms

__all__ = ["ClipMembers", "member_norms", "sum_norms"]


def member_norms(tensors: Sequence[Tensor], p: float = 2.0) -> Tensor:
    """The norm over all elements of each member's row of all tensors, 1-d; right as far as `global_norm`.

    Args: p: 1, 2 or infinity.
    """
    flat = [tensor.flatten(1) if tensor.ndim > 1 else tensor.unsqueeze(1) for tensor in tensors if tensor.numel()]
    if p == 2:
        each = row_norms(flat).view(len(flat), -1)
        return torch.linalg.vector_norm(each, dim=0, dtype=precise(each)).to(each.dtype)
    each = torch.stack([torch.linalg.vector_norm(tensor, p, dim=1) for tensor in flat])
    return torch.linalg.vector_norm(each, p, dim=0)


def sum_norms(frame: Frame) -> Tensor:
    """The norm of each member's gradient sums as they are: those measured before in this frame, or else now."""
    grads, known = frame.state.window.grads, frame.sum_norm
    return known[1] if known is not None and known[0] is grads else member_norms(grads.flat)


@attrs.frozen
class ClipMembers:
    """`ClipByGlobalNorm` over members: each by its own norm.

    Reads:    `window.grads`, `update_factor`, `ready`.
    Writes:   `update_factor`, with a row for each member.
    Measures: as ClipByGlobalNorm, of each member.
    """

    inner: ClipByGlobalNorm

    name = "ClipByGlobalNorm"
    reads = ClipByGlobalNorm.reads
    writes = ClipByGlobalNorm.writes

    def __call__(self, frame: Frame) -> Frame:
        grads = frame.state.window.grads
        if not is_due(frame, "ClipByGlobalNorm") or not grads:
            return frame
        factor, raw = frame.update_factor, sum_norms(frame)
        norm = clipped = normalised(raw, factor)
        more: Mapping[str, Scalar] = {}
        if self.inner.p != 2:
            clipped = normalised(member_norms(grads.flat, self.inner.p), factor)
            more = {f"grad_norm_{self.inner.p:g}": clipped}
        clip = factor_to(self.inner.max_norm, clipped)
        facts = {**facts_with(frame, norm, clip), **more}
        return frame.having(update_factor=clip * factor, sum_norm=(grads, raw), facts=facts)

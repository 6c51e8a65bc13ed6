"""The one norm pass that unscaling, the finite check and clipping share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pipeline.records import Frame, Scalar
from pipeline.tensors import Tensors

__all__ = ["global_norm"]


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The L2 norm over all elements of all tensors as if they were one, 0-d, on the first one's device.

    As `torch.nn.utils.get_total_norm`: a norm each, then the norm of these. Without tensors, 0.
    """
    dense = [_dense(t) for t in tensors]
    if not dense:
        return torch.zeros(())
    first = dense[0].device
    norms = torch._foreach_norm(dense)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    if any(n.device != first for n in norms):
        norms = tuple(n.to(first) for n in norms)
    return torch.linalg.vector_norm(torch.stack(norms))


def _dense(tensor: Tensor) -> Tensor:
    """The values that count: a sparse gradient's duplicates are added up first."""
    return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor


def sum_norm(frame: Frame) -> Tensor:
    """The global norm of the window's gradient sums as they are: the one measured before in this frame, or else now."""
    grads, known = frame.state.window.grads, frame.sum_norm
    return known[1] if known is not None and known[0] is grads else global_norm(grads.flat)


def normalised(norm: Tensor, factor: Scalar) -> Tensor:
    """A norm of sums in units of the gradient that the optimizer will see."""
    return norm if isinstance(factor, float) and factor == 1.0 else norm * factor


def first_non_finite(grads: Tensors) -> str | None:
    """The first parameter whose gradient holds an infinity or a NaN; None where all are finite. The host waits."""
    for name, grad in grads.items():
        if not bool(torch.isfinite(_dense(grad)).all()):
            return name
    return None

"""The one norm pass that unscaling, the finite check and clipping share.

The squares of a float32 gradient overflow from about 1e19 on, long before the gradient does. A norm that overflowed in
this way is taken again in float64: on the CPU only then, at the price of a look at a number that lies in memory anyway
(nobody is waited for); on CUDA, and in a graph that is being traced, in float64 from the start, which is still one
pass. Elsewhere (accelerators without float64, DTensor) it stays infinite, as everywhere above 1e30, and the window is
skipped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.utils import _python_dispatch as dispatch  # nothing public tells that a graph is being traced

from pipeline.records import Frame, Scalar
from pipeline.tensors import Tensors

__all__ = ["global_norm"]

_HAS_FLOAT64 = frozenset({"cpu", "cuda"})
_LARGEST_SHARE = 2.0**-28
"""Of the largest float32, what a norm may be: above 1.2e30 it is infinite, since the factor that undoes it, or one
over that, would leave float32. A power of two, which rounds nothing."""


def global_norm(tensors: Iterable[Tensor], p: float = 2.0) -> Tensor:
    """The norm over all elements of all tensors as if they were one, 0-d, on the first one's device.

    As `torch.nn.utils.get_total_norm`, on the CPU to the bit: a norm each, then the norm of these. Right up to 1e30,
    though the squares of float32 overflow long before. A sparse tensor's duplicates are added up first, complex numbers
    count by their magnitude, and over no elements the norm is 0.

    Args: p: 1, 2 or infinity.
    """
    values = [t if t.layout is torch.strided else _values(t) for t in tensors]
    if p == math.inf:
        values = [v for v in values if v.numel()]
    if not values:
        return torch.zeros(())
    if _in_sight(values[0]):  # the usual way, without a detour
        norm = torch.linalg.vector_norm(_each(values, p), p)
        if _all_finite(norm):
            return norm

    def taken(dtype: torch.dtype | None) -> Tensor:
        return torch.linalg.vector_norm(_each(values, p, dtype), p)

    return _finite(taken, values, p)


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """The L2 norm of each tensor, 1-d, on the first one's device; right as far as `global_norm`."""
    values = [_values(t) for t in tensors]
    return _finite(lambda dtype: _each(values, 2.0, dtype), values)


def rows(tensor: Tensor) -> int:
    """How many units a tensor has: its first dimension, or 1 for a vector or a number, which are one as a whole."""
    return tensor.shape[0] if tensor.ndim > 1 else 1


def row_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The L2 norm of each unit of each tensor, 1-d, on the first one's device; right as far as `global_norm`."""

    def taken(dtype: torch.dtype | None) -> Tensor:
        first, norms = tensors[0].device, list[Tensor]()
        for tensor in tensors:
            dims = tuple(range(1, tensor.ndim)) or None
            norms.append(torch.linalg.vector_norm(_magnitudes(tensor), dim=dims, dtype=dtype).reshape(-1).to(first))
        return torch.cat(norms)

    return _finite(taken, tensors)


def _finite(norm: Callable[[torch.dtype | None], Tensor], values: Sequence[Tensor], p: float = 2.0) -> Tensor:
    """`norm(None)`, or where that overflows `norm(torch.float64)`, in the gradients' precision."""
    if p == math.inf:  # overflows with its largest element alone
        return norm(None)
    if _in_sight(values[0]):
        narrow = norm(None)
        if _all_finite(narrow) or not all(map(_can_widen, values)):
            return narrow
    elif not _can_widen(values[0]):
        return norm(None)
    precise = functools.reduce(torch.promote_types, {v.dtype.to_real() for v in values}, torch.float32)
    return (norm(torch.float64) / _LARGEST_SHARE).to(precise) * _LARGEST_SHARE


def _in_sight(tensor: Tensor) -> bool:
    """Whether its values lie in the host's memory, and nobody traces what is done with them."""
    return type(tensor) is Tensor and tensor.is_cpu and not _is_traced()


def _is_traced() -> bool:
    return dispatch._get_current_dispatch_mode() is not None  # pyright: ignore[reportPrivateUsage]


def _can_widen(tensor: Tensor) -> bool:
    """Whether a norm of it can be taken in float64: not on every accelerator, and not across ranks."""
    return (type(tensor) is Tensor or _is_traced()) and tensor.device.type in _HAS_FLOAT64


def _all_finite(norm: Tensor) -> bool:
    """Whether all are finite; for a tensor in sight only."""
    if norm.ndim == 0:
        return math.isfinite(cast("float", norm.tolist()))
    return cast("bool", norm.isfinite().all().tolist())


def _each(values: list[Tensor], p: float, dtype: torch.dtype | None = None) -> Tensor:
    """What has the norm that all values have, 1-d, on the first one's device: the norm of each.

    But on the CPU, for the largest magnitude, the ends of each: torch takes seven times as long for that norm.
    """
    if p == math.inf and all(v.device.type == "cpu" and not v.is_complex() for v in values):
        return torch.stack([end for v in values for end in torch.aminmax(v)])
    if dtype is None:
        each = torch._foreach_norm(values) if p == 2 else torch._foreach_norm(values, p)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    else:
        each = torch._foreach_norm([_magnitudes(v) for v in values], p, dtype=dtype)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    first = each[0].device
    if any(n.device != first for n in each):
        each = tuple(n.to(first) for n in each)
    return torch.stack(each)


def _magnitudes(tensor: Tensor) -> Tensor:
    return tensor.abs() if tensor.is_complex() else tensor


def _values(tensor: Tensor) -> Tensor:
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
        if not bool(torch.isfinite(_values(grad)).all()):
            return name
    return None

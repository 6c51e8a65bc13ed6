"""What to differentiate, by which parameters, and how the sums are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import HiddenGraphError, MissingFieldError, NoGraphError
from pipeline.records import Frame, Scalar
from pipeline.tensors import Tensors

WIDE = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})
"""The dtypes in which sums may be kept."""


def counts_for_nothing(weight: Scalar) -> bool:
    """Whether a micro-batch of this weight is known, on the host, to add nothing."""
    return not isinstance(weight, Tensor) and weight == 0


def trainable(params: Tensors) -> tuple[list[str], list[Tensor]]:
    """Names and tensors of the parameters that require a gradient now."""
    pairs = [(name, p) for name, p in zip(params.index, params.flat, strict=True) if p.requires_grad]
    return [name for name, _ in pairs], [p for _, p in pairs]


_ENGINE: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def backward_into(loss: Tensor, start: Tensor | None, inputs: Sequence[Tensor]) -> None:
    """Add the gradients to the `.grad` of `inputs`, starting from `start` or 1.

    What `torch.autograd.backward` does, less its checks and its set-up for tracing, which cost as much as a sixth of
    the pass of a small model. A gradient may be a view of the start, and a hook may write to it: a new one each time.
    """
    root = (torch.ones_like(loss) if start is None else start,)
    _ENGINE.run_backward((loss,), root, False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=True)


def root_of(frame: Frame) -> tuple[Tensor, Tensor | None]:
    """What to differentiate, and the gradient to start from: None for 1.

    The start is the weight relative to the window's first micro-batch × the loss scale: a factor on the loss, without
    the multiplication.
    """
    loss, state = frame.loss, frame.state
    if loss is None:
        raise MissingFieldError("ScaledBackward", "loss", "put it after Forward")
    if not loss.requires_grad:
        if not len(state.params):
            raise NoGraphError("the model has no parameters")
        frozen = not any(p.requires_grad for p in state.params.flat)
        raise NoGraphError("every parameter is frozen" if frozen else "the loss has no graph")
    if type(loss) is not Tensor or not state.progress.micro_steps:  # one that is traced comes once, whatever the count
        _check_graph(loss)
    start = state.window.relative(frame.weight)
    if state.loss_scale is not None:
        start = start * state.loss_scale.scale
    if isinstance(start, Tensor):
        return loss, start.to(loss.dtype)
    return loss, None if isinstance(start, float) and start == 1.0 else loss.new_tensor(start)


def _check_graph(loss: Tensor) -> None:
    """Raise HiddenGraphError for a reentrant checkpoint: with the leaves given to it, autograd passes it over.

    Asked of the first micro-batch alone, since it walks the whole graph.
    """
    seen, to_see = set[Any](), [loss.grad_fn]
    while to_see:
        node = to_see.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise HiddenGraphError
        to_see += [before for before, _ in node.next_functions]


def widened(value: Any) -> Any:
    """A measured value as it is summed: without its graph, in float32 or wider; numbers as they are."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return value if value.dtype in WIDE else value.to(torch.promote_types(value.dtype, torch.float32))


def kept(value: Any) -> Any:
    """A measured value as it is kept beyond its micro-batch: as `widened`, in memory that nobody else writes to.

    What nothing has computed, and a view, may be a parameter or a buffer, which the update and the forward write to.
    """
    if isinstance(value, Tensor) and (value.is_leaf or value._base is not None):  # pyright: ignore[reportPrivateUsage]
        value = value.detach().clone()
    return widened(value)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _counted(grad: Tensor) -> Tensor:
    """The gradient without its graph; a narrow sparse one's duplicates added up, and overflowing, in its precision."""
    grad = grad.detach()
    return grad.coalesce() if grad.layout is torch.sparse_coo and grad.dtype not in WIDE else grad


def _added(total: Tensor, grad: Tensor) -> Tensor:
    """`total` + `grad` in the place of `total`; a dense gradient makes a sparse sum dense."""
    if total.layout is torch.sparse_coo and grad.layout is not torch.sparse_coo:
        total = total.to_dense()
    return total.add_(grad)


def add_grads(sums: Tensors, grads: Tensors, order: Mapping[str, int], update: int) -> Tensors:
    """`sums` + `grads`, in float32 or wider; in place where `sums` owns its buffers. In the order of `order`."""
    new = {name: _counted(grad) for name, grad in grads.items()}
    if not sums:
        return Tensors({n: g.to(_sum_dtype(g.dtype), copy=True) for n, g in new.items()})
    old = dict(sums.writable(update))
    for name, grad in new.items():
        old[name] = _added(old[name], grad) if name in old else grad.to(_sum_dtype(grad.dtype), copy=True)
    return Tensors({name: old[name] for name in sorted(old, key=lambda n: order.get(n, len(order)))})

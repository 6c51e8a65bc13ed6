"""Parts of a step as one graph of tensor operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from pipeline.compilation._lifting import Lifting
from pipeline.compilation._lowering import Lowering
from pipeline.compilation._numbers import MeetingTensors
from pipeline.records import Frame
from pipeline.transform import Transform

__all__ = ["Ending", "PartError", "Traced", "run", "trace"]

Ending = Callable[[Lifting, Frame], Any]
"""What a trace makes of the frame at its end."""


def _norms(tensors: Sequence[Tensor], p: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor, p, dtype=dtype) for tensor in tensors]


_DECOMPOSED: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten._foreach_norm.Scalar: _norms  # inductor has no kernel for it, and runs it through Python
}
_COPY, _CLONE, _DETACH = (
    torch.ops.aten.copy_.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
)


class PartError(Exception):
    """A part of the step that failed while it was traced."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


@attrs.frozen
class Traced:
    """A graph, the places of its inputs among all that were lifted, and the source around it."""

    graph: GraphModule
    used: Sequence[int]
    lowering: Lowering


def run(parts: Sequence[Transform], lifting: Lifting, ending: Ending | None = None) -> Any:
    """The lifted frame through the parts, and what `ending` makes of it.

    Raises: PartError, with what went wrong as its cause.
    """
    result: Any = lifting.frame
    calls = [*parts, functools.partial(ending, lifting)] if ending is not None else parts
    with lifting.mode, enable_python_dispatcher(), _seen_as_compiling(), MeetingTensors(lifting.ledger):
        for place, call in enumerate(calls):
            try:
                result = call(result)
            except Exception as error:
                raise PartError(place) from error
    return result


def trace(parts: Sequence[Transform], lifting: Lifting, ending: Ending | None = None) -> Traced:
    """The parts as one graph over the inputs of `lifting` and, last, the row of numbers that meet tensors.

    What comes of it is the frame, or what `ending` makes of that.

    Raises: PartError, with what went wrong as its cause.
    """
    lowered: list[Lowering] = []

    def flat(*_: Tensor) -> list[Tensor]:  # they are the very tensors that the lifted frame holds
        lowering = Lowering(lifting, run(parts, lifting, ending))
        with torch.no_grad():
            for record in lowering.written:
                for place, new in record.after.items():
                    record.before.flat[place].copy_(new)
        lowered.append(lowering)
        return lowering.outputs

    with lifting.mode:
        graph = make_fx(flat, _DECOMPOSED)(*lifting.fakes, lifting.row)
    _drop_needless_copies(graph, sum(len(record.after) for record in lowered[0].written))
    return Traced(graph, _drop_unused_inputs(graph), lowered[0])


@contextmanager
def _seen_as_compiling() -> Generator[None]:
    """What asks `torch.compiler.is_compiling()` is told so: torch's own modules then leave looks at values out."""
    compiler: Any = torch.compiler
    before = compiler._is_compiling_flag
    compiler._is_compiling_flag = True
    try:
        yield
    finally:
        compiler._is_compiling_flag = before


def _drop_needless_copies(graph: GraphModule, count: int) -> None:
    """Of the last `count` copies back into inputs, drop those of what is the input's own value: buffers only read."""
    copies = graph.graph.find_nodes(op="call_function", target=_COPY)
    for node in copies[len(copies) - count :]:
        source: Any = node.args[1]
        while isinstance(source, Node) and source.target in (_CLONE, _DETACH) and not _is_written(source, but=node):
            source = source.args[0]
        if source is node.args[0]:
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()


def _is_written(node: Node, but: Node) -> bool:
    """Whether an operation other than `but` writes to what the node gives, or to a view of it."""
    for user in node.users:
        if user is but:
            continue
        if not isinstance(user.target, OpOverload):
            return True
        schema: Any = user.target._schema  # pyright: ignore[reportPrivateUsage]
        given = [*zip(user.args, schema.arguments, strict=False)]
        given += [(user.kwargs[a.name], a) for a in schema.arguments if a.name in user.kwargs]
        aliases = [a.alias_info for value, a in given if a.alias_info is not None and _holds(value, node)]
        if any(alias.is_write for alias in aliases) or (aliases and _is_written(user, but)):
            return True
    return False


def _holds(value: Any, node: Node) -> bool:
    return value is node or (isinstance(value, (list, tuple)) and node in value)


def _drop_unused_inputs(graph: GraphModule) -> list[int]:
    """Drop inputs that nothing is computed from; the places of the others."""
    used: list[int] = []
    for place, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        if node.users:
            used.append(place)
        else:
            graph.graph.erase_node(node)
    graph.recompile()
    return used

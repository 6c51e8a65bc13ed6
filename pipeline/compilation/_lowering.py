"""What comes out of a trace, as source: how the frame after the graph is made of the frame before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor
from torch.utils import _pytree as pytree

from pipeline.compilation._lifting import Lifting
from pipeline.compilation._numbers import Untraceable
from pipeline.records import Frame, OptimizerState
from pipeline.tensors import Tensors

__all__ = ["Lowering", "Written"]


@attrs.frozen
class Written:
    """A record that the graph writes to: `code`, where it is found, and by place what each tensor in it becomes."""

    code: str
    before: Tensors
    after: Mapping[int, Tensor]


class Lowering:
    """The source of what comes of a graph, over `f`, the frame before it, `w`, the records written to, and `o`.

    `outputs` are the tensors that the graph gives as `o`; `written`, what it writes in place.
    """

    def __init__(self, lifting: Lifting, result: Any) -> None:
        self._lifting, self._source = lifting, lifting.source
        self.outputs: list[Tensor] = []
        self.written: list[Written] = []
        self._found: dict[int, str] = {}
        self._memory: dict[Any, int] = {}
        self.code = self._value(result, "f")

    def _value(self, value: Any, path: str) -> str:
        """`value` as source; `path` is where in the frame it is to lie."""
        known = self._lifting.place(value) or self._found.get(id(value))
        if known is None:
            known = self._made(value, path)
            if isinstance(value, (Tensor, Tensors)):
                self._found[id(value)] = known
        return known

    def _made(self, value: Any, path: str) -> str:
        number = self._lifting.ledger.number(value)
        if number is not None:
            return number.code
        if isinstance(value, Tensor):
            return self._output(value)
        if isinstance(value, Tensors):
            return self._tensors(value, path)
        if isinstance(value, OptimizerState):
            return self._optimizer(value, path)
        if isinstance(value, Frame):
            return self._frame(value)
        if isinstance(value, (tuple, list)):
            items: list[Any] = list(value)  # pyright: ignore[reportUnknownArgumentType]
            listed = ", ".join(self._value(item, f"{path}[{i}]") for i, item in enumerate(items))
            if hasattr(type(value), "_fields"):
                return f"{self._source.name(type(value))}({listed})"
            return f"[{listed}]" if isinstance(value, list) else f"({listed}{',' * (len(items) == 1)})"
        if type(value) is dict:
            entries: dict[Any, Any] = value
            names = {key: self._source.constant(key) for key in entries}
            listed = [f"{names[k]}: {self._value(entry, f'{path}[{names[k]}]')}" for k, entry in entries.items()]
            return f"{{{', '.join(listed)}}}"
        if attrs.has(type(value)):
            return self._record(value, path)
        if type(value) in pytree.SUPPORTED_NODES:
            leaves, form = pytree.tree_flatten(value)
            listed = ", ".join(self._value(leaf, path) for leaf in leaves)
            return f"{self._source.name(form.unflatten)}([{listed}])"
        return self._source.constant(value)

    def _frame(self, frame: Frame) -> str:
        before = vars(self._lifting.frame)
        changed = {name: value for name, value in vars(frame).items() if value is not before[name]}
        fields = [f"{name}={self._value(value, f'f.{name}')}" for name, value in changed.items()]
        return f"f.having({', '.join(fields)})"

    def _optimizer(self, state: OptimizerState, path: str) -> str:
        tensors = self._value(state.tensors, f"{path}.tensors")
        return f"{self._source.name(OptimizerState)}({tensors}, {path}.numbers, is_owned={path}.is_owned)"

    def _record(self, record: Any, path: str) -> str:
        fields = attrs.fields(type(record))
        if not all(field.init for field in fields):
            raise Untraceable(f"it makes a {type(record).__name__}, which cannot be made from its fields")
        given = {f.alias: self._value(getattr(record, f.name), f"{path}.{f.name}") for f in fields}
        positional = not any(field.kw_only for field in fields)
        listed = given.values() if positional else [f"{name}={code}" for name, code in given.items()]
        return f"{self._source.name(type(record))}({', '.join(listed)})"

    def _output(self, tensor: Tensor) -> str:
        """The place among the outputs, one for all that lie in the same memory: a loss with its graph and without."""
        memory: Any = tensor.untyped_storage()
        kind = (memory._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        place = self._memory.setdefault(kind, len(self.outputs))
        if place == len(self.outputs):
            self.outputs.append(tensor.detach() if tensor.requires_grad else tensor)
        return f"o[{place}]"

    def _tensors(self, tensors: Tensors, path: str) -> str:
        """In the place of the record that was there, where names and shapes are the same; else as new tensors."""
        before = self._lifting.records.get(path)
        if before is not None and tuple(before) == tuple(tensors) and all(map(_fits, before.flat, tensors.flat)):
            pairs = enumerate(zip(before.flat, tensors.flat, strict=True))
            after = {place: new for place, (old, new) in pairs if new is not old}
            self.written.append(Written(path, before, after))
            return f"w[{len(self.written) - 1}]"
        names, listed = self._source.name(tuple(tensors)), [self._value(t, path) for t in tensors.flat]
        return f"{self._source.name(Tensors.over)}({names}, ({''.join(f'{code}, ' for code in listed)}))"


def _fits(old: Tensor, new: Tensor) -> bool:
    kinds = [(tensor.shape, tensor.dtype, tensor.device, tensor.layout) for tensor in (old, new)]
    return kinds[0] == kinds[1]

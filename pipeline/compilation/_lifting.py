"""A frame as a trace sees it: tensors are inputs of the graph, numbers are noted, and all else is a condition."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from pipeline.compilation._numbers import MOST_INPUTS, Ledger, Number, Untraceable
from pipeline.compilation._source import Source
from pipeline.compilation._window import TracedWindow
from pipeline.records import Frame, OptimizerState, TrainState, Window
from pipeline.tensors import Tensors

__all__ = ["Condition", "Free", "Input", "Lifting"]

Free = Callable[[str, Sequence[int]], frozenset[int]]
"""Of a tensor at this place in the frame, and of this shape: the dimensions whose sizes are inputs."""

_FROM_THE_LOOP = ("state", "batch", "began", "time", "waited")
_OF_ONE_KIND = frozenset({"f.began", "f.state.progress", "f.state.rng"})
_KINDS_OF = "the names and shapes of "
_CONSTANTS = (type(None), bool, str, bytes, enum.Enum)
_LASTING = (torch.dtype, torch.device, type, nn.Module)
"""What is the same object in each step, if it is the same at all; functions too."""


@attrs.frozen
class Condition:
    """What must hold of a frame `f` for a graph to serve it: `code` gives `expected`."""

    code: str
    expected: Any
    about: str
    is_lasting: bool = False  # once it holds for a state, it holds for the state that the graph makes of it

    def difference(self, actual: Any) -> str:
        """What came in the place of what was expected."""
        return f"{self.about}: {actual!r} in the place of {self.expected!r}"


@attrs.frozen
class Input:
    """Where an input of the graph is found: `code`, or there at `place` in the record that `code` is."""

    code: str
    place: int | None = None


class _Kinds:
    """Whether a record holds tensors of the same names and kinds as before; `known` are those seen last."""

    def __init__(self, tensors: Tensors) -> None:
        self._names, self._kinds, self.known = tuple(tensors.index), _kinds(tensors.flat), tensors.flat

    def __call__(self, tensors: Tensors) -> bool:
        same = tuple(tensors.index) == self._names and _kinds(tensors.flat) == self._kinds
        if same and tensors.is_owned:  # of one that is not, another comes each time
            self.known = tensors.flat
        return same


def _kinds(tensors: Iterable[Tensor]) -> list[Any]:
    return [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]


class _NotSeen:
    """In the place of what no graph is given."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        raise Untraceable(f"it reads {self._path.removeprefix('f.')}, which no graph is given")


class Lifting:
    """One frame made into what is traced, with fakes for its tensors.

    Afterwards it knows where in the frame each thing lies (`places`), the graph's `inputs`, the `fakes` for them, and
    the `conditions` on frames that the graph can serve.
    """

    def __init__(self, frame: Frame, source: Source, free: Free, unseen: frozenset[str]) -> None:
        self.ledger, self.source = Ledger(), source
        self.mode = FakeTensorMode(shape_env=_shapes(), allow_non_fake_inputs=True)
        self.inputs: list[Input] = []
        self.fakes: list[Tensor] = []
        self.conditions: list[Condition] = []
        self.records: dict[str, Tensors] = {}
        self._free, self._unseen = free, unseen
        self._places: dict[int, str] = {}
        self._kept: list[Any] = []
        self.frame = self._frame(frame)
        self.row = self.ledger.row = self.numbers(MOST_INPUTS)

    def numbers(self, count: int) -> Tensor:
        """A fake for the input that carries so many numbers."""
        with self.mode:
            return torch.empty(count, dtype=torch.float64, device=self.fakes[0].device)

    def place(self, value: object) -> str | None:
        """Where in the frame this very thing comes from; None for what the trace has made."""
        return self._places.get(id(value))

    def _put(self, lifted: Any, path: str) -> Any:
        self._kept.append(lifted)  # a place is known by identity, which must not be another's later on
        self._places[id(lifted)] = path
        return lifted

    def _ask(self, code: str, expected: Any, about: str) -> None:
        is_lasting = about.removeprefix(_KINDS_OF).startswith("state")
        self.conditions.append(Condition(code, expected, about, is_lasting))

    # -- the records ----------------------------------------------------------------------------------------------

    def _frame(self, frame: Frame) -> Frame:
        fields = vars(frame)
        untouched = [
            field.name
            for field in attrs.fields(Frame)
            if field.name not in self._unseen
            and field.name not in _FROM_THE_LOOP
            and fields[field.name] is field.default
        ]
        if untouched:
            defaults = self.source.name(operator.attrgetter(*untouched))
            self._ask(f"{defaults}(f)", operator.attrgetter(*untouched)(frame), "the frame's other fields")
        changed = {
            name: self._state(value, "f.state") if name == "state" else self._value(value, f"f.{name}")
            for name, value in fields.items()
            if name not in untouched and name not in self._unseen
        }
        hidden = {name: self._put(_NotSeen(f"f.{name}"), f"f.{name}") for name in self._unseen & fields.keys()}
        return self._put(frame.having(**changed, **hidden), "f")

    def _state(self, state: TrainState, path: str) -> TrainState:
        names = [field.name for field in attrs.fields(TrainState)]
        lifted = _with(state, {name: self._value(getattr(state, name), f"{path}.{name}") for name in names})
        flags = [p.requires_grad for p in state.params.flat]
        self._ask(f"[p.requires_grad for p in {path}.params._values]", flags, "which parameters are trained")
        return self._put(lifted, path)

    def _window(self, window: Window, path: str) -> Window:
        """The probes stay behind, and one thing stands for all: their number is another one in each micro-batch."""
        names = [field.name for field in attrs.fields(Window) if field.name != "probes"]
        values = {name: self._value(getattr(window, name), f"{path}.{name}") for name in names}
        if window.reference is None:  # nothing has counted yet, and what is added to is no number of this run
            for name in ("weight", "loss"):
                values[name] = getattr(window, name)
                self._ask(f"{path}.{name}", values[name], f"{path.removeprefix('f.')}.{name}")
        probes = self._put((self._put(object(), f"*{path}.probes"),), f"{path}.probes")
        kind = Window if window.reference is None else TracedWindow
        return self._put(kind(probes=probes, **values), path)

    def _tensors(self, tensors: Tensors, path: str) -> Tensors:
        fakes = [self._fake(t, Input(path, place)) for place, t in enumerate(tensors.flat)]
        kinds = self.source.name(_Kinds(tensors))
        code = f"({path}._values is {kinds}.known or {kinds}({path}))"
        self._ask(code, True, f"{_KINDS_OF}{path.removeprefix('f.')}")
        lifted = Tensors.over(tensors, fakes)
        self.records[path] = lifted
        return self._put(lifted, path)

    def _optimizer(self, state: OptimizerState, path: str) -> Any:
        if "optimizer" in self._unseen:
            return self._put(_NotSeen(path), path)
        tensors = self._tensors(state.tensors, f"{path}.tensors")
        numbers = self._value(dict(state.numbers), f"{path}.numbers")
        return self._put(OptimizerState(tensors, numbers), path)

    # -- everything else ------------------------------------------------------------------------------------------

    def _value(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, _CONSTANTS):
            self._ask(path, value, path.removeprefix("f."))
            return value
        if isinstance(value, (int, float)):
            return self._put(Number(self.ledger, path, value), path)
        if isinstance(value, Tensors):
            return self._tensors(value, path)
        if isinstance(value, OptimizerState):
            return self._optimizer(value, path)
        if isinstance(value, Window):
            return self._window(value, path)
        return self._container(value, path)

    def _tensor(self, tensor: Tensor, path: str) -> Tensor:
        free = self._free(path, tensor.shape) if tensor.is_contiguous() else frozenset[int]()
        about = path.removeprefix("f.")
        fake = self._fake(tensor, Input(path), free)
        if free:
            code = f"({path}.ndim, {path}.is_contiguous(), {path}.dtype, {path}.device)"
            self._ask(code, (tensor.ndim, True, tensor.dtype, tensor.device), about)
        elif tensor.ndim:
            code = f"({path}.shape, {path}.stride(), {path}.dtype, {path}.device)"
            self._ask(code, (tensor.shape, tensor.stride(), tensor.dtype, tensor.device), about)
        else:
            self._ask(f"({path}.ndim, {path}.dtype, {path}.device)", (0, tensor.dtype, tensor.device), about)
        for place, size in enumerate(fake.shape):
            at = f"{path}.shape[{place}]"
            if isinstance(size, torch.SymInt) and self.ledger.sizes.setdefault(size.node.expr, at) != at:
                self._ask(f"{at} == {self.ledger.sizes[size.node.expr]}", True, about)
            elif isinstance(size, torch.SymInt):
                self._ask(f"{at} > 1", True, about)
            elif free:
                self._ask(at, size, about)
        return self._put(fake, path)

    def _fake(self, tensor: Tensor, found: Input, free: frozenset[int] = frozenset()) -> Tensor:
        """A fake of its own for each place: what is the same tensor now may be two in the next step."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            kind = type(tensor).__name__ if tensor.layout is torch.strided else "sparse tensor"
            raise Untraceable(f"{found.code.removeprefix('f.')} is a {kind}")
        if tensor.requires_grad and (tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)):
            raise Untraceable(f"{found.code.removeprefix('f.')} has a parameter with hooks")
        if free:
            dims = [DimDynamic.DYNAMIC if place in free else DimDynamic.STATIC for place in range(tensor.ndim)]
            context = StatelessSymbolicContext(dynamic_sizes=dims)  # pyright: ignore[reportCallIssue]
            fake = self.mode.from_tensor(tensor.detach().clone(), symbolic_context=context)
        else:
            with self.mode:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        fake.requires_grad_(tensor.requires_grad)
        self.inputs.append(found)
        self.fakes.append(fake)
        return fake

    def _container(self, value: Any, path: str) -> Any:
        """What holds other things: tuples, lists, mappings, records, and what torch's pytree knows."""
        kind = type(value)
        if isinstance(value, (tuple, list)):
            items: list[Any] = list(value)  # pyright: ignore[reportUnknownArgumentType]
            self._ask(f"(type({path}), len({path}))", (kind, len(items)), path.removeprefix("f."))
            lifted = [self._value(item, f"{path}[{i}]") for i, item in enumerate(items)]
            return self._put(kind(*lifted) if hasattr(kind, "_fields") else kind(lifted), path)
        if isinstance(value, Mapping):
            entries: dict[Any, Any] = dict(value)  # pyright: ignore[reportUnknownArgumentType]
            self._ask(f"(type({path}), *{path})", (kind, *entries), path.removeprefix("f."))
            names = {key: self.source.constant(key) for key in entries}
            lifted = {key: self._value(entry, f"{path}[{names[key]}]") for key, entry in entries.items()}
            return self._put(lifted if kind is dict else kind(lifted), path)
        fields = _fields(kind)
        if fields is not None:
            if path not in _OF_ONE_KIND:
                self._ask(f"type({path})", kind, path.removeprefix("f."))
            return self._put(_with(value, {n: self._value(getattr(value, n), f"{path}.{n}") for n in fields}), path)
        if kind in pytree.SUPPORTED_NODES:
            node = pytree.SUPPORTED_NODES[kind]
            children, context = node.flatten_fn(value)
            parts = self.source.name(functools.partial(_children, node.flatten_fn))
            self._ask(f"(type({path}), len({parts}({path})))", (kind, len(children)), path.removeprefix("f."))
            lifted = [self._value(child, f"{parts}({path})[{i}]") for i, child in enumerate(children)]
            return self._put(node.unflatten_fn(lifted, context), path)
        if not (isinstance(value, _LASTING) or callable(value)):
            cure = "make it a tensor, register its class as a pytree, or leave it out"
            raise Untraceable(f"{path.removeprefix('f.')} is a {kind.__name__}, which cannot be looked into: {cure}")
        self._ask(f"{path} is {self.source.name(value)}", True, path.removeprefix("f."))
        return value


def _children(flatten: Callable[[Any], tuple[list[Any], Any]], value: Any) -> list[Any]:
    return flatten(value)[0]


def _shapes() -> ShapeEnv:
    """An environment in which what depends on the values of tensors is refused."""
    return ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)


def _fields(kind: type[Any]) -> list[str] | None:
    """The names of the fields of a class that attrs or dataclasses made; None for any other."""
    if attrs.has(kind):
        return [field.name for field in attrs.fields(kind)]
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None


def _with(record: Any, values: Mapping[str, Any]) -> Any:
    """The record with these values in its fields, unchecked: its own checks are on numbers."""
    new = copy.copy(record)
    for name, value in values.items():
        object.__setattr__(new, name, value)
    return new

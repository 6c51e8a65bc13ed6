"""`source`: where a stream begins."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, cast

from torch import Tensor
from torch.utils.data import IterableDataset
from torchdata.nodes import BaseNode

from pipeline._checks import whole
from pipeline.errors import PlaceError, SettingError, StreamError
from pipeline.stream._epochs import tell_epoch
from pipeline.stream._guard import Errors
from pipeline.stream._noted import number
from pipeline.stream._rows import Rows, are_columns, tensors_in
from pipeline.stream.node import Node

__all__ = ["source"]

_ONCE = (
    "A generator or another iterator can be read only once, and only on from where it is: give a function of the "
    "epoch that makes it, `source(lambda epoch: make())`, or a list"
)


def source(data: Any, *, seed: int | None = 0, errors: Errors = "raise") -> Node:
    """The stream of what `data` holds, in its order.

    Data that can be read at any place (a map-style dataset, a list; or tensors: one, a tuple, NamedTuple or dict of
    them, a `TensorDataset` or a `Subset` of one) is resumed, shuffled and shared out without reading it. What can only
    be read from its beginning (any other iterable, or a function of the epoch that gives one) is resumed by reading up
    to the place, or through its own `state_dict` and `load_state_dict` where it has them. A generator has no way back.
    `set_epoch` is called where there is one: make one source of such data, for however many streams. A node of
    torchdata keeps its own state.

    While an item of a map-style dataset is made (or a batch of them), the default generators of torch, Python and numpy
    are set from the seed and the item's place, and put back afterwards; not in threads. That takes some 0.07 ms. Of
    data that is read in a row they are set where the processes of a `map` work on an item.

    Args:   data: any of these, or a stream, which stays as it is; seed: of those draws, None to leave the generators
            alone; errors: "raise", or "skip" for None in place of an item that could not be made, of such a dataset.
    Raises: SettingError for what is none of these; a set has no order of its own.
    """
    if seed is not None:
        whole("source(seed)", seed, None)
    if isinstance(data, Node):
        if errors != "raise":
            cure = "Tell the part of it that makes the items."
            raise SettingError("source(errors)", "'raise' for a stream that is there already", errors, cure)
        return data
    tensors = tensors_in(data)
    if tensors is not None:
        return tensors
    if isinstance(data, Tensor):
        raise SettingError("source(data)", "a tensor with a row for each item", "one of no dimension")
    if isinstance(data, Mapping) and any(isinstance(value, Tensor) for value in data.values()):
        others = [name for name, value in data.items() if not are_columns(value)]
        cure = "Add in a `map` what is the same for all items."
        raise SettingError(
            "source(data)", "a dict of tensors that all have a row for each item", others or type(data), cure
        )
    if isinstance(data, (Set, Mapping, str, bytes)):
        cure = "Give a list, `sorted(…)` of it; `lines(path)` reads a file."
        raise SettingError("source(data)", "a dataset or an iterable with an order of its own", data, cure)
    is_iterable = isinstance(data, (IterableDataset, BaseNode)) or not hasattr(data, "__getitem__")
    if not is_iterable and hasattr(data, "__len__"):
        return Rows(cast("Sequence[Any]", data), seed, errors)
    if errors != "raise":
        cure = "Put what may fail into a `map` with errors='skip'."
        raise SettingError("source(errors)", "'raise' for what is read in a row", errors, cure)
    node = _in_a_row(data)
    node.defaults_seed = seed or 0
    return node


def _in_a_row(data: Any) -> Node:
    """The stream of what can only be read from its beginning."""
    if isinstance(data, BaseNode):
        return _Foreign(cast("BaseNode[Any]", data))
    if isinstance(data, Iterator):
        return _Once(cast("Iterator[Any]", data))
    if isinstance(data, Iterable):
        return _Iterated(cast("Iterable[Any]", data), None)
    if callable(data):
        return _Iterated(None, cast("Callable[[int], Iterable[Any]]", data))
    raise SettingError("source(data)", "a dataset with a length, an iterable, or a function of the epoch", data)


class _Iterated(Node):
    """An iterable, begun anew in each epoch, or what a function of the epoch gives."""

    kind = "iterable"
    steady = True

    def __init__(self, data: Iterable[Any] | None, make: Callable[[int], Iterable[Any]] | None) -> None:
        super().__init__()
        self._data, self._make = data, make
        self._epoch, self._items = 0, 0
        self._inner: dict[str, Any] | None = None  # the state that the iterable is to begin at
        self._iterator: Iterator[Any] | None = None
        self._keeps = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")

    def next(self) -> Any:
        try:
            if self._iterator is None:
                self._iterator = self._opened()
            item = next(self._iterator)
        except StopIteration:
            self.to_epoch(self._epoch + 1)
            raise
        except BaseException:
            if self._keeps and self._items:
                self._inner = None  # it is somewhere in between now: read up to the place
            self._iterator = None
            raise
        self._items += 1
        return item

    def _opened(self) -> Iterator[Any]:
        data: Any = self._data if self._make is None else self._make(self._epoch)
        tell_epoch(data, self._epoch)
        if self._inner is not None:
            data.load_state_dict(copy.deepcopy(self._inner))
            return iter(data)
        iterator = iter(data)
        for passed in range(self._items):
            try:
                next(iterator)
            except StopIteration:
                raise PlaceError(repr(self), f"in its {passed} items", f"item {self._items}") from None
        return iterator

    @property
    def epoch(self) -> int:
        return self._epoch

    def to_epoch(self, epoch: int) -> None:
        self._epoch, self._items, self._inner, self._iterator = epoch, 0, None, None

    def get_state(self) -> dict[str, Any]:
        inner = self._inner
        if self._keeps and self._items and self._iterator is not None:
            inner = cast("Any", self._data).state_dict()
        return {"epoch": self._epoch, "items": self._items, "inner": copy.deepcopy(inner)}

    def load(self, state: Mapping[str, Any]) -> None:
        epoch, items, inner = number(state, "epoch"), number(state, "items"), state["inner"]
        self.to_epoch(epoch)
        self._items, self._inner = items, inner if self._keeps else None

    def __len__(self) -> int:
        return len(cast("Sequence[Any]", self._data)) if hasattr(self._data, "__len__") else super().__len__()

    def __repr__(self) -> str:
        return f"source({type(self._data).__name__ if self._make is None else self._make!r})"


class _Once(Node):
    """An iterator: it has one epoch, and no way back."""

    kind = "iterator"
    steady = True

    def __init__(self, iterator: Iterator[Any]) -> None:
        super().__init__()
        self._iterator = iterator
        self._place = self._live = (0, 0)  # epoch and items: where the node stands, and where the iterator does

    def next(self) -> Any:
        if self._place != self._live:
            raise StreamError(f"{_ONCE}.")
        epoch, items = self._place
        try:
            item = next(self._iterator)
        except StopIteration:
            self._place, self._live = (epoch + 1, 0), (-1, 0)
            raise
        except BaseException:
            self._live = (-1, 0)
            raise
        self._place = self._live = (epoch, items + 1)
        return item

    @property
    def epoch(self) -> int:
        return self._place[0]

    def to_epoch(self, epoch: int) -> None:
        self._place = (epoch, 0)

    def get_state(self) -> dict[str, Any]:
        epoch, items = self._place
        return {"epoch": epoch, "items": items}

    def load(self, state: Mapping[str, Any]) -> None:
        place = (number(state, "epoch"), number(state, "items"))
        if place not in (self._live, self._place):
            raise PlaceError(repr(self), "that it stands at", f"item {place[1]} of epoch {place[0]}", f"{_ONCE}.")
        self._place = place

    def __repr__(self) -> str:
        return f"source({type(self._iterator).__name__})"


class _Foreign(Node):
    """A node of torchdata, which keeps its own state."""

    kind = "torchdata"

    def __init__(self, node: BaseNode[Any]) -> None:
        super().__init__()
        self._node, self._epoch = node, 0

    def next(self) -> Any:
        try:
            return next(self._node)
        except StopIteration:
            self.to_epoch(self._epoch + 1)
            raise

    @property
    def epoch(self) -> int:
        return self._epoch

    def to_epoch(self, epoch: int) -> None:
        self._node.reset(None)
        self._epoch = epoch

    def get_state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "inner": copy.deepcopy(self._node.state_dict())}

    def load(self, state: Mapping[str, Any]) -> None:
        epoch = number(state, "epoch")
        self._node.reset(copy.deepcopy(state["inner"]))
        self._epoch = epoch

    def __repr__(self) -> str:
        return f"source({type(self._node).__name__})"

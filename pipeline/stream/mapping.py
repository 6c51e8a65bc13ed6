"""`map` and `filter`: a function of the user's on each item."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from pipeline._checks import whole
from pipeline._declared import name_of
from pipeline.errors import SettingError
from pipeline.stream._chained import Chained
from pipeline.stream._defaults import defaults_from
from pipeline.stream._guard import Errors, Guard
from pipeline.stream._indexed import Indexed, Indices, Layer, Pass, numbers
from pipeline.stream._keys import DEFAULTS, ITEM, generator, key
from pipeline.stream._noted import number
from pipeline.stream._parallel import Parallel, Workers, checked
from pipeline.stream.node import Node
from pipeline.stream.sources import source

__all__ = ["filter", "map"]


def map(
    data: Any,
    function: Callable[..., Any],
    *,
    seed: int | None = None,
    errors: Errors = "raise",
    workers: Workers = None,
) -> Node:
    """`function(item)` in place of each item. None stands for nothing, and passes by.

    With a `seed` it is `function(item, generator)`: a `torch.Generator` that starts from the seed, the epoch and the
    item's place, so that an item comes out the same whoever works on it, here, in threads or in processes. The default
    generators of torch, Python and numpy are set likewise in processes, and here for data that can be read at any
    place; threads leave them alone.

    Args:   data: a stream, or what `source` takes; errors: "raise", or "skip" for None in place of an item on which the
            function raised, counted in `skipped`; workers: see `prefetch`.
    Raises: SettingError for what cannot be called.
    """
    if not callable(function):
        raise SettingError("map(function)", "a function of an item", function)
    node, crew = source(data), checked("map(workers)", workers)
    if seed is not None:
        whole("map(seed)", seed, None)
    call = _Call(function, seed, errors, node)
    if isinstance(node, Indexed):
        mapped = _MappedRows(node, call)
        return mapped if crew is None else Parallel(mapped, crew)
    return _Mapped(node, call) if crew is None else Parallel(_Numbered(node, call), crew, call)


class _Call:
    """The function with what it needs besides the item; the job of a worker."""

    def __init__(self, function: Callable[..., Any], seed: int | None, errors: Errors, node: Node) -> None:
        self.function, self.seed = function, seed
        self.level, self.defaults_seed = node.depth(ITEM), node.defaults_seed
        self.guard = Guard(f"map({name_of(function)})", errors)

    def on(self, item: Any, place: Callable[[], tuple[int, int]]) -> Any:
        """The function on one item."""
        if item is None:
            return None
        try:
            if self.seed is None:
                return self.function(item)
            return self.function(item, generator(key(self.seed, ITEM, self.level, *place())))
        except Exception as error:
            epoch, index = place()
            return self.guard.take(error, f"item {index} of epoch {epoch}")

    def __call__(self, *payload: Any) -> Any:
        item, epoch, index = payload
        with defaults_from(key(self.defaults_seed, DEFAULTS, self.level, epoch, index)):
            return self.on(item, lambda: (epoch, index))

    @property
    def skipped(self) -> int:
        return self.guard.skipped

    def settings(self) -> tuple[str, ...]:
        seed = () if self.seed is None else (f"seed={self.seed}",)
        return (name_of(self.function), *seed, *(("errors='skip'",) if self.guard.errors == "skip" else ()))


class _MappedRows(Layer):
    """A function on items that are made from their places."""

    name = "map"
    purpose = ITEM

    def __init__(self, node: Indexed, call: _Call) -> None:
        super().__init__(node)
        self._call = call
        self.is_plain = node.is_plain and call.seed is not None

    def fetch(self, at: Pass, indices: Indices) -> list[Any]:
        items = zip(self.source.fetch(at, indices), numbers(indices), strict=True)
        return [self._call.on(item, functools.partial(self.locate, at, index)) for item, index in items]

    @property
    def skipped(self) -> int:
        return super().skipped + self._call.skipped

    def settings(self) -> tuple[str, ...]:
        return self._call.settings()


class _Numbered(Chained):
    """Items with their places: what a worker is given."""

    name = kind = "map"
    purpose = ITEM

    def __init__(self, node: Node, call: _Call) -> None:
        super().__init__(node)
        self._call, self._index = call, 0

    def next(self) -> Any:
        place = self.address(self.epoch, self._index)
        try:
            item = self.source.next()
        except StopIteration:
            self._index = 0
            raise
        self._index += 1
        return item, *place

    def skip(self, n: int) -> int:
        passed = self.source.skip(n)
        self._index = self._index + passed if passed == n else 0
        return passed

    def to_epoch(self, epoch: int) -> None:
        super().to_epoch(epoch)
        self._index = 0

    def get_state(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(), "index": self._index}

    def load(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        self._index = number(state, "index")

    def __len__(self) -> int:
        return len(self.source)

    def settings(self) -> tuple[str, ...]:
        return self._call.settings()


class _Mapped(_Numbered):
    """A function on items as they are read."""

    def next(self) -> Any:
        item, epoch, index = super().next()
        return self._call.on(item, lambda: (epoch, index))

    @property
    def skipped(self) -> int:
        return super().skipped + self._call.skipped


def filter(data: Any, predicate: Callable[[Any], object]) -> Node:
    """The items for which `predicate(item)` is true. None stands for nothing, and passes by.

    How many there are is known only at the end, so that the stream has no length.

    Raises: SettingError for what cannot be called.
    """
    if not callable(predicate):
        raise SettingError("filter(predicate)", "a function of an item", predicate)
    return _Filtered(source(data), predicate)


class _Filtered(Chained):
    """The items of a kind."""

    name = kind = "filter"

    def __init__(self, node: Node, predicate: Callable[[Any], object]) -> None:
        super().__init__(node)
        self._predicate = predicate
        self._guard = Guard(f"filter({name_of(predicate)})", "raise")

    def next(self) -> Any:
        while True:
            item = self.source.next()
            try:
                if item is None or self._predicate(item):
                    return item
            except Exception as error:
                self._guard.take(error, f"an item of epoch {self.epoch}")

    def settings(self) -> tuple[str, ...]:
        return (name_of(self._predicate),)

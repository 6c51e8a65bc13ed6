"""Streams over data that can be read at any place: item `i` of an epoch is a function of the epoch and of `i` alone.

Their whole state is the epoch and a row: how many rows of the epoch's order are used up, on all ranks together. What
is left of the epoch begins there, however it is then batched and shared out. There are two kinds:

- an `Order` says in which order the rows of its source come, and counts rows itself: `shuffle`, `weighted`;
- a `Layer` makes items out of its source's, and leaves the counting to the order below: `map`, `batch`, `shard`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

import attrs
from torch import Tensor

from pipeline.errors import PlaceError
from pipeline.stream._defaults import defaults_from
from pipeline.stream._keys import DEFAULTS, key
from pipeline.stream._noted import number
from pipeline.stream.node import Node

Indices = range | Tensor


@attrs.frozen
class Pass:
    """One pass over the rows of an epoch, from row `start` on."""

    epoch: int = 0
    start: int = 0


class Indexed(Node):
    """A node that can make any of its items at once; see above."""

    kind = "rows"
    steady = True

    gathers: bool = False
    """Whether `gather` makes a batch without making its items."""
    is_plain: bool = True
    """Whether making an item runs no code of the user's, which might draw."""

    def __init__(self, *sources: Indexed) -> None:
        super().__init__(*sources)
        self._at, self._given = Pass(), 0
        self._end: int | None = None

    # -- for each class to define -------------------------------------------------------------------------------

    @property
    def unit(self) -> int:
        """How many rows one item uses up, on all ranks together."""
        return 1

    @property
    def rows(self) -> int:
        """How many rows an epoch has."""
        raise NotImplementedError

    def count(self, start: int) -> int:
        """How many items a pass from row `start` has."""
        raise NotImplementedError

    def fetch(self, at: Pass, indices: Indices) -> list[Any]:
        """The items of a pass at these indices."""
        raise NotImplementedError

    def gather(self, at: Pass, indices: Indices) -> Any:
        """The same as one batch, where the node `gathers`; None for a batch of nothing."""
        raise NotImplementedError

    def locate(self, at: Pass, index: int) -> tuple[int, int]:
        """What tells item `index` of a pass from all others, on all ranks and in all epochs."""
        raise NotImplementedError

    # -- the same for all ------------------------------------------------------------------------------------------

    def make(self, at: Pass, index: int) -> Any:
        """One item, with the default generators set from its place where they might be drawn from."""
        if self.is_plain:
            return self.fetch(at, range(index, index + 1))[0]
        with defaults_from(key(self.defaults_seed, DEFAULTS, *self.locate(at, index))):
            return self.fetch(at, range(index, index + 1))[0]

    def next(self) -> Any:
        item = self.make(*self._next_place())
        self._given += 1
        return item

    def next_place(self) -> tuple[Pass, int]:
        """Where the next item lies, in place of the item itself."""
        place = self._next_place()
        self._given += 1
        return place

    def _next_place(self) -> tuple[Pass, int]:
        if self._given >= self._last():
            self.to_epoch(self.epoch + 1)
            raise StopIteration
        return self._at, self._given

    def skip(self, n: int) -> int:
        there = min(n, self._last() - self._given)
        self._given += there
        if there < n:
            self.to_epoch(self.epoch + 1)
        return there

    def _last(self) -> int:
        if self._end is None:
            self._end = self.count(self._at.start)
        return self._end

    @property
    def epoch(self) -> int:
        return self._at.epoch

    def to_epoch(self, epoch: int) -> None:
        self._at, self._given, self._end = Pass(epoch), 0, None

    def get_state(self) -> dict[str, Any]:
        row = min(self._at.start + self._given * self.unit, self.rows)
        return {"epoch": self._at.epoch, "row": row}

    def load(self, state: Mapping[str, Any]) -> None:
        epoch, row = number(state, "epoch"), number(state, "row")
        if row > self.rows:
            raise PlaceError(repr(self), f"in its {self.rows} rows", f"row {row}")
        self._at, self._given, self._end = Pass(epoch, row), 0, None

    def address(self, epoch: int, index: int) -> tuple[int, int]:
        return self.locate(Pass(epoch), index)

    def joined(self) -> Self:
        return copy.copy(self)  # whoever reads through it has a place of its own

    def __len__(self) -> int:
        return super().__len__() if self.is_endless else self.count(0)


class Order(Indexed):
    """The rows of a source in another order, or others of them; counts its own rows."""

    def __init__(self, source: Indexed) -> None:
        super().__init__(source)
        self.source: Indexed = self.sources[0]  # pyright: ignore[reportAttributeAccessIssue]
        self.gathers, self.is_plain = source.gathers, source.is_plain

    def places(self, epoch: int, indices: Indices) -> tuple[int, Indices]:
        """In which epoch of the source, and where in it, these rows lie."""
        raise NotImplementedError

    @property
    def world(self) -> int:
        return self.ranks  # its rows are those of one rank

    def count(self, start: int) -> int:
        return self.rows - start

    def fetch(self, at: Pass, indices: Indices) -> list[Any]:
        epoch, places = self.places(at.epoch, shifted(indices, at.start))
        return self.source.fetch(Pass(epoch), places)

    def gather(self, at: Pass, indices: Indices) -> Any:
        epoch, places = self.places(at.epoch, shifted(indices, at.start))
        return self.source.gather(Pass(epoch), places)

    def locate(self, at: Pass, index: int) -> tuple[int, int]:
        return self.source.locate(Pass(at.epoch), at.start + index)


class Layer(Indexed):
    """Items made out of a source's; its rows are those of the order below."""

    def __init__(self, source: Indexed) -> None:
        super().__init__(source)
        self.source: Indexed = self.sources[0]  # pyright: ignore[reportAttributeAccessIssue]
        self.is_plain = source.is_plain

    @property
    def unit(self) -> int:
        return self.source.unit

    @property
    def rows(self) -> int:
        return self.source.rows

    @property
    def order(self) -> str:
        return self.source.order

    @property
    def world(self) -> int:
        return self.source.world

    def count(self, start: int) -> int:
        return self.source.count(start)

    def locate(self, at: Pass, index: int) -> tuple[int, int]:
        return self.source.locate(at, index)


def shifted(indices: Indices, by: int) -> Indices:
    """The same indices, counted from `by` earlier."""
    return scaled(indices, 1, by) if by else indices


def scaled(indices: Indices, times: int, plus: int) -> Indices:
    """`index * times + plus` for each of them; a range stays one."""
    if isinstance(indices, range):
        return range(indices.start * times + plus, indices.stop * times + plus, indices.step * times)
    return indices * times + plus


def numbers(indices: Indices) -> list[int]:
    """The indices as a list."""
    return list(indices) if isinstance(indices, range) else indices.tolist()

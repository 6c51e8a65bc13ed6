"""`take` and `repeat`: what one epoch is to be."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import default_collate

from pipeline._checks import whole
from pipeline.errors import StreamError
from pipeline.stream._chained import Chained
from pipeline.stream._indexed import Indexed, Indices, Order, Pass, numbers, shifted
from pipeline.stream._noted import number
from pipeline.stream._transparent import Transparent
from pipeline.stream.node import Node
from pipeline.stream.sources import source

__all__ = ["repeat", "take"]

_ENDLESS = 1 << 32  # passes


def take(data: Any, n: int) -> Node:
    """The first n items of each epoch, and nothing of the rest.

    Raises: SettingError for n below 1.
    """
    whole("take(n)", n)
    node = source(data)
    return _TakenRows(node, n) if isinstance(node, Indexed) else _Taken(node, n)


class _TakenRows(Order):
    """The first of the rows."""

    name = "take"

    def __init__(self, node: Indexed, n: int) -> None:
        super().__init__(node)
        self._n = n

    @property
    def rows(self) -> int:
        return min(self._n, self.source.count(0))

    @property
    def order(self) -> str:
        return f"the first {self._n} of {self.source.order}"

    @property
    def is_endless(self) -> bool:
        return False

    def places(self, epoch: int, indices: Indices) -> tuple[int, Indices]:
        return epoch, indices

    def settings(self) -> tuple[str, ...]:
        return (str(self._n),)


class _Taken(Chained):
    """The first of the items."""

    name = kind = "take"

    def __init__(self, node: Node, n: int) -> None:
        super().__init__(node)
        self._n, self._given = n, 0

    def next(self) -> Any:
        if self._given == self._n:
            self.to_epoch(self.epoch + 1)
            raise StopIteration
        try:
            item = self.source.next()
        except StopIteration:
            self._given = 0
            raise
        self._given += 1
        return item

    def to_epoch(self, epoch: int) -> None:
        super().to_epoch(epoch)
        self._given = 0

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "given": self._given}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._given = number(state, "given")

    @property
    def order(self) -> str:
        return f"the first {self._n}"

    def __len__(self) -> int:
        return min(self._n, len(self.source))

    def settings(self) -> tuple[str, ...]:
        return (str(self._n),)


def repeat(data: Any, passes: int | None = None) -> Node:
    """Several epochs of the stream as one, each in its own order; without `passes`, epochs without an end.

    Raises: SettingError for `passes` below 1.
    """
    if passes is not None:
        whole("repeat(passes)", passes)
    node = source(data)
    kind = _RepeatedRows if isinstance(node, Indexed) else _Repeated
    return kind(node, _ENDLESS if passes is None else passes)  # pyright: ignore[reportArgumentType]


def _passes(passes: int) -> tuple[str, ...]:
    return () if passes == _ENDLESS else (str(passes),)


class _RepeatedRows(Order):
    """Epochs of the source in a row, by place."""

    name = "repeat"

    def __init__(self, node: Indexed, passes: int) -> None:
        super().__init__(node)
        self._passes, self._each = passes, self.source.count(0)

    @property
    def is_endless(self) -> bool:
        return self._passes == _ENDLESS

    @property
    def rows(self) -> int:
        return self._passes * self._each

    @property
    def order(self) -> str:
        return f"{self._passes} times {self.source.order}"

    def _runs(self, at: Pass, indices: Indices) -> list[tuple[Pass, Indices]]:
        """The rows by the epoch of the source that they are in."""
        rows, first = shifted(indices, at.start), at.epoch * self._passes
        if not len(rows):
            return []
        begins, ends = int(rows[0]) // self._each, int(rows[-1]) // self._each
        if isinstance(rows, range) and begins == ends:
            return [(Pass(first + begins), shifted(rows, -begins * self._each))]
        runs = itertools.groupby(numbers(rows), lambda row: row // self._each)
        return [(Pass(first + of), torch.tensor([row % self._each for row in run])) for of, run in runs]

    def fetch(self, at: Pass, indices: Indices) -> list[Any]:
        return [item for where, rows in self._runs(at, indices) for item in self.source.fetch(where, rows)]

    def gather(self, at: Pass, indices: Indices) -> Any:
        runs = self._runs(at, indices)
        if len(runs) == 1:
            return self.source.gather(*runs[0])
        return default_collate(self.fetch(at, indices)) if runs else None

    def locate(self, at: Pass, index: int) -> tuple[int, int]:
        row = at.start + index
        of = min(row // self._each, self._passes - 1)  # who draws more than there is stays in the last one
        return self.source.locate(Pass(at.epoch * self._passes + of), row - of * self._each)

    def settings(self) -> tuple[str, ...]:
        return _passes(self._passes)


class _Repeated(Transparent):
    """Epochs of the source in a row; which of them this is, the source's epoch tells."""

    name = "repeat"

    def __init__(self, node: Node, passes: int) -> None:
        super().__init__(node)
        self._passes = passes

    def next(self) -> Any:
        has_ended = False
        while True:
            is_last = (self.source.epoch + 1) % self._passes == 0
            try:
                return self.source.next()
            except StopIteration:
                if is_last:
                    raise
                if has_ended and self.is_endless:
                    raise StreamError(f"{self!r} would never end: its source gave nothing in a whole epoch.") from None
                has_ended = True

    @property
    def is_endless(self) -> bool:
        return self._passes == _ENDLESS

    @property
    def epoch(self) -> int:
        return self.source.epoch // self._passes

    def to_epoch(self, epoch: int) -> None:
        self.source.to_epoch(epoch * self._passes)

    def __len__(self) -> int:
        return Node.__len__(self) if self.is_endless else self._passes * len(self.source)

    def settings(self) -> tuple[str, ...]:
        return _passes(self._passes)

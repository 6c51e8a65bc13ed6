"""`batch` and `split`: items into batches, and batches into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import default_collate

from pipeline._checks import whole
from pipeline.errors import PlaceError, SettingError
from pipeline.stream._chained import Chained
from pipeline.stream._collate import Collate, collated
from pipeline.stream._indexed import Indexed, Indices, Layer, Pass, numbers
from pipeline.stream._noted import number
from pipeline.stream._trees import pieces
from pipeline.stream.node import Node
from pipeline.stream.sources import source

__all__ = ["batch", "split"]


def batch(data: Any, size: int, *, drop_last: bool = False, collate: Collate = default_collate) -> Node:
    """`collate(items)` of `size` items at a time; the last batch of an epoch may be shorter.

    None among the items stands for nothing and is left out; a batch of nothing else is None, which a fold passes over.
    Batches of tensors (a `TensorDataset`, a tuple or dict of tensors) are read from them at once, and a dataset with
    `__getitems__` is asked for all items of a batch together.

    Args:   data: a stream, or what `source` takes; drop_last: leave the short one out; collate: `list` for the items as
            they are.
    Raises: SettingError for a `size` below 1.
    """
    whole("batch(size)", size)
    if not callable(collate):
        raise SettingError("batch(collate)", "a function of a list of items", collate)
    node = source(data)
    kind = _BatchedRows if isinstance(node, Indexed) else _Batched
    return kind(node, size, drop_last, collate)  # pyright: ignore[reportArgumentType]


class _BatchedRows(Layer):
    """Batches that are made from their places."""

    name = "batch"

    def __init__(self, node: Indexed, size: int, drop_last: bool, collate: Collate) -> None:
        super().__init__(node)
        self._size, self._drop_last, self._collate = size, drop_last, collate
        self._gathers = node.gathers and collate is default_collate
        self.is_plain = node.is_plain and collate in (default_collate, list)

    @property
    def unit(self) -> int:
        return self.source.unit * self._size

    def count(self, start: int) -> int:
        there = self.source.count(start)
        return there // self._size if self._drop_last else -(-there // self._size)

    def fetch(self, at: Pass, indices: Indices) -> list[Any]:
        there = self.source.count(at.start)
        spans = [range(i * self._size, min((i + 1) * self._size, there)) for i in numbers(indices)]
        if self._gathers:
            return [self.source.gather(at, span) for span in spans]
        return [collated(self._collate, self.source.fetch(at, span)) for span in spans]

    def locate(self, at: Pass, index: int) -> tuple[int, int]:
        return self.source.locate(at, index * self._size)

    def settings(self) -> tuple[str, ...]:
        return _settings(self._size, self._drop_last)


class _Batched(Chained):
    """Batches of items as they are read."""

    name = kind = "batch"

    def __init__(self, node: Node, size: int, drop_last: bool, collate: Collate) -> None:
        super().__init__(node)
        self._size, self._drop_last, self._collate = size, drop_last, collate

    def next(self) -> Any:
        items = self.pull(self._size)
        if not items or (self._drop_last and len(items) < self._size):
            raise self.end()
        return collated(self._collate, items)

    def address(self, epoch: int, index: int) -> tuple[int, int]:
        return self.source.address(epoch, index * self._size)

    def __len__(self) -> int:
        there = len(self.source)
        return there // self._size if self._drop_last else -(-there // self._size)

    def settings(self) -> tuple[str, ...]:
        return _settings(self._size, self._drop_last)


def _settings(size: int, drop_last: bool) -> tuple[str, ...]:
    return (str(size), *(("drop_last=True",) if drop_last else ()))


def split(data: Any, size: int) -> Node:
    """Each batch in micro-batches of at most `size` samples.

    A batch has as many samples as the first of its tensors that has a dimension has rows. Tensors of as many rows are
    cut, and lists of as many things that are no tensors; all else is in each micro-batch. Give the loss its weight, and
    the update is that of the whole batch.

    Raises: SettingError for a `size` below 1.
    """
    whole("split(size)", size)
    return _Split(source(data), size)


class _Split(Chained):
    """Micro-batches."""

    name = kind = "split"

    def __init__(self, node: Node, size: int) -> None:
        super().__init__(node)
        self._size = size
        self._stay(0)

    def _stay(self, given: int) -> None:
        """Nothing is read of the batch that the source stands before, of which so much was given out."""
        self._given = given
        self._starts: dict[str, Any] | None = None
        self._pieces: list[Any] = []

    def next(self) -> Any:
        if self._starts is None or self._given == len(self._pieces):
            given, starts = self._given if self._starts is None else 0, self.source.state_dict()
            try:
                found = pieces(self.source.next(), self._size)
            except StopIteration:
                self._stay(0)
                raise
            if given and given >= len(found):
                raise PlaceError(repr(self), f"in a batch of {len(found)} micro-batches", f"number {given} of it")
            self._starts, self._pieces, self._given = starts, found, given
        self._given += 1
        return self._pieces[self._given - 1]

    def to_epoch(self, epoch: int) -> None:
        super().to_epoch(epoch)
        self._stay(0)

    def get_state(self) -> dict[str, Any]:
        if self._starts is None:
            return {"source": self.source.state_dict(), "given": self._given}
        if self._given == len(self._pieces):
            return {"source": self.source.state_dict(), "given": 0}
        return {"source": self._starts, "given": self._given}

    def load(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        self._stay(number(state, "given"))

    @property
    def order(self) -> str:
        return f"micro-batches of {self._size}"

    def settings(self) -> tuple[str, ...]:
        return (str(self._size),)

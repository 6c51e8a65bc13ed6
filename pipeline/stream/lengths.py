"""Batches of items of like length, so that little is padded: `bucket_by_length` and `token_budget`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate

from pipeline._checks import whole
from pipeline.errors import SettingError, StreamError
from pipeline.stream._collate import Collate, collated
from pipeline.stream._guard import Guard
from pipeline.stream._keys import generator
from pipeline.stream._pooled import Pooled
from pipeline.stream.node import Node
from pipeline.stream.sources import source

__all__ = ["bucket_by_length", "token_budget"]

Length = Callable[[Any], int]


def bucket_by_length(
    data: Any,
    size: int,
    *,
    length: Length = len,
    pool: int = 100,
    drop_last: bool = False,
    collate: Collate = default_collate,
    seed: int = 0,
) -> Node:
    """Batches of `size` items of like length.

    Items for `pool` batches are read at a time, sorted by length, cut into batches, and the batches given out in random
    order. The larger the pool, the less is padded, and the more is read again on resuming. None is left out, though
    `len` cannot know of it.

    Args:   data: a stream, or what `source` takes; length: of an item; drop_last: leave out an epoch's short batch;
            collate: makes a batch of a list of items: give one that pads.
    Raises: SettingError for a `size` or a `pool` below 1.
    """
    whole("bucket_by_length(size)", size)
    whole("bucket_by_length(pool)", pool)
    return _Bucketed(source(data), size, length, pool, drop_last, collate, seed)


def token_budget(
    data: Any,
    tokens: int,
    *,
    length: Length = len,
    pool: int = 1000,
    collate: Collate = default_collate,
    seed: int = 0,
) -> Node:
    """Batches of at most `tokens` tokens, padding counted: the number of items times the length of the longest.

    `pool` items are read at a time, sorted by length, and cut where one more would not fit; the batches are given out
    in random order. As batches are of different sizes, give the loss its weight: `Loss.sum(…, weight=tokens)`.

    Args:   data: a stream, or what `source` takes; length: of an item; collate: makes a batch of a list of items: give
            one that pads.
    Raises: SettingError for `tokens` or `pool` below 1; StreamError for an item that is longer than the budget.
    """
    whole("token_budget(tokens)", tokens)
    whole("token_budget(pool)", pool)
    return _Budgeted(source(data), tokens, length, pool, collate, seed)


class _ByLength(Pooled):
    """A pool sorted by length, cut into batches."""

    def __init__(self, node: Node, size: int, seed: int, length: Length, collate: Collate) -> None:
        super().__init__(node, size, seed)
        if not callable(length):
            raise SettingError(f"{self.name}(length)", "a function of an item", length)
        self._length, self._collate = length, collate
        self._guard = Guard(f"{self.name}(length)", "raise")

    def arranged(self, items: list[Any], of: int) -> list[Any]:
        chance = generator(of)
        shuffled = [items[place] for place in torch.randperm(len(items), generator=chance).tolist()]
        lengths = [(self._measured(item), item) for item in shuffled]
        lengths.sort(key=lambda pair: pair[0])
        batches = self.cut(lengths)
        return [batches[place] for place in torch.randperm(len(batches), generator=chance).tolist()]

    def _measured(self, item: Any) -> int:
        try:
            length = self._length(item)
            if not 0 <= length < math.inf:
                cure = "give a `length` that is 0 or more and finite"
                raise StreamError(f"{self!r} got an item of length {length}: {cure}.")
        except Exception as error:
            return self._guard.take(error, f"an item of epoch {self.epoch}") or 0
        return length

    def pull(self, n: int) -> list[Any]:
        items: list[Any] = []
        while len(items) < n and not self.ended:
            items += [item for item in super().pull(n - len(items)) if item is not None]
        return items

    def cut(self, items: list[tuple[int, Any]]) -> list[list[Any]]:
        """Batches of the items, which come with their lengths and sorted by them."""
        raise NotImplementedError

    def finished(self, given: Any) -> Any:
        return collated(self._collate, given)


class _Bucketed(_ByLength):
    """Batches of a fixed size."""

    name = kind = "bucket_by_length"

    def __init__(
        self, node: Node, size: int, length: Length, pool: int, drop_last: bool, collate: Collate, seed: int
    ) -> None:
        super().__init__(node, size * pool, seed, length, collate)
        self._each, self._drop_last = size, drop_last

    def cut(self, items: list[tuple[int, Any]]) -> list[list[Any]]:
        batches = [
            [item for _, item in items[start : start + self._each]] for start in range(0, len(items), self._each)
        ]
        return [batch for batch in batches if not self._drop_last or len(batch) == self._each]

    def __len__(self) -> int:
        there = len(self.source)
        return there // self._each if self._drop_last else -(-there // self._each)

    @property
    def order(self) -> str:
        short = ", without the short one" if self._drop_last else ""
        return f"batches of {self._each} out of {self.size} items at a time{short}, with seed {self.seed}"

    def settings(self) -> tuple[str, ...]:
        return (str(self._each), f"seed={self.seed}")


class _Budgeted(_ByLength):
    """Batches of as many items as fit."""

    name = kind = "token_budget"

    def __init__(self, node: Node, tokens: int, length: Length, pool: int, collate: Collate, seed: int) -> None:
        super().__init__(node, pool, seed, length, collate)
        self._tokens = tokens

    def cut(self, items: list[tuple[int, Any]]) -> list[list[Any]]:
        batches: list[list[Any]] = []
        for length, item in items:
            if length > self._tokens:
                cure = "cut such items first, or leave them out with `filter`"
                raise StreamError(f"{self!r} got an item of length {length}, above its budget: {cure}.")
            if batches and (len(batches[-1]) + 1) * length <= self._tokens:  # the longest so far
                batches[-1].append(item)
            else:
                batches.append([item])
        return batches

    @property
    def order(self) -> str:
        return f"batches of {self._tokens} tokens out of {self.size} items at a time, with seed {self.seed}"

    def settings(self) -> tuple[str, ...]:
        return (str(self._tokens), f"seed={self.seed}")

"""`shuffle`: a new order in every epoch."""

from __future__ import annotations

from typing import Any

import torch

from pipeline._checks import whole
from pipeline.errors import SettingError
from pipeline.stream._indexed import Indexed, Indices, Order
from pipeline.stream._keys import ORDER, generator, key
from pipeline.stream._permutation import permutation
from pipeline.stream._pooled import Pooled
from pipeline.stream.node import Node
from pipeline.stream.sources import source

__all__ = ["shuffle"]


def shuffle(data: Any, *, seed: int = 0, buffer: int = 1000) -> Node:
    """Another order in each epoch, a function of the seed and the epoch.

    Over data that can be read at any place (a map-style dataset, tensors, and what is mapped, weighted or repeated from
    them) it is a permutation of the whole epoch, worked out as it goes: no list of the indices is kept. Elsewhere
    `buffer` items are read at a time and given out in random order, so that an item moves at most that far from its
    place; more buffer is more chance, more memory and more to read again on resuming.

    Args:   data: a stream, or what `source` takes; buffer: items in memory, for what can only be read in a row.
    Raises: SettingError for a `buffer` below 1, and for rows without an end: `repeat` comes after.
    """
    whole("shuffle(buffer)", buffer)
    whole("shuffle(seed)", seed, None)
    node = source(data)
    if isinstance(node, Indexed) and node.is_endless:
        cure = "Shuffle first: `repeat(shuffle(data))`."
        raise SettingError("shuffle(data)", "data with an end", node, cure)
    return _Shuffled(node, seed) if isinstance(node, Indexed) else _Buffered(node, buffer, seed)


class _Shuffled(Order):
    """A permutation of the source's rows."""

    name = "shuffle"
    purpose = ORDER

    def __init__(self, node: Indexed, seed: int) -> None:
        super().__init__(node)
        self._seed, self._level = seed, node.depth(ORDER)
        self._kept = (-1, permutation(0, 0))  # one epoch's; replaced as a whole, since threads may read two epochs

    @property
    def rows(self) -> int:
        return self.source.count(0)

    @property
    def order(self) -> str:
        return f"{self.source.order}, shuffled with seed {self._seed}"

    def places(self, epoch: int, indices: Indices) -> tuple[int, Indices]:
        kept = self._kept
        if kept[0] != epoch:
            kept = self._kept = (epoch, permutation(self.rows, key(self._seed, ORDER, self._level, epoch)))
        return epoch, kept[1].at(indices)

    def settings(self) -> tuple[str, ...]:
        return (f"seed={self._seed}",)


class _Buffered(Pooled):
    """Some items at a time, in random order."""

    name = kind = "shuffle"

    @property
    def order(self) -> str:
        return f"shuffled {self.size} at a time with seed {self.seed}"

    def arranged(self, items: list[Any], of: int) -> list[Any]:
        return [items[place] for place in torch.randperm(len(items), generator=generator(of)).tolist()]

    def settings(self) -> tuple[str, ...]:
        return (f"seed={self.seed}", f"buffer={self.size}")

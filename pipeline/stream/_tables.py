"""What stands at each place of an order: kept as a whole, or worked out a block at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs
import torch
from torch import Tensor

_BLOCK = 1 << 12  # so many places are worked out at once
_FAR = 16  # places further apart than that are worked out one by one: a block would be mostly others


class Table(Protocol):
    """An order that can be read at any place."""

    def at(self, places: range | Tensor) -> Tensor:
        """What stands at these places."""
        ...


@attrs.frozen(eq=False)
class Kept:
    """An order in memory."""

    whole: Tensor

    def at(self, places: range | Tensor) -> Tensor:
        """What stands at these places."""
        return self.whole[_slice(places, 0)] if isinstance(places, range) else self.whole[places]


class Blocks:
    """An order of n places that `work(places)` gives. The last block is kept, for readers that go from place to place.

    Threads may read it at the same time.
    """

    def __init__(self, n: int, work: Callable[[Tensor], Tensor]) -> None:
        self._n, self._work = n, work
        self._block: tuple[int, Tensor] = (-1, torch.empty(0, dtype=torch.int64))

    def at(self, places: range | Tensor) -> Tensor:
        """What stands at these places, each below n."""
        if isinstance(places, Tensor):
            return self._work(places)
        if places.step > _FAR or not places:
            return self._work(torch.arange(places.start, places.stop, places.step))
        first, last = places[0] // _BLOCK, places[-1] // _BLOCK
        blocks = [self._of_block(block) for block in range(first, last + 1)]
        return (blocks[0] if first == last else torch.cat(blocks))[_slice(places, first * _BLOCK)]

    def _of_block(self, block: int) -> Tensor:
        number, there = self._block
        if number != block:
            start = block * _BLOCK
            there = self._work(torch.arange(start, min(start + _BLOCK, self._n)))
            self._block = (block, there)
        return there


def _slice(places: range, start: int) -> slice:
    return slice(places.start - start, places.stop - start, places.step)

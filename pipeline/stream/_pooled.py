"""`Pooled`: some of a source's items at a time, rearranged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline._checks import whole
from pipeline.errors import PlaceError
from pipeline.stream._chained import Chained
from pipeline.stream._keys import POOL, key
from pipeline.stream._noted import number


class Pooled(Chained):
    """Reads `size` items of the source, arranges them anew, gives them out, and goes on to the next `size`.

    While one pool is given out the next one is read, so that reading is spread evenly. The state is where the pool
    begins in the source and how much of it was given out: going there reads the pool again, and nothing before it.
    """

    purpose = POOL

    def __init__(self, source: Any, size: int, seed: int) -> None:
        super().__init__(source)
        whole(f"{self.name}(seed)", seed, None)
        self.size, self.seed, self._level = size, seed, self.source.depth(POOL)
        self._forget(0, 0)

    def arranged(self, items: list[Any], of: int) -> list[Any]:
        """What is given out for the items of one pool; chance follows from `of`."""
        raise NotImplementedError

    def finished(self, given: Any) -> Any:
        """What becomes of a part of the arranged pool when it is given out."""
        return given

    def _forget(self, pool: int, given: int) -> None:
        """Nothing is read: the source stands where pool number `pool` begins, of which so much was given out."""
        self._pool, self._given = pool, given
        self._starts: dict[str, Any] | None = None  # where the pool begins in the source
        self._parts: list[Any] = []
        self._coming: list[Any] = []
        self._coming_starts: dict[str, Any] | None = None
        self._pace = 0

    def next(self) -> Any:
        if self._starts is None:
            self._turn(self._given)
            if self._given > len(self._parts):
                raise PlaceError(repr(self), f"in its pool of {len(self._parts)}", f"number {self._given} of it")
        while self._given >= len(self._parts):
            if self.ended and not self._coming:
                self._forget(0, 0)
                raise self.end()
            self._pool += 1
            self._turn(0)
        made = self.finished(self._parts[self._given])
        self._parts[self._given] = None
        self._given += 1
        self._read(self._pace)
        return made

    def _read(self, n: int) -> None:
        """Up to n items more for the next pool."""
        if self._coming_starts is None:
            self._coming_starts = self.source.state_dict()
        self._coming += self.pull(min(n, self.size - len(self._coming)))

    def _turn(self, given: int) -> None:
        """The next pool becomes the present one, of which so much was given out."""
        self._read(self.size)
        items, self._starts = self._coming, self._coming_starts
        self._coming, self._coming_starts = [], None
        self._parts = self.arranged(items, key(self.seed, POOL, self._level, *self.address(self.epoch, self._pool)))
        self._pace = -(-len(items) // max(1, len(self._parts)))
        self._given = given

    def to_epoch(self, epoch: int) -> None:
        super().to_epoch(epoch)
        self._forget(0, 0)

    def get_state(self) -> dict[str, Any]:
        starts = self.source.state_dict() if self._starts is None else self._starts
        return {"source": starts, "pool": self._pool, "given": self._given}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load({**state, "ended": False})
        self._forget(number(state, "pool"), number(state, "given"))

"""`shard`: a stream shared out over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pipeline._checks import whole
from pipeline.errors import SettingError
from pipeline.stream._chained import Chained
from pipeline.stream._indexed import Indexed, Indices, Layer, Pass, scaled
from pipeline.stream._noted import number
from pipeline.stream.node import Node
from pipeline.stream.sources import source

__all__ = ["shard"]

Uneven = Literal["drop", "pad"]


def shard(data: Any, rank: int, world: int, *, uneven: Uneven = "drop") -> Node:
    """Every `world`-th item, from item `rank` on: what this rank has of the stream.

    All ranks give the same number of items, so that none waits for another at the epoch's end. Where the items do not
    divide evenly, "drop" leaves out the last ones, fewer than `world` of them, and "pad" puts None in place of what is
    missing; `batch` leaves None out, and a batch of nothing else is None.

    After the same number of items on each rank, what the ranks have used up together is the beginning of the stream. So
    where the data can be read at any place, and only `batch`, `map`, `prefetch` and `to_device` stand behind, the state
    of one rank is that of all, and another number of ranks can go on from it: what is left of the epoch is shared out
    anew.
    Elsewhere each rank reads everything and passes over what is not its own (share out the files instead, where there
    are files), and the number of ranks must stay.

    Raises: SettingError unless 0 <= rank < world.
    """
    whole("shard(world)", world)
    whole("shard(rank)", rank, 0)
    if rank >= world:
        raise SettingError("shard(rank)", f"a whole number from 0 to {world - 1}", rank)
    if uneven not in ("drop", "pad"):
        raise SettingError("shard(uneven)", "'drop' or 'pad'", uneven)
    node = source(data)
    if isinstance(node, Indexed):
        return _SharedRows(node, rank, world, uneven == "pad")
    return _Shared(node, rank, world, uneven == "pad")


class _SharedRows(Layer):
    """Every `world`-th item, by place."""

    name = "shard"

    def __init__(self, node: Indexed, rank: int, world: int, pads: bool) -> None:
        super().__init__(node)
        self._rank, self._world, self._pads = rank, world, pads
        self.gathers = node.gathers

    @property
    def unit(self) -> int:
        return self.source.unit * self._world

    @property
    def ranks(self) -> int:
        return self.source.ranks * self._world

    def count(self, start: int) -> int:
        there = self.source.count(start)
        return -(-there // self._world) if self._pads else there // self._world

    def _own(self, at: Pass, indices: Indices) -> tuple[Indices, int]:
        """Where these items lie in the source, and how many of them, the last ones, are not there."""
        places = scaled(indices, self._world, self._rank)
        if not self._pads or not len(places) or int(places[-1]) < (there := self.source.count(at.start)):
            return places, 0
        own = range(self._rank, there, self._world)
        missing = sum(int(place) not in own for place in places)
        return places[: len(places) - missing], missing

    def fetch(self, at: Pass, indices: Indices) -> list[Any]:
        places, missing = self._own(at, indices)
        return self.source.fetch(at, places) + [None] * missing

    def gather(self, at: Pass, indices: Indices) -> Any:
        places, _ = self._own(at, indices)
        return self.source.gather(at, places)

    def locate(self, at: Pass, index: int) -> tuple[int, int]:
        return self.source.locate(at, index * self._world + self._rank)

    def settings(self) -> tuple[str, ...]:
        return _settings(self._rank, self._world, self._pads)


class _Shared(Chained):
    """Every `world`-th item, the others passed over."""

    name = kind = "shard"

    def __init__(self, node: Node, rank: int, world: int, pads: bool) -> None:
        super().__init__(node)
        self._rank, self._world, self._pads = rank, world, pads
        self._behind = 0  # items of the present round that are still to be passed over

    def next(self) -> Any:
        self._pass_over(self._behind)
        self._behind = 0
        before = self._pass_over(self._rank)
        if before < self._rank:
            return self._missing(before)
        own = self.pull(1)
        if not own:
            return self._missing(before)
        self._behind = self._world - self._rank - 1
        if not self._pads:
            if self._pass_over(self._behind) < self._behind:
                self._behind = 0
                raise self.end()
            self._behind = 0
        return own[0]

    def _missing(self, before: int) -> None:
        """The source has ended, and not with our own item: None if others had one in this round, else the end."""
        if self._pads and before:
            return
        raise self.end()

    def _pass_over(self, n: int) -> int:
        if self.ended:
            return 0
        passed = self.source.skip(n)
        self.ended = passed < n
        return passed

    @property
    def ranks(self) -> int:
        return self.source.ranks * self._world

    def address(self, epoch: int, index: int) -> tuple[int, int]:
        return self.source.address(epoch, index * self._world + self._rank)

    def to_epoch(self, epoch: int) -> None:
        super().to_epoch(epoch)
        self._behind = 0

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "behind": self._behind}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._behind = number(state, "behind")

    def __len__(self) -> int:
        there = len(self.source)
        return -(-there // self._world) if self._pads else there // self._world

    def settings(self) -> tuple[str, ...]:
        return _settings(self._rank, self._world, self._pads)


def _settings(rank: int, world: int, pads: bool) -> tuple[str, ...]:
    return (f"rank={rank}", f"world={world}", *(("uneven='pad'",) if pads else ()))

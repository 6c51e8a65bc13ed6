"""`Transparent`: nodes whose place is the place of their source, so that they may come and go between save and load."""

from __future__ import annotations

import copy
from typing import Any

from pipeline.stream.node import Node


class Transparent(Node):
    """A node over one source that neither drops nor adds an item."""

    def __init__(self, source: Node) -> None:
        super().__init__(source)
        self.source: Node = self.sources[0]

    def _noted(self) -> dict[str, Any]:
        return self.source.state_dict()

    def _go(self, state: dict[str, Any]) -> None:
        self.source.reset(state)

    def to_epoch(self, epoch: int) -> None:
        self.source.to_epoch(epoch)

    @property
    def world(self) -> int:
        return self.source.world

    def __len__(self) -> int:
        return len(self.source)


class Ahead(Transparent):
    """A transparent node that reads its source ahead of whoever reads it.

    With each item it keeps where the source stood after it. Its own place is that of the item it gave out last.
    """

    steady = True

    def __init__(self, source: Node) -> None:
        super().__init__(source)
        self._settle()

    def _settle(self) -> None:
        """Nothing is read ahead: the source stands where this node does."""
        self._place: tuple[dict[str, Any], int] | None = None  # and its epoch
        self.is_astray = False

    def halt(self) -> None:
        """End the threads and processes that are this node's own; what they have read stays."""
        raise NotImplementedError

    def drop(self) -> None:
        """Halt, and forget what was read ahead."""
        raise NotImplementedError

    def gave(self, place: dict[str, Any], epoch: int) -> None:
        """An item, or the epoch's end, goes out: this is where the source stood after it."""
        self._place = (place, epoch)

    def found(self) -> None:
        """Before reading on: the place is noted down, and after an error the source goes back there."""
        if self._place is None:
            self._place = (self.source.state_dict(), self.source.epoch)
        if self.is_astray:
            self.drop()
            self.source.reset(self._place[0])
            self.is_astray = False

    @property
    def epoch(self) -> int:
        return self.source.epoch if self._place is None else self._place[1]

    def _noted(self) -> dict[str, Any]:
        return self.source.state_dict() if self._place is None else copy.deepcopy(self._place[0])

    def _go(self, state: dict[str, Any]) -> None:
        self.drop()
        super()._go(state)
        self._settle()

    def to_epoch(self, epoch: int) -> None:
        self.drop()
        super().to_epoch(epoch)
        self._settle()

    def close(self) -> None:
        self.halt()
        super().close()

"""`Chained`: what nodes over one source have in common that read it item by item."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.stream._noted import flag
from pipeline.stream.node import Node


class Chained(Node):
    """A node over one source.

    It may learn of the epoch's end before it has given out all that it read. Until it has, `ended` is set, and the
    source already stands in the next epoch.
    """

    def __init__(self, source: Node) -> None:
        super().__init__(source)
        self.source: Node = self.sources[0]
        self.ended = False

    def pull(self, n: int) -> list[Any]:
        """Up to n items of the source: fewer at the epoch's end, and none after it."""
        items: list[Any] = []
        while len(items) < n and not self.ended:
            try:
                items.append(self.source.next())
            except StopIteration:
                self.ended = True
        return items

    def end(self) -> StopIteration:
        """The end of the epoch, to be raised: the next one begins."""
        self.ended = False
        return StopIteration()

    @property
    def epoch(self) -> int:
        return self.source.epoch - self.ended

    def to_epoch(self, epoch: int) -> None:
        self.source.to_epoch(epoch)
        self.ended = False

    def get_state(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(), "ended": self.ended}

    def load(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        self.ended = flag(state, "ended")

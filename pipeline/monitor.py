"""What a monitor is: a reducer over events, in three parts. This module knows no torch.

`init() -> accumulator`, `reduce(accumulator, event) -> accumulator`, `result(accumulator)`. A monitor holds settings
and nothing else; its accumulator is a plain immutable value that whoever folds the events carries. Optional:
`merge(a, b)` for two logs, and `signals(accumulator)` for what it asks of the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import attrs

from pipeline.events import Event

__all__ = ["Monitor", "ScaleRate", "Signal", "Stop", "replay"]


@attrs.frozen
class Signal:
    """What a monitor asks of the fold."""


@attrs.frozen
class Stop(Signal):
    """End the run after this update, for `reason`."""

    reason: str


@attrs.frozen
class ScaleRate(Signal):
    """Multiply the scheduled learning rates by `factor` from the next update on, in place of what was asked before."""

    factor: float


@runtime_checkable
class Monitor(Protocol):
    """A reducer over events. `name` is what its result is called in `run.results`."""

    @property
    def name(self) -> str: ...

    def init(self) -> Any: ...

    def reduce(self, accumulator: Any, event: Event, /) -> Any: ...

    def result(self, accumulator: Any, /) -> Any: ...


def replay(events: Iterable[Event], monitors: Iterable[Monitor]) -> dict[str, Any]:
    """The monitors' results over recorded events: the same as they were live, value for value."""
    monitors = tuple(monitors)
    accumulators = [m.init() for m in monitors]
    for event in events:
        accumulators = [m.reduce(a, event) for m, a in zip(monitors, accumulators, strict=True)]
    return {m.name: m.result(a) for m, a in zip(monitors, accumulators, strict=True)}

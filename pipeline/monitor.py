"""What a monitor is: a reducer over events, in three parts. This module knows no torch.

`init() -> accumulator`, `reduce(accumulator, event) -> accumulator`, `result(accumulator)`. A monitor holds settings
and nothing else; its accumulator is a plain immutable value that whoever folds the events carries. Optional:
`merge(a, b)` for two logs, and `signals(accumulator)` for what it asks of the run.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

import attrs

from pipeline._checks import positive
from pipeline.events import Event

__all__ = ["Evaluate", "Monitor", "Rewind", "Save", "ScaleRate", "Signal", "Stop"]


@attrs.frozen
class Signal:
    """What a monitor asks of the fold, read from its accumulator at each publication of events.

    A monitor goes on asking as long as its accumulator says so.
    """


@attrs.frozen
class Stop(Signal):
    """End the run after this update, for `reason`."""

    reason: str


@attrs.frozen
class ScaleRate(Signal):
    """Multiply the scheduled learning rates by `factor` from the next update on, in place of what was asked before."""

    factor: float

    def __attrs_post_init__(self) -> None:
        positive("ScaleRate.factor", self.factor)


@attrs.frozen
class Evaluate(Signal):
    """Run the fold's evaluation of this name after this update, or all of them."""

    name: str | None = None


@attrs.frozen
class Save(Signal):
    """Save a checkpoint after this update, for `reason`."""

    reason: str


@attrs.frozen
class Rewind(Signal):
    """Put the weights, and all that the optimizer keeps, back to the newest or the best checkpoint, for `reason`.

    The data and the counts go on: what was seen in between is not seen again. The fold answers with `Rewound`.
    """

    reason: str
    to: Literal["latest", "best"] = "latest"


@runtime_checkable
class Monitor(Protocol):
    """A reducer over events. `name` is what its result is called in `run.results`.

    Optional besides `merge` and `signals`: `watches`, the measures of evaluations without which it means nothing;
    `urgent(event)`, whether events have to be published at this one; `needs_store`, whether it asks for checkpoints.
    """

    @property
    def name(self) -> str: ...

    def init(self) -> Any: ...

    def reduce(self, accumulator: Any, event: Event, /) -> Any: ...

    def result(self, accumulator: Any, /) -> Any: ...

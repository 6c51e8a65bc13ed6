"""What a fold returns, and where its events go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import attrs

from pipeline.events import Event
from pipeline.records import TrainState

__all__ = ["Run", "Sink", "run_of"]


class Sink(Protocol):
    """Where events go: to a console, a file, a service. May hold resources, and is closed when the run ends."""

    def write(self, event: Event, /) -> None: ...

    def close(self) -> None: ...


@attrs.frozen(eq=False)
class Run:
    """What a fold returns: the last state, the monitors' results by name, and why it ended, all reasons kept."""

    state: TrainState
    results: Mapping[str, Any]
    stopped_by: tuple[str, ...]


def run_of(error: BaseException) -> Run:
    """The run that `error` ended: the state before the micro-batch that failed, and the results up to there.

    Raises: ValueError for an error that no fold raised.
    """
    run = getattr(error, "__run__", None)
    if not isinstance(run, Run):
        raise ValueError("this error did not come out of a fold")
    return run

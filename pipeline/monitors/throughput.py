"""How fast a run is."""

from __future__ import annotations

import attrs

from pipeline.events import Event, RunStarted, UpdateDone

__all__ = ["Throughput"]

Mark = tuple[float, int, int, int]
"""Time, samples, tokens, updates."""


@attrs.frozen
class Throughput:
    """Samples, tokens and updates a second, from the first to the last update.

    Reads:  `RunStarted.time`, `UpdateDone.time`, `samples`, `tokens`, `update`.
    Result: {"samples", "tokens", "updates"} a second, floats; None before the second update, for nothing is between.
    """

    name: str = "Throughput"

    def init(self) -> tuple[Mark, Mark] | None:
        """None: no update yet."""
        return None

    def reduce(self, accumulator: tuple[Mark, Mark] | None, event: Event) -> tuple[Mark, Mark] | None:
        """Move the end to this update; the time since an earlier run's end does not count."""
        if isinstance(event, RunStarted):
            return None
        if not isinstance(event, UpdateDone):
            return accumulator
        now = (event.time, event.samples, event.tokens, event.update)
        return (now, now) if accumulator is None else (accumulator[0], now)

    def result(self, accumulator: tuple[Mark, Mark] | None) -> dict[str, float] | None:
        """Rates over the span so far."""
        if accumulator is None or accumulator[1][0] <= accumulator[0][0]:
            return None
        first, last = accumulator
        seconds = last[0] - first[0]
        return {
            "samples": (last[1] - first[1]) / seconds,
            "tokens": (last[2] - first[2]) / seconds,
            "updates": (last[3] - first[3]) / seconds,
        }

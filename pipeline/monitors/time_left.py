"""When a run will be over."""

from __future__ import annotations

import attrs

from pipeline.events import Event, RunEnded, RunStarted, UpdateDone
from pipeline.monitors._written import Written

__all__ = ["TimeLeft"]

Mark = tuple[float, int]
"""Time, updates."""

Pace = tuple[int | None, Mark | None, Mark | None]
"""The updates in all, where known; the first update of this run, and the last."""


@attrs.frozen(repr=False)
class TimeLeft(Written):
    """The seconds to the end of the run, at its pace so far, evaluations included.

    Reads:  `RunStarted.total_updates`; `UpdateDone.time`, `update`.
    Result: a float, 0 at the end; None where the number of updates is not known, and before the second update.
    Edges:  a new run starts a new clock. Windows that are skipped, where epochs are counted, make it too long.
    """

    name: str = "TimeLeft"

    def init(self) -> Pace:
        """Nothing known."""
        return None, None, None

    def reduce(self, accumulator: Pace, event: Event) -> Pace:
        """Start the clock, or move it to this update."""
        if isinstance(event, RunStarted):
            return event.total_updates, None, None
        total, first, last = accumulator
        if isinstance(event, RunEnded) and last is not None:  # of however many updates it was
            return last[1], first, last
        if not isinstance(event, UpdateDone):
            return accumulator
        now = (event.time, event.update)
        return total, now if first is None else first, now

    def result(self, accumulator: Pace) -> float | None:
        """The updates that are left, at the seconds that each has taken."""
        total, first, last = accumulator
        if total is None or first is None or last is None or last[1] <= first[1]:
            return None
        return max(total - last[1], 0) * (last[0] - first[0]) / (last[1] - first[1])

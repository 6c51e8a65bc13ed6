"""What became of the windows: clipped, or skipped."""

from __future__ import annotations

from typing import Any

import attrs

from pipeline.events import Event, UpdateDone, UpdateSkipped
from pipeline.monitors._written import Written

__all__ = ["ClipShare", "Skips"]

Last = tuple[str, int, int | None, str | None]
"""Reason, update, micro-batch, parameter."""


@attrs.frozen(repr=False)
class ClipShare(Written):
    """The share of updates whose gradients were clipped.

    Reads:  `UpdateDone.clip_factor`: below 1 where clipping changed something.
    Result: a float from 0 to 1; None before the first update.
    Merge:  two logs.
    """

    name: str = "ClipShare"

    def init(self) -> tuple[int, int]:
        """(clipped, all) of nothing."""
        return 0, 0

    def reduce(self, accumulator: tuple[int, int], event: Event) -> tuple[int, int]:
        """Count an update."""
        if not isinstance(event, UpdateDone):
            return accumulator
        return self.merge(accumulator, (int(float(event.clip_factor) < 1), 1))

    def result(self, accumulator: tuple[int, int]) -> float | None:
        """The share so far."""
        return accumulator[0] / accumulator[1] if accumulator[1] else None

    def merge(self, a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        """Two logs as one."""
        return a[0] + b[0], a[1] + b[1]


@attrs.frozen(repr=False)
class Skips(Written):
    """How many windows ended without an update, which share of all that is, and what is known of the last one.

    Reads:  `UpdateDone`; `UpdateSkipped.reason`, `update`, `micro_batch`, `parameter`.
    Result: {"count", "share", "last"}, the last one as {"reason", "update", "micro_batch", "parameter"}, None where
            none was skipped; None before the first window ended.
    Merge:  two logs, the second after the first.
    """

    name: str = "Skips"

    def init(self) -> tuple[int, int, Last | None]:
        """(skipped, all, the last one skipped) of nothing."""
        return 0, 0, None

    def reduce(self, accumulator: tuple[int, int, Last | None], event: Event) -> tuple[int, int, Last | None]:
        """Count a window."""
        if isinstance(event, UpdateSkipped):
            last = (event.reason, event.update, event.micro_batch, event.parameter)
            return self.merge(accumulator, (1, 1, last))
        return self.merge(accumulator, (0, 1, None)) if isinstance(event, UpdateDone) else accumulator

    def result(self, accumulator: tuple[int, int, Last | None]) -> dict[str, Any] | None:
        """Count, share and the last one."""
        skipped, windows, last = accumulator
        if not windows:
            return None
        known = None if last is None else dict(zip(("reason", "update", "micro_batch", "parameter"), last, strict=True))
        return {"count": skipped, "share": skipped / windows, "last": known}

    def merge(self, a: tuple[int, int, Last | None], b: tuple[int, int, Last | None]) -> tuple[int, int, Last | None]:
        """Two logs, the second after the first."""
        return a[0] + b[0], a[1] + b[1], a[2] if b[2] is None else b[2]

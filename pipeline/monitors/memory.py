"""How much memory a run takes."""

from __future__ import annotations

import attrs

from pipeline.events import Event, MemoryMeasured
from pipeline.monitors._written import Written

__all__ = ["Memory"]

_KINDS = ("allocated_peak", "reserved_peak", "resident", "resident_peak")

Known = tuple[int, int] | None
"""Last and largest, None where nobody told."""


def _joined(a: Known, b: Known) -> Known:
    if a is None or b is None:
        return a if b is None else b
    return b[0], max(a[1], b[1])


@attrs.frozen(repr=False)
class Memory(Written):
    """How much memory the run takes, last and at most: the accelerator's peaks, and the process's memory.

    The accelerator's are peaks since the measurement before, so that what is short-lived inside a step is seen.

    Reads:  `MemoryMeasured.allocated_peak`, `reserved_peak`, `resident`, `resident_peak`.
    Result: {kind: {"last", "max"}}, bytes, for the four of these that were told; None before the first.
    Merge:  two logs, the second after the first.
    """

    name: str = "Memory"

    def init(self) -> tuple[Known, ...]:
        """Nothing known."""
        return (None,) * len(_KINDS)

    def reduce(self, accumulator: tuple[Known, ...], event: Event) -> tuple[Known, ...]:
        """Take a measurement in."""
        if not isinstance(event, MemoryMeasured):
            return accumulator
        told: list[int | None] = [getattr(event, kind) for kind in _KINDS]
        return self.merge(accumulator, tuple(None if size is None else (size, size) for size in told))

    def result(self, accumulator: tuple[Known, ...]) -> dict[str, dict[str, int]] | None:
        """Last and largest of what was told."""
        known = zip(_KINDS, accumulator, strict=True)
        return {kind: {"last": seen[0], "max": seen[1]} for kind, seen in known if seen is not None} or None

    def merge(self, a: tuple[Known, ...], b: tuple[Known, ...]) -> tuple[Known, ...]:
        """Two logs, the second after the first."""
        return tuple(map(_joined, a, b))

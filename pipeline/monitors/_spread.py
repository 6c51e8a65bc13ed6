"""The last, the mean and the largest of some numbers, none of them negative."""

from __future__ import annotations

Spread = tuple[float, float, int, float]
"""Last, sum, count, largest."""

NONE: Spread = (0.0, 0.0, 0, 0.0)


def one(value: float) -> Spread:
    """A single number."""
    return value, value, 1, max(0.0, value)  # in this order NaN is never the largest


def joined(a: Spread, b: Spread) -> Spread:
    """The numbers of `a`, then those of `b`."""
    return b[0] if b[2] else a[0], a[1] + b[1], a[2] + b[2], max(a[3], b[3])


def shown(spread: Spread) -> dict[str, float] | None:
    """As a result; None for no numbers."""
    last, total, count, largest = spread
    return {"last": last, "mean": total / count, "max": largest} if count else None

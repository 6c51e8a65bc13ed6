"""Sums in which each value counts `decay` times as much as the one after it."""

from __future__ import annotations

Sums = tuple[float, ...]
"""The sums, and last the number of values in them."""


def joined(a: Sums, b: Sums, decay: float) -> Sums:
    """The values of `a`, then those of `b`: what `b` brings makes `a` fade."""
    faded = decay ** b[-1]
    return (*(x * faded + y for x, y in zip(a[:-1], b[:-1], strict=True)), a[-1] + b[-1])

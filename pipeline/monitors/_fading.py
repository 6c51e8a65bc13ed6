"""Sums in which each value counts `decay` times as much as the one after it."""

from __future__ import annotations

from pipeline.errors import SettingError

Sums = tuple[float, ...]
"""The sums, and last the number of values in them."""


def check(setting: str, decay: object) -> None:
    """Raise SettingError unless `decay` is above 0 and at most 1."""
    if not isinstance(decay, (int, float)) or isinstance(decay, bool) or not 0 < decay <= 1:
        raise SettingError(setting, "above 0 and at most 1", decay)


def joined(a: Sums, b: Sums, decay: float) -> Sums:
    """The values of `a`, then those of `b`: what `b` brings makes `a` fade."""
    faded = decay ** b[-1]
    return (*(x * faded + y for x, y in zip(a[:-1], b[:-1], strict=True)), a[-1] + b[-1])

"""Learning-rate schedules: pure functions of the update count, from 0, that print as they were written.

A schedule is any `f(count) -> rate`; those here are frozen attrs classes. The first update has count 0, and is never
wasted on a rate of 0 by a warmup.
"""

from __future__ import annotations

import math
from typing import Any

import attrs

from pipeline.errors import SettingError

__all__ = ["Constant", "WarmupCosine", "constant", "warmup_cosine"]


def _not_negative(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not 0 <= value < math.inf:
        raise SettingError(f"{type(instance).__name__}.{attribute.name}", "0 or more and finite", value)


@attrs.frozen
class Constant:
    """The same rate at every update."""

    rate: float = attrs.field(validator=_not_negative)

    def __call__(self, count: int) -> float:
        return self.rate


@attrs.frozen
class WarmupCosine:
    """A linear rise to `peak` over `warmup` updates, then half a cosine down to `floor` at update `total`.

    With n the update's count from 0: peak · (n + 1) / warmup for n < warmup; then
    floor + (peak − floor) · (1 + cos(π · (n − warmup) / (total − warmup))) / 2; from `total` on, `floor`.

    Raises: SettingError for a negative rate, or a warmup longer than the total.
    Source: Loshchilov, Hutter 2017, arXiv:1608.03983, equation 5, without restarts.
    """

    peak: float = attrs.field(validator=_not_negative)
    warmup: int = attrs.field(validator=_not_negative)
    total: int = attrs.field(validator=_not_negative)
    floor: float = attrs.field(default=0.0, validator=_not_negative)

    def __attrs_post_init__(self) -> None:
        if self.total <= self.warmup:
            raise SettingError("WarmupCosine.total", f"more than warmup ({self.warmup})", self.total)

    def __call__(self, count: int) -> float:
        if count < self.warmup:
            return self.peak * (count + 1) / self.warmup
        done = min((count - self.warmup) / (self.total - self.warmup), 1.0)
        return self.floor + (self.peak - self.floor) * (1 + math.cos(math.pi * done)) / 2


def constant(rate: float) -> Constant:
    """The same rate at every update."""
    return Constant(rate)


def warmup_cosine(peak: float, warmup: int, total: int, floor: float = 0.0) -> WarmupCosine:
    """A linear rise to `peak` over `warmup` updates, then half a cosine down to `floor` at update `total`."""
    return WarmupCosine(peak, warmup, total, floor)

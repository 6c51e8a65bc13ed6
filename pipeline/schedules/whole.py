"""Shapes for a whole run: they know how long it will be, or how it begins again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import attrs

from pipeline.errors import SettingError
from pipeline.schedules import _settings as check
from pipeline.schedules.shapes import Cosine

__all__ = [
    "OneCycle",
    "WarmRestarts",
    "WarmupCosine",
    "WarmupStableDecay",
    "one_cycle",
    "warm_restarts",
    "warmup_cosine",
    "warmup_stable_decay",
]

_LEFT: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "root": lambda done: 1 - math.sqrt(done),
}
"""What is left of the way once the share `done` of it lies behind."""


@attrs.frozen
class WarmupCosine:
    """A linear rise to `peak` over `warmup` updates, then half a cosine down to `floor` at update `total`.

    With n the update's count from 0: peak · (n + 1) / warmup for n < warmup; then
    floor + (peak − floor) · (1 + cos(π · (n − warmup) / (total − warmup))) / 2; from `total` on, `floor`.

    Raises: SettingError for a negative rate, or a warmup longer than the total.
    Source: Loshchilov, Hutter 2017, arXiv:1608.03983, equation 5, without restarts.
    """

    peak: float = attrs.field(converter=check.number, validator=check.not_negative)
    warmup: int = attrs.field(converter=check.count, validator=check.whole)
    total: int = attrs.field(converter=check.count, validator=check.at_least_one)
    floor: float = attrs.field(default=0.0, converter=check.number, validator=check.not_negative)

    def __attrs_post_init__(self) -> None:
        if self.total <= self.warmup:
            raise SettingError("WarmupCosine.total", f"more than warmup ({self.warmup})", self.total)

    def __call__(self, count: int) -> float:
        if count < self.warmup:
            return self.peak * (count + 1) / self.warmup
        done = min((count - self.warmup) / (self.total - self.warmup), 1.0)
        return self.floor + (self.peak - self.floor) * (1 + math.cos(math.pi * done)) / 2


@attrs.frozen
class WarmupStableDecay:
    """A linear rise to `peak` over `warmup` updates, level, and in the last `decay` updates down to `floor` at `total`.

    With n the count, W = `warmup` and d = (n − (total − decay)) / decay: peak · (n + 1) / W for n < W; peak up to
    total − decay; then floor + (peak − floor) · left(d); from `total` on, `floor`. left(d) is 1 − d for the shape
    "linear", (1 + cos(π · d)) / 2 for "cosine", 1 − √d for "root".

    Raises: SettingError for a negative rate, or where warmup and decay together are longer than the total.
    Source: Hu et al. 2024, arXiv:2404.06395, section 4; Hägele et al. 2024, arXiv:2405.18392, for the shapes.
    """

    peak: float = attrs.field(converter=check.number, validator=check.not_negative)
    total: int = attrs.field(converter=check.count, validator=check.at_least_one)
    warmup: int = attrs.field(converter=check.count, validator=check.whole)
    decay: int = attrs.field(converter=check.count, validator=check.whole)
    floor: float = attrs.field(default=0.0, converter=check.number, validator=check.not_negative)
    shape: Literal["linear", "cosine", "root"] = "linear"

    def __attrs_post_init__(self) -> None:
        if self.shape not in _LEFT:
            raise SettingError("WarmupStableDecay.shape", "'linear', 'cosine' or 'root'", self.shape)
        if self.warmup + self.decay > self.total:
            expected = f"at least warmup + decay ({self.warmup + self.decay})"
            raise SettingError("WarmupStableDecay.total", expected, self.total)

    def __call__(self, count: int) -> float:
        if count >= self.total:
            return self.floor
        if count < self.warmup:
            return self.peak * ((count + 1) / self.warmup)
        into = count - (self.total - self.decay)
        if into <= 0:
            return self.peak
        return self.floor + (self.peak - self.floor) * _LEFT[self.shape](into / self.decay)


@attrs.frozen
class OneCycle:
    """Up from `start` to `peak` in the first `rise` of the run, and down to `end` at its last update, `total` − 1.

    Both ways by half a cosine, or straight with `shape="linear"`. With n the count and r = rise · total − 1 the place
    of the peak: from start to peak as n goes from 0 to r, from peak to end as n goes from r to total − 1; then `end`.
    Torch: `OneCycleLR`, without its changes of momentum.

    Args:   rise: a share, from 0 up to but not 1; start: peak / 25 by default; end: start / 10,000 by default.
    Raises: SettingError for a negative rate, or a run of one update.
    Source: Smith, Topin 2018, arXiv:1708.07120; the constants of `torch.optim.lr_scheduler.OneCycleLR`.
    """

    peak: float = attrs.field(converter=check.number, validator=check.not_negative)
    total: int = attrs.field(converter=check.count, validator=check.at_least_one)
    rise: float = attrs.field(default=0.3, converter=check.number, validator=check.not_negative)
    start: float = attrs.field(
        default=attrs.Factory(lambda cycle: cycle.peak / 25, takes_self=True),
        converter=check.number,
        validator=check.not_negative,
    )
    end: float = attrs.field(
        default=attrs.Factory(lambda cycle: cycle.start / 10_000, takes_self=True),
        converter=check.number,
        validator=check.not_negative,
    )
    shape: Literal["cosine", "linear"] = "cosine"

    def __attrs_post_init__(self) -> None:
        if self.rise >= 1:
            raise SettingError("OneCycle.rise", "a share of the run, below 1", self.rise)
        if self.total < 2:
            raise SettingError("OneCycle.total", "at least 2 updates", self.total)
        if self.shape not in ("cosine", "linear"):
            raise SettingError("OneCycle.shape", "'cosine' or 'linear'", self.shape)

    def __call__(self, count: int) -> float:
        last = self.total - 1
        if count >= last:
            return self.end
        top = max(self.rise * self.total - 1, 0.0)
        left = _LEFT[self.shape]
        if count < top:
            return self.start + (self.peak - self.start) * (1 - left(count / top))
        return self.end + (self.peak - self.end) * left((count - top) / (last - top))


@attrs.frozen
class WarmRestarts:
    """Half cosines from `start` towards `end`, the first over `first` updates, each next one `factor` times as long.

    With n the count from the last restart and T the length: end + (start − end) · (1 + cos(π · n / T)) / 2. Torch:
    `CosineAnnealingWarmRestarts`.

    Source: Loshchilov, Hutter 2017, arXiv:1608.03983, equation 5.
    """

    start: float = attrs.field(converter=check.number, validator=check.not_negative)
    end: float = attrs.field(converter=check.number, validator=check.not_negative)
    first: int = attrs.field(converter=check.count, validator=check.at_least_one)
    factor: int = attrs.field(default=1, converter=check.count, validator=check.at_least_one)

    def __call__(self, count: int) -> float:
        length = self.first
        if self.factor == 1:
            count %= length
        while count >= length:  # whole numbers only: a logarithm would miss the restart by a rounding
            count, length = count - length, length * self.factor
        return Cosine(self.start, self.end, length)(count)


def warmup_cosine(peak: float, warmup: int, total: int, floor: float = 0.0) -> WarmupCosine:
    """A linear rise to `peak` over `warmup` updates, then half a cosine down to `floor` at update `total`."""
    return WarmupCosine(peak, warmup, total, floor)


def warmup_stable_decay(
    peak: float,
    total: int,
    *,
    warmup: int,
    decay: int,
    floor: float = 0.0,
    shape: Literal["linear", "cosine", "root"] = "linear",
) -> WarmupStableDecay:
    """A linear rise to `peak` over `warmup` updates, level, and in the last `decay` updates down to `floor`."""
    return WarmupStableDecay(peak, total, warmup, decay, floor, shape)


def one_cycle(
    peak: float,
    total: int,
    *,
    rise: float = 0.3,
    start: float | None = None,
    end: float | None = None,
    shape: Literal["cosine", "linear"] = "cosine",
) -> OneCycle:
    """Up from `start` to `peak` in the first `rise` of the run, and down to `end` at its last update, `total` − 1."""
    given = {key: value for key, value in (("start", start), ("end", end)) if value is not None}
    return OneCycle(peak, total, rise, **given, shape=shape)


def warm_restarts(start: float, end: float, first: int, factor: int = 1) -> WarmRestarts:
    """Half cosines from `start` towards `end`, the first over `first` updates, each next one `factor` times as long."""
    return WarmRestarts(start, end, first, factor)

"""Schedules made of schedules. A number does for a schedule: the same rate at every update."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Any

import attrs

from pipeline.errors import SettingError
from pipeline.schedules import _settings as check
from pipeline.schedules._settings import Schedule
from pipeline.schedules.shapes import Constant

__all__ = ["Join", "Scale", "Warmup", "join", "points", "scale", "warmup"]


def _schedule(value: Any) -> Any:
    return value if callable(value) else Constant(value)


def _schedules(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(map(_schedule, values))


@attrs.frozen
class Warmup:
    """A straight rise to the first rate of `schedule` over `updates` updates; then `schedule`, counted from there.

    With n the count, N = `updates` and p = schedule(0): p · (n + 1) / N for n < N, so that the first update is not
    wasted on a rate of 0 and the N-th has the full rate. With a `start`, the rate of the first update is just that:
    start + (p − start) · n / N. From N on, schedule(n − N). Torch: `LinearLR` in a `SequentialLR`.
    """

    schedule: Schedule = attrs.field(converter=_schedule, validator=check.callable_schedule)
    updates: int = attrs.field(converter=check.count, validator=check.whole)
    start: float | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(check.number),
        validator=attrs.validators.optional(check.not_negative),
    )

    def __call__(self, count: int) -> float:
        if count >= self.updates:
            return self.schedule(count - self.updates)
        peak = self.schedule(0)
        if self.start is None:
            return peak * ((count + 1) / self.updates)
        return self.start + (peak - self.start) * (count / self.updates)


@attrs.frozen
class Join:
    """One schedule after the other: the next begins at each of the counts `boundaries`, counted from there.

    Torch: `SequentialLR`.

    Raises: SettingError unless there is one schedule more than boundaries.
    """

    schedules: tuple[Schedule, ...] = attrs.field(
        converter=_schedules, validator=attrs.validators.deep_iterable(check.callable_schedule)
    )
    boundaries: tuple[int, ...] = attrs.field(converter=check.counts, validator=check.increasing)

    def __attrs_post_init__(self) -> None:
        if len(self.schedules) != len(self.boundaries) + 1:
            expected = f"one fewer than the schedules ({len(self.schedules)})"
            cure = "Name the update count at which each schedule but the first begins."
            raise SettingError("Join.boundaries", expected, self.boundaries, cure)

    def __call__(self, count: int) -> float:
        place = bisect.bisect_right(self.boundaries, count)
        return self.schedules[place](count - self.boundaries[place - 1] if place else count)


@attrs.frozen
class Scale:
    """A schedule times a factor, or times another schedule at the same count. Torch: `ChainedScheduler`."""

    schedule: Schedule = attrs.field(converter=_schedule, validator=check.callable_schedule)
    factor: Schedule = attrs.field(converter=_schedule, validator=check.callable_schedule)

    def __call__(self, count: int) -> float:
        return self.schedule(count) * self.factor(count)


def warmup(schedule: Schedule | float, updates: int, start: float | None = None) -> Warmup:
    """A straight rise to the first rate of `schedule` over `updates` updates; then `schedule`, counted from there."""
    return Warmup(schedule, updates, start)


def join(*schedules: Schedule | float, boundaries: Iterable[int]) -> Join:
    """One schedule after the other: the next begins at each of the counts `boundaries`, counted from there."""
    return Join(schedules, tuple(boundaries))


def scale(schedule: Schedule | float, factor: Schedule | float) -> Scale:
    """A schedule times a factor, or times another schedule at the same count."""
    return Scale(schedule, factor)


def points(schedule: Schedule, updates: int, every: int = 1) -> list[tuple[int, float]]:
    """(count, rate) at every `every`-th of the first `updates` counts: what a plot wants."""
    return [(count, schedule(count)) for count in range(0, updates, every)]

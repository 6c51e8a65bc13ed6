"""The simple shapes, from which the rest are put together: each runs its course from count 0, and then stays."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable

import attrs

from pipeline.errors import SettingError
from pipeline.schedules import _settings as check

__all__ = [
    "Constant",
    "Cosine",
    "Exponential",
    "Linear",
    "Polynomial",
    "Staircase",
    "Table",
    "constant",
    "cosine",
    "exponential",
    "linear",
    "polynomial",
    "staircase",
]


@attrs.frozen
class Constant:
    """The same rate at every update."""

    rate: float = attrs.field(converter=check.number, validator=check.not_negative)

    def __call__(self, count: int) -> float:
        return self.rate


@attrs.frozen
class Linear:
    """A straight line from `start` at count 0 to `end` at count `updates`, up or down; then `end`.

    With n the count: start + (end − start) · n / updates. Torch: `LinearLR`.
    """

    start: float = attrs.field(converter=check.number, validator=check.not_negative)
    end: float = attrs.field(converter=check.number, validator=check.not_negative)
    updates: int = attrs.field(converter=check.count, validator=check.at_least_one)

    def __call__(self, count: int) -> float:
        if count >= self.updates:
            return self.end
        return self.start + (self.end - self.start) * (count / self.updates)


@attrs.frozen
class Cosine:
    """Half a cosine from `start` at count 0 to `end` at count `updates`, up or down; then `end`.

    With n the count: end + (start − end) · (1 + cos(π · n / updates)) / 2. Torch: `CosineAnnealingLR`, which rises
    again after `updates`.

    Source: Loshchilov, Hutter 2017, arXiv:1608.03983, equation 5, without restarts.
    """

    start: float = attrs.field(converter=check.number, validator=check.not_negative)
    end: float = attrs.field(converter=check.number, validator=check.not_negative)
    updates: int = attrs.field(converter=check.count, validator=check.at_least_one)

    def __call__(self, count: int) -> float:
        if count >= self.updates:
            return self.end
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * count / self.updates)) / 2


@attrs.frozen
class Polynomial:
    """A power of what is left of the way, from `start` at count 0 to `end` at count `updates`; then `end`.

    With n the count: end + (start − end) · (1 − n / updates) ** power. A `power` of 1 is a straight line. Torch:
    `PolynomialLR`, which ends at 0.
    """

    start: float = attrs.field(converter=check.number, validator=check.not_negative)
    end: float = attrs.field(converter=check.number, validator=check.not_negative)
    updates: int = attrs.field(converter=check.count, validator=check.at_least_one)
    power: float = attrs.field(default=2.0, converter=check.number, validator=check.positive)

    def __call__(self, count: int) -> float:
        if count >= self.updates:
            return self.end
        return self.end + (self.start - self.end) * (1 - count / self.updates) ** self.power


@attrs.frozen
class Exponential:
    """Times `factor` over every `every` updates, a little at each, and never below `floor`.

    With n the count: max(floor, start · factor ** (n / every)). Torch: `ExponentialLR`, where `every` is 1.
    """

    start: float = attrs.field(converter=check.number, validator=check.not_negative)
    factor: float = attrs.field(converter=check.number, validator=check.up_to_one)
    every: int = attrs.field(default=1, converter=check.count, validator=check.at_least_one)
    floor: float = attrs.field(default=0.0, converter=check.number, validator=check.not_negative)

    def __call__(self, count: int) -> float:
        return max(self.floor, self.start * self.factor ** (count / self.every))


@attrs.frozen
class Staircase:
    """Times `factor` at every `every`-th update, or at each of the counts `milestones`; level in between.

    With n the count: start · factor ** (n // every), or start · factor ** (how many milestones are n or less). Torch:
    `StepLR`, `MultiStepLR`.

    Raises: SettingError unless exactly one of `every` and `milestones` is given.
    """

    start: float = attrs.field(converter=check.number, validator=check.not_negative)
    factor: float = attrs.field(converter=check.number, validator=check.up_to_one)
    every: int | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(check.count),
        validator=attrs.validators.optional(check.at_least_one),
    )
    milestones: tuple[int, ...] = attrs.field(default=(), converter=check.counts, validator=check.increasing)

    def __attrs_post_init__(self) -> None:
        if (self.every is None) == (not self.milestones):
            cure = "`every=1000` is for even stairs, `milestones=[1000, 1500]` for the others."
            given = f"every={self.every}, milestones={self.milestones}"
            raise SettingError("Staircase", "given either every or milestones", given, cure)

    def __call__(self, count: int) -> float:
        stairs = bisect.bisect_right(self.milestones, count) if self.every is None else count // self.every
        return self.start * self.factor**stairs


@attrs.frozen(repr=False)
class Table:
    """Rates written down one by one, for counts from 0 on; after the last of them, the last.

    Raises: SettingError for no rates.
    """

    rates: tuple[float, ...] = attrs.field(
        converter=check.numbers_of, validator=attrs.validators.deep_iterable(check.not_negative)
    )

    def __attrs_post_init__(self) -> None:
        if not self.rates:
            raise SettingError("Table.rates", "at least one rate", self.rates)

    def __call__(self, count: int) -> float:
        return self.rates[min(count, len(self.rates) - 1)]

    def __repr__(self) -> str:
        return f"Table({len(self.rates)} rates, {self.rates[0]:.6g} … {self.rates[-1]:.6g})"


def constant(rate: float) -> Constant:
    """The same rate at every update."""
    return Constant(rate)


def linear(start: float, end: float, updates: int) -> Linear:
    """A straight line from `start` at count 0 to `end` at count `updates`, up or down; then `end`."""
    return Linear(start, end, updates)


def cosine(start: float, end: float, updates: int) -> Cosine:
    """Half a cosine from `start` at count 0 to `end` at count `updates`, up or down; then `end`."""
    return Cosine(start, end, updates)


def polynomial(start: float, end: float, updates: int, power: float = 2.0) -> Polynomial:
    """A power of what is left of the way, from `start` at count 0 to `end` at count `updates`; then `end`."""
    return Polynomial(start, end, updates, power)


def exponential(start: float, factor: float, every: int = 1, floor: float = 0.0) -> Exponential:
    """Times `factor` over every `every` updates, a little at each, and never below `floor`."""
    return Exponential(start, factor, every, floor)


def staircase(start: float, factor: float, *, every: int | None = None, milestones: Iterable[int] = ()) -> Staircase:
    """Times `factor` at every `every`-th update, or at each of the counts `milestones`; level in between."""
    return Staircase(start, factor, every, tuple(milestones))

"""Quantiles in bounded memory."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import attrs

from pipeline._checks import is_number, text
from pipeline.errors import SettingError
from pipeline.events import Event, UpdateDone
from pipeline.monitors import _table as table
from pipeline.monitors._readings import reading
from pipeline.monitors._written import Written

__all__ = ["Quantiles"]

Counts = tuple[tuple[int, int], ...]
"""Pairs of a bucket and how many values lie in it, in the order of the buckets."""

_SMALLEST, _LARGEST = 1e-12, 1e12
_FINEST = 1e-6  # beyond it the buckets are narrower than the rounding of their number


def _as_tuple(at: Any) -> Any:
    return tuple(at) if isinstance(at, Iterable) else (at,)


@attrs.frozen(repr=False)
class Quantiles(Written):
    """Quantiles of something that updates measure, from counts in buckets whose width grows with the value.

    The quantile q of n values is the value of rank ⌊q (n − 1)⌋, counted from 0 in ascending order. It is given with a
    relative error of at most `error`, whatever the distribution and the order of the values.

    Reads:  of `UpdateDone`: `loss`, `grad_norm`, a measure (its mean in the window), or a fact.
    Result: {"p5", "p50", "p95"}, for the quantiles asked for, floats; None before the first value.
    Edges:  every update counts alike; those of weight 0 and NaN pass by. Sizes below 1e-12 count as 0, those above
            1e12 as infinite. There are at most 56 / error buckets.
    Merge:  two logs, or two ranks, without any further error.
    Args:   measure: what to read; at: the quantiles, from 0 to 1; error: at least 1e-6 and below 1.
    Raises: SettingError, when built.
    Source: Masson, Rim, Lee 2019, "DDSketch", arXiv:1908.10693, section 2, with the range bounded beforehand.
    """

    measure: str = attrs.field(default="loss", validator=text)
    at: tuple[float, ...] = attrs.field(default=(0.05, 0.5, 0.95), converter=_as_tuple)
    error: float = 0.01
    name: str = attrs.field(default=attrs.Factory(lambda sketch: f"Quantiles {sketch.measure}", takes_self=True))

    def __attrs_post_init__(self) -> None:
        if not self.at or not all(is_number(q) and 0 <= q <= 1 for q in self.at):
            raise SettingError("Quantiles.at", "quantiles from 0 to 1, one or more", self.at)
        if not is_number(self.error) or not _FINEST <= self.error < 1:
            raise SettingError("Quantiles.error", f"at least {_FINEST:g} and below 1", self.error)

    @property
    def _growth(self) -> float:
        """How much farther out each bucket ends than the one before it."""
        return (1 + self.error) / (1 - self.error)

    def _bucket(self, size: float) -> int:
        """0 for what counts as 0, then 1, 2, …; the last one has no end."""
        if size < _SMALLEST:
            return 0
        steps = math.log(min(size, _LARGEST) / _SMALLEST) / math.log(self._growth)
        return 1 + math.ceil(steps) + (size > _LARGEST)

    def _value(self, bucket: int) -> float:
        """What is nowhere in the bucket farther off than the error."""
        if abs(bucket) > self._bucket(_LARGEST):
            return math.copysign(math.inf, bucket)
        middle = 2 * self._growth / (1 + self._growth) * _SMALLEST * self._growth ** (abs(bucket) - 2)
        return math.copysign(middle, bucket) if bucket else 0.0

    def init(self) -> Counts:
        """No value."""
        return ()

    def reduce(self, accumulator: Counts, event: Event) -> Counts:
        """Count an update's value in its bucket."""
        value = reading(event, self.measure) if isinstance(event, UpdateDone) else None
        if value is None or math.isnan(value):
            return accumulator
        bucket = self._bucket(value) if value >= 0 else -self._bucket(-value)
        place = bisect_left(accumulator, (bucket, 0))
        known = place < len(accumulator) and accumulator[place][0] == bucket
        count = accumulator[place][1] + 1 if known else 1
        return (*accumulator[:place], (bucket, count), *accumulator[place + known :])

    def result(self, accumulator: Counts) -> dict[str, float] | None:
        """The quantiles of the values so far."""
        if not accumulator:
            return None
        below = tuple(accumulate(count for _, count in accumulator))
        ranks = {f"p{100 * q:.15g}": math.floor(q * (below[-1] - 1)) for q in self.at}
        return {name: self._value(accumulator[bisect_left(below, rank + 1)][0]) for name, rank in ranks.items()}

    def merge(self, a: Counts, b: Counts) -> Counts:
        """The counts of both."""
        return tuple(sorted(table.joined(a, b, operator.add)))

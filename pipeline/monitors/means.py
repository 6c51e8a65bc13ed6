"""Means over the updates, of the loss and of what else was measured."""

from __future__ import annotations

import math

import attrs

from pipeline._checks import share, text
from pipeline.events import Event, UpdateDone
from pipeline.monitors import _fading as fading
from pipeline.monitors._readings import reading
from pipeline.monitors._written import Written

__all__ = ["ExponentialMean", "Mean", "MeanLoss"]

WeightedSum = tuple[float, float]


class _WeightedMean(Written):
    """What the two means share: (sum, weight), and how these come together."""

    __slots__ = ()

    def init(self) -> WeightedSum:
        """(sum, weight) of nothing."""
        return 0.0, 0.0

    def result(self, accumulator: WeightedSum) -> float | None:
        """The mean so far."""
        return accumulator[0] / accumulator[1] if accumulator[1] else None

    def merge(self, a: WeightedSum, b: WeightedSum) -> WeightedSum:
        """Two logs, or two ranks, as one."""
        return a[0] + b[0], a[1] + b[1]


@attrs.frozen(repr=False)
class MeanLoss(_WeightedMean):
    """The mean training loss over all items of all updates, weighted by their number.

    Reads:  `UpdateDone.loss`, `weight`.
    Result: a float; None before the first update and where no item counted.
    Edges:  a loss that is NaN over items that count makes the mean NaN.
    Merge:  two logs, or two ranks.
    """

    name: str = "MeanLoss"

    def reduce(self, accumulator: WeightedSum, event: Event) -> WeightedSum:
        """Add an update's loss by its weight."""
        if not isinstance(event, UpdateDone) or not float(event.weight):
            return accumulator
        return self.merge(accumulator, (float(event.loss) * float(event.weight), float(event.weight)))


@attrs.frozen(repr=False)
class Mean(_WeightedMean):
    """The mean of one training measure over all items that it counted in all updates.

    Reads:  `UpdateDone.measures[measure]`.
    Result: a float; None before the first update in which the measure counted something.
    Edges:  NaN over items that count makes the mean NaN.
    Merge:  two logs, or two ranks.
    """

    measure: str = attrs.field(validator=text)
    name: str = attrs.field(default=attrs.Factory(lambda mean: f"Mean {mean.measure}", takes_self=True))

    def reduce(self, accumulator: WeightedSum, event: Event) -> WeightedSum:
        """Add an update's sum and weight."""
        if not isinstance(event, UpdateDone) or self.measure not in event.measures:
            return accumulator
        total, weight = event.measures[self.measure]
        return self.merge(accumulator, (float(total), float(weight))) if float(weight) else accumulator


@attrs.frozen(repr=False)
class ExponentialMean(Written):
    """The exponentially weighted mean of something that updates measure, without bias from the start.

    Each update counts `decay` times as much as the one after it, and the mean is divided by the sum of these weights:
    over few updates it is their mean, and not drawn towards 0.

    Reads:  of `UpdateDone`: `loss`, `grad_norm`, a measure (its mean in the window), or a fact.
    Result: a float; None before the first update that tells.
    Edges:  updates count alike, whatever their weight; those of weight 0 and values that are not finite pass by, or
            one of them would be in the mean for good.
    Merge:  two logs, the second after the first.
    Args:   measure: what to read; decay: above 0 and at most 1, where it is the plain mean.
    Raises: SettingError, when built.
    Source: Kingma, Ba 2015, arXiv:1412.6980, section 3.
    """

    measure: str = attrs.field(default="loss", validator=text)
    decay: float = 0.98
    name: str = attrs.field(default=attrs.Factory(lambda mean: f"ExponentialMean {mean.measure}", takes_self=True))

    def __attrs_post_init__(self) -> None:
        share("ExponentialMean.decay", self.decay, up_to_one=True)

    def init(self) -> fading.Sums:
        """(sum, sum of weights, count) of nothing."""
        return 0.0, 0.0, 0

    def reduce(self, accumulator: fading.Sums, event: Event) -> fading.Sums:
        """Let the values before fade, and add an update's."""
        value = reading(event, self.measure) if isinstance(event, UpdateDone) else None
        return accumulator if value is None or not math.isfinite(value) else self.merge(accumulator, (value, 1.0, 1))

    def result(self, accumulator: fading.Sums) -> float | None:
        """The mean as of the last update."""
        total, weight, count = accumulator
        return total / weight if count else None

    def merge(self, a: fading.Sums, b: fading.Sums) -> fading.Sums:
        """Two logs, the second after the first."""
        return fading.joined(a, b, self.decay)

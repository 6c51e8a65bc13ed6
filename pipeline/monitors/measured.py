"""Monitors of what the updates measured: losses, measures, rates, gradient norms."""

from __future__ import annotations

import attrs

from pipeline.events import Event, UpdateDone

__all__ = ["GradNorm", "LearningRate", "Mean", "MeanLoss"]

WeightedSum = tuple[float, float]


class _WeightedMean:
    """What the two means share: (sum, weight), and how these come together."""

    def init(self) -> WeightedSum:
        """(sum, weight) of nothing."""
        return 0.0, 0.0

    def result(self, accumulator: WeightedSum) -> float | None:
        """The mean so far."""
        return accumulator[0] / accumulator[1] if accumulator[1] else None

    def merge(self, a: WeightedSum, b: WeightedSum) -> WeightedSum:
        """Two logs, or two ranks, as one."""
        return a[0] + b[0], a[1] + b[1]


@attrs.frozen
class MeanLoss(_WeightedMean):
    """The mean training loss over all items of all updates, weighted by their number.

    Reads:  `UpdateDone.loss`, `weight`.
    Result: a float; None before the first update and where no item counted.
    """

    name: str = "MeanLoss"

    def reduce(self, accumulator: WeightedSum, event: Event) -> WeightedSum:
        """Add an update's loss by its weight."""
        if not isinstance(event, UpdateDone) or not float(event.weight):
            return accumulator
        return self.merge(accumulator, (float(event.loss) * float(event.weight), float(event.weight)))


@attrs.frozen
class Mean(_WeightedMean):
    """The mean of one training measure over all items that it counted in all updates.

    Reads:  `UpdateDone.measures[measure]`.
    Result: a float; None before the first update that carries the measure.
    """

    measure: str
    name: str = attrs.field(default=attrs.Factory(lambda mean: f"Mean {mean.measure}", takes_self=True))

    def reduce(self, accumulator: WeightedSum, event: Event) -> WeightedSum:
        """Add an update's sum and weight."""
        if not isinstance(event, UpdateDone) or self.measure not in event.measures:
            return accumulator
        total, weight = event.measures[self.measure]
        return self.merge(accumulator, (float(total), float(weight)))


@attrs.frozen
class LearningRate:
    """The learning rate that the last update used.

    Reads:  `UpdateDone.rates[group]`.
    Result: a float; None before the first update.
    """

    group: str = "default"
    name: str = "LearningRate"

    def init(self) -> float | None:
        """None: no update yet."""
        return None

    def reduce(self, accumulator: float | None, event: Event) -> float | None:
        """The rate of the newest update."""
        return event.rates.get(self.group, accumulator) if isinstance(event, UpdateDone) else accumulator

    def result(self, accumulator: float | None) -> float | None:
        """The newest rate."""
        return accumulator


@attrs.frozen
class GradNorm:
    """The global gradient norm before clipping: last, mean over the updates, and largest.

    Reads:  `UpdateDone.grad_norm`.
    Result: {"last", "mean", "max"}, floats; None before the first update.
    """

    name: str = "GradNorm"

    def init(self) -> tuple[float, float, int, float]:
        """(last, sum, count, max) of nothing."""
        return 0.0, 0.0, 0, 0.0

    def reduce(self, accumulator: tuple[float, float, int, float], event: Event) -> tuple[float, float, int, float]:
        """Take an update's norm in."""
        if not isinstance(event, UpdateDone):
            return accumulator
        norm, (_, total, count, largest) = float(event.grad_norm), accumulator
        return norm, total + norm, count + 1, max(largest, norm)

    def result(self, accumulator: tuple[float, float, int, float]) -> dict[str, float] | None:
        """Last, mean and largest so far."""
        last, total, count, largest = accumulator
        return {"last": last, "mean": total / count, "max": largest} if count else None

    def merge(
        self, a: tuple[float, float, int, float], b: tuple[float, float, int, float]
    ) -> tuple[float, float, int, float]:
        """Two logs, the second after the first."""
        return b[0] if b[2] else a[0], a[1] + b[1], a[2] + b[2], max(a[3], b[3])

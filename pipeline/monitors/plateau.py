"""When to lower the learning rate: a measure of an evaluation that has stopped improving."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import attrs

from pipeline._checks import is_number, not_negative, one_of, share, text, whole
from pipeline.errors import SettingError
from pipeline.events import EvalDone, Event
from pipeline.monitor import ScaleRate, Signal
from pipeline.monitors._written import Written

__all__ = ["Plateau"]

Seen = tuple[float | None, int, int, float]
"""The best value, evaluations without improvement, evaluations of cooldown to come, the factor."""


@attrs.frozen(repr=False)
class Plateau(Written):
    """Ask for a lower learning rate when a measure of an evaluation has not improved for more than `patience` times.

    After patience + 1 evaluations in a row without improvement the factor on the rates becomes `factor` times what it
    was. Then for `cooldown` evaluations none counts against it. The convention is that of torch's `ReduceLROnPlateau`,
    to the evaluation.

    Reads:   `EvalDone.values[measure]`; evaluations that do not report it pass by.
    Result:  the factor on the rates now, a float, 1 before the first cut; None before the first value.
    Edges:   NaN counts as no improvement and is never best. A relative threshold is a share of the best value's size,
             so that it works below zero too (torch's does not).
    Signals: `ScaleRate` from the first cut on, with the factor in whole: asked twice it is the same.
    Args:    measure: `<evaluation>_<measure>`, such as "val_loss"; factor: of each cut, below 1; patience: evaluations
             without improvement that are borne; cooldown: evaluations after a cut that do not count; threshold: how
             much better a value must be to count, as a share of the best one or, with `threshold_mode="absolute"`, in
             units of the measure; mode: "min" or "max"; floor: the factor never goes below; warmup: evaluations before
             that many updates pass by.
    Raises:  SettingError, when built. A fold raises MeasureError once every evaluation has run and none reports it.
    Source:  `torch.optim.lr_scheduler.ReduceLROnPlateau`.
    """

    measure: str = attrs.field(validator=text)
    factor: float = 0.1
    patience: int = 10
    cooldown: int = 0
    threshold: float = 1e-4
    threshold_mode: Literal["relative", "absolute"] = "relative"
    mode: Literal["min", "max"] = "min"
    floor: float = 0.0
    warmup: int = 0
    name: str = "Plateau"

    def __attrs_post_init__(self) -> None:
        share("Plateau.factor", self.factor)
        for setting in ("patience", "cooldown", "warmup"):
            whole(f"Plateau.{setting}", getattr(self, setting), 0)
        one_of("Plateau.threshold_mode", self.threshold_mode, "relative", "absolute")
        not_negative("Plateau.threshold", self.threshold)
        if self.threshold_mode == "relative" and self.threshold >= 1:
            expected = "0 or more, and below 1 where it is relative"
            raise SettingError("Plateau.threshold", expected, self.threshold)
        one_of("Plateau.mode", self.mode, "min", "max")
        if not is_number(self.floor) or not 0 <= self.floor < 1:
            cure = "It is a bound on the factor, not on the rate: the lowest rate divided by the scheduled one."
            raise SettingError("Plateau.floor", "0 or more and below 1", self.floor, cure)

    @property
    def watches(self) -> tuple[str, ...]:
        """The measures of evaluations without which this monitor means nothing."""
        return (self.measure,)

    def init(self) -> Seen:
        """No value yet, and the rates as scheduled."""
        return None, 0, 0, 1.0

    def reduce(self, accumulator: Seen, event: Event) -> Seen:
        """Compare an evaluation's value with the best, and cut once the patience is used up."""
        if not isinstance(event, EvalDone) or self.measure not in event.values or event.update < self.warmup:
            return accumulator
        best, bad, cooling, factor = accumulator
        value = float(event.values[self.measure])
        if self._better(value, best):
            best, bad = value, 0
        else:
            bad += 1
        if cooling:
            bad, cooling = 0, cooling - 1
        if bad > self.patience:
            bad, cooling, factor = 0, self.cooldown, max(factor * self.factor, self.floor)
        return best, bad, cooling, factor

    def _better(self, value: float, best: float | None) -> bool:
        sign = 1 if self.mode == "min" else -1
        if best is None or math.isinf(best):  # no margin: a share of infinity would not be a number
            return sign * value < (math.inf if best is None else sign * best)
        if self.threshold_mode == "absolute":
            return sign * value < sign * best - self.threshold
        return sign * value < sign * best * (1 - math.copysign(self.threshold, sign * best))

    def result(self, accumulator: Seen) -> float | None:
        """The factor now."""
        return None if accumulator == self.init() else accumulator[3]

    def signals(self, accumulator: Seen) -> Iterable[Signal]:
        """The factor, once there was a cut."""
        if accumulator[3] < 1:
            yield ScaleRate(accumulator[3])

"""The best value of a measure."""

from __future__ import annotations

import math
from typing import Literal

import attrs

from pipeline._checks import one_of, text
from pipeline.events import EvalDone, Event, UpdateDone
from pipeline.monitors._readings import reading
from pipeline.monitors._written import Written

__all__ = ["Best"]

Found = tuple[float, int, int] | None
"""The value, its update, its epoch."""


@attrs.frozen(repr=False)
class Best(Written):
    """The best value of a measure, of an evaluation or of the updates, and when it came.

    Reads:  `EvalDone.values[measure]`; with `of="updates"`, of `UpdateDone`: `loss`, `grad_norm`, a measure (its mean
            in the window), or a fact. Events that do not tell it pass by.
    Result: {"best", "update", "epoch"}; None before the first value that is a number.
    Edges:  NaN is never best. Infinities are values like others. Of equal values the first stays.
    Merge:  two logs, the second after the first.
    Args:   measure: such as "val_loss"; mode: "min" or "max"; of: "evaluations" or "updates".
    Raises: SettingError, when built. A fold raises MeasureError once every evaluation has run and none reports it.
    """

    measure: str = attrs.field(validator=text)
    mode: Literal["min", "max"] = "min"
    of: Literal["evaluations", "updates"] = "evaluations"
    name: str = attrs.field(default=attrs.Factory(lambda best: f"Best {best.measure}", takes_self=True))

    def __attrs_post_init__(self) -> None:
        one_of("Best.mode", self.mode, "min", "max")
        one_of("Best.of", self.of, "evaluations", "updates")

    @property
    def watches(self) -> tuple[str, ...]:
        """The measures of evaluations without which this monitor means nothing."""
        return (self.measure,) if self.of == "evaluations" else ()

    def init(self) -> Found:
        """None: no value yet."""
        return None

    def reduce(self, accumulator: Found, event: Event) -> Found:
        """Compare a value with the best."""
        value = self._value(event)
        if value is None or math.isnan(value):
            return accumulator
        return self.merge(accumulator, (value, event.update, event.epoch))

    def _value(self, event: Event) -> float | None:
        if self.of == "updates":
            return reading(event, self.measure) if isinstance(event, UpdateDone) else None
        if isinstance(event, EvalDone) and self.measure in event.values:
            return float(event.values[self.measure])
        return None

    def result(self, accumulator: Found) -> dict[str, float] | None:
        """The best so far."""
        return None if accumulator is None else dict(zip(("best", "update", "epoch"), accumulator, strict=True))

    def merge(self, a: Found, b: Found) -> Found:
        """The better one, the first of equals."""
        if a is None or b is None:
            return a if b is None else b
        better = b[0] < a[0] if self.mode == "min" else b[0] > a[0]
        return b if better else a

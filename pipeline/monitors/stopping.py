"""When to stop early."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import attrs

from pipeline._checks import not_negative, one_of, text, whole
from pipeline.events import EvalDone, Event, RunStarted
from pipeline.monitor import Signal, Stop
from pipeline.monitors._written import Written

__all__ = ["EarlyStopping"]

Seen = tuple[float | None, int, int, bool, float, float | None]
"""The best value, its update, evaluations since; whether to stop; seconds of training, and the clock."""


@attrs.frozen(repr=False)
class EarlyStopping(Written):
    """Ask to stop when a measure of an evaluation has not improved for `patience` evaluations in a row.

    Reads:   `EvalDone.values[measure]`; evaluations that do not report it pass by. With `min_seconds`, the time of
             every event.
    Result:  {"best", "update", "waited"}: the best value, the update it came at, and evaluations without improvement
             since; None before the first value.
    Edges:   NaN is never best and counts as no improvement. Evaluations in the minimum time count; the stop they would
             have led to comes with the first evaluation after it, if none was better by then. The time between two
             runs does not count.
    Signals: `Stop`, with the reason.
    Args:    measure: `<evaluation>_<measure>`, such as "val_loss"; patience: at least 1; mode: "min" or "max";
             min_delta: how much better a value must be to count; min_updates, min_seconds: the minimum time, in
             updates and in seconds of training. Seconds make the end of a run irreproducible.
    Raises:  SettingError, when built. A fold raises MeasureError once every evaluation has run and none reports it.
    Source:  Prechelt 1998, "Early Stopping - But When?", the criterion of successive strips, on one evaluation each.
    """

    measure: str = attrs.field(validator=text)
    patience: int = 3
    mode: Literal["min", "max"] = "min"
    min_delta: float = 0.0
    min_updates: int = 0
    min_seconds: float = 0.0
    name: str = "EarlyStopping"

    def __attrs_post_init__(self) -> None:
        whole("EarlyStopping.patience", self.patience)
        one_of("EarlyStopping.mode", self.mode, "min", "max")
        not_negative("EarlyStopping.min_delta", self.min_delta)
        whole("EarlyStopping.min_updates", self.min_updates, 0)
        not_negative("EarlyStopping.min_seconds", self.min_seconds)

    @property
    def watches(self) -> tuple[str, ...]:
        """The measures of evaluations without which this monitor means nothing."""
        return (self.measure,)

    def init(self) -> Seen:
        """No value, no time."""
        return None, 0, 0, False, 0.0, None

    def reduce(self, accumulator: Seen, event: Event) -> Seen:
        """Move the clock, and compare an evaluation's value with the best."""
        best, update, waited, stop, seconds, clock = accumulator
        if self.min_seconds:
            if clock is not None and not isinstance(event, RunStarted):
                seconds += event.time - clock
            clock = event.time
        if isinstance(event, EvalDone) and self.measure in event.values:
            value = float(event.values[self.measure])
            if self._better(value, best):
                best, update, waited = value, event.update, 0
            else:
                waited += 1
            late = event.update >= self.min_updates and seconds >= self.min_seconds
            stop = waited >= self.patience and late
        elif not self.min_seconds:
            return accumulator
        return best, update, waited, stop, seconds, clock

    def _better(self, value: float, best: float | None) -> bool:
        if best is None:
            return not math.isnan(value)
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta

    def result(self, accumulator: Seen) -> dict[str, float | None] | None:
        """The best value so far, its update, and evaluations since."""
        best, update, waited, *_ = accumulator
        return {"best": best, "update": update, "waited": waited} if best is not None or waited else None

    def signals(self, accumulator: Seen) -> Iterable[Signal]:
        """Stop, once the patience is used up."""
        best, update, waited, stop, *_ = accumulator
        if stop:
            reached = "no value" if best is None else f"{best:.6g} at update {update}"
            yield Stop(f"{self.name}: {self.measure} no better for {waited} evaluations (best {reached})")

"""When to stop early."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import attrs

from pipeline.errors import SettingError
from pipeline.events import EvalDone, Event
from pipeline.monitor import Signal, Stop

__all__ = ["EarlyStopping"]


@attrs.frozen
class EarlyStopping:
    """Ask to stop when a measure of an evaluation has not improved for `patience` evaluations in a row.

    Reads:   `EvalDone.values[measure]`; evaluations that do not report it pass by.
    Result:  {"best", "update", "waited"}: the best value, the update it came at, and evaluations without improvement
             since; None before the first value. NaN is never best and counts as no improvement.
    Signals: `Stop`, with the reason.
    Args:    measure: `<evaluation>_<measure>`, such as "val_loss"; patience: at least 1; mode: "min" or "max";
             min_delta: how much better a value must be to count.
    Raises:  SettingError, when built. A fold raises MeasureError once every evaluation has run and none reports it.
    Source:  Prechelt 1998, "Early Stopping - But When?", the criterion of successive strips, on one evaluation each.
    """

    measure: str
    patience: int = 3
    mode: Literal["min", "max"] = "min"
    min_delta: float = 0.0
    name: str = "EarlyStopping"

    def __attrs_post_init__(self) -> None:
        if self.patience < 1:
            raise SettingError("EarlyStopping.patience", "at least 1 evaluation", self.patience)
        if self.mode not in ("min", "max"):
            raise SettingError("EarlyStopping.mode", "'min' or 'max'", self.mode)
        if not 0 <= self.min_delta < math.inf:
            raise SettingError("EarlyStopping.min_delta", "0 or more and finite", self.min_delta)

    @property
    def watches(self) -> str:
        """The measure of an evaluation without which this monitor means nothing."""
        return self.measure

    def init(self) -> tuple[float | None, int, int]:
        """(best, its update, evaluations since) of nothing."""
        return None, 0, 0

    def reduce(self, accumulator: tuple[float | None, int, int], event: Event) -> tuple[float | None, int, int]:
        """Compare an evaluation's value with the best."""
        if not isinstance(event, EvalDone) or self.measure not in event.values:
            return accumulator
        value, (best, update, waited) = float(event.values[self.measure]), accumulator
        if not math.isnan(value) and (best is None or self._better(value, best)):
            return value, event.update, 0
        return best, update, waited + 1

    def _better(self, value: float, best: float) -> bool:
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta

    def result(self, accumulator: tuple[float | None, int, int]) -> dict[str, float | None] | None:
        """The best value so far, its update, and evaluations since."""
        best, update, waited = accumulator
        return {"best": best, "update": update, "waited": waited} if best is not None or waited else None

    def signals(self, accumulator: tuple[float | None, int, int]) -> Iterable[Signal]:
        """Stop, once the patience is used up."""
        best, update, waited = accumulator
        if waited >= self.patience:
            reached = "no value" if best is None else f"{best:.6g} at update {update}"
            yield Stop(f"{self.name}: {self.measure} no better for {waited} evaluations (best {reached})")

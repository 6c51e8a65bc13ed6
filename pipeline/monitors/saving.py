"""When to save a checkpoint: monitors that ask the fold for one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import attrs

from pipeline._checks import one_of, positive, text, whole
from pipeline.errors import SettingError
from pipeline.events import CheckpointSaved, EvalDone, Event, UpdateDone
from pipeline.monitor import Save, Signal
from pipeline.monitors._written import Written

__all__ = ["SaveBest", "SaveEvery"]

Clocked = tuple[int, float | None, int, float]
"""Update and time of the newest checkpoint, and of the newest event."""


@attrs.frozen(repr=False)
class SaveEvery(Written):
    """Ask for a checkpoint whenever so many updates, or so many minutes, have gone by.

    Reads:   `UpdateDone`, for the update; `CheckpointSaved`, whoever asked for it; with `minutes`, the time of every
             event.
    Result:  the update of the newest checkpoint; None before the first.
    Signals: `Save`: after every update that is a multiple of `updates`; or once `minutes` have gone by since the newest
             checkpoint, or since the first event, when events are published next.
    Args:    updates or minutes: one of them, above 0.
    Raises:  SettingError, when built. A fold without a store raises CheckpointError when it begins.
    """

    updates: int | None = None
    minutes: float | None = None
    name: str = "SaveEvery"

    needs_store = True

    def __attrs_post_init__(self) -> None:
        if (self.updates is None) == (self.minutes is None):
            raise SettingError("SaveEvery", "given updates or minutes", (self.updates, self.minutes))
        if self.updates is not None:
            whole("SaveEvery.updates", self.updates)
        if self.minutes is not None:
            positive("SaveEvery.minutes", self.minutes)

    def init(self) -> Clocked:
        """Nothing saved, nothing seen."""
        return 0, None, 0, 0.0

    def reduce(self, accumulator: Clocked, event: Event) -> Clocked:
        """Move on to this event."""
        saved, saved_at, update, _ = accumulator
        if isinstance(event, CheckpointSaved):
            return event.update, event.time, event.update, event.time
        if self.minutes is None and not isinstance(event, UpdateDone):
            return accumulator
        saved_at = event.time if saved_at is None else saved_at
        return saved, saved_at, event.update if isinstance(event, UpdateDone) else update, event.time

    def result(self, accumulator: Clocked) -> int | None:
        """The update of the newest checkpoint."""
        return accumulator[0] or None

    def urgent(self, event: Event) -> bool:
        """Whether events have to be published at this one, for the checkpoint to be of this update."""
        return self.updates is not None and isinstance(event, UpdateDone) and event.update % self.updates == 0

    def signals(self, accumulator: Clocked) -> Iterable[Signal]:
        """Save, once it is time."""
        saved, saved_at, update, time = accumulator
        if self.updates is not None and update // self.updates > saved // self.updates:
            yield Save(f"every {self.updates} updates")
        elif self.minutes is not None and saved_at is not None and time - saved_at >= 60 * self.minutes:
            yield Save(f"every {self.minutes:g} minutes")


Held = tuple[float | None, int, bool]
"""The best value, its update, and whether it is still to be saved."""


@attrs.frozen(repr=False)
class SaveBest(Written):
    """Ask for a checkpoint whenever a measure of an evaluation is better than ever.

    Reads:   `EvalDone.values[measure]`; evaluations that do not report it pass by. NaN is never best.
    Result:  {"best", "update"}; None before the first value.
    Signals: `Save`, right after the evaluation.
    Args:    measure: `<evaluation>_<measure>`, such as "val_loss"; mode: "min" or "max".
    Raises:  SettingError, when built. A fold without a store raises CheckpointError when it begins, and SettingError
             where its store goes by another measure.
    """

    measure: str = attrs.field(validator=text)
    mode: Literal["min", "max"] = "min"
    name: str = "SaveBest"

    needs_store = True

    def __attrs_post_init__(self) -> None:
        one_of("SaveBest.mode", self.mode, "min", "max")

    @property
    def watches(self) -> tuple[str, ...]:
        """The measures of evaluations without which this monitor means nothing."""
        return (self.measure,)

    def init(self) -> Held:
        """No value yet."""
        return None, 0, False

    def reduce(self, accumulator: Held, event: Event) -> Held:
        """Compare an evaluation's value with the best."""
        best, update, _ = accumulator
        if isinstance(event, CheckpointSaved):
            return best, update, False
        if not isinstance(event, EvalDone) or self.measure not in event.values:
            return accumulator
        value = float(event.values[self.measure])
        if math.isnan(value) or (best is not None and not (value < best if self.mode == "min" else value > best)):
            return accumulator
        return value, event.update, True

    def result(self, accumulator: Held) -> dict[str, float | int] | None:
        """The best value, and the update it came at."""
        best, update, _ = accumulator
        return None if best is None else {"best": best, "update": update}

    def signals(self, accumulator: Held) -> Iterable[Signal]:
        """Save, while the best is not saved."""
        best, _, due = accumulator
        if due:
            yield Save(f"best {self.measure}: {best:.6g}")

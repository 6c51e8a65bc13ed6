"""`observe`: monitors and sinks in a loop written by hand, or in another library's. This module knows no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, SupportsFloat

from pipeline.audience import Audience, Sink
from pipeline.events import EpochEnded, EvalDone, Event, RunEnded, RunStarted, UpdateDone
from pipeline.monitor import Monitor, ScaleRate, Signal, Stop

__all__ = ["Observer", "observe"]

_NOTHING: Mapping[str, Any] = {}


class Observer:
    """Monitors and sinks, told of a run by whoever runs it; made by `observe`, and used in a `with` block.

    `update`, `evaluation` and `epoch_ended` count and stamp the usual events; `send` takes any other. Then `results`
    holds each monitor's result by name, `stops` the reasons for which they ask to end the run (empty while none does),
    `rate_factor` what they ask the learning rates to be multiplied by, and `asked` all that they ask for now, a `Save`
    or an `Evaluate` too: nothing of it is done but by the loop. On leaving the block the sinks are closed, with a
    `RunEnded` that names the error if there was one; MeasureError, if there was none, for a monitor that watches what
    no evaluation has reported.
    """

    def __init__(self, audience: Audience, clock: Callable[[], float]) -> None:
        self._audience, self._clock = audience, clock
        self._updates = self._epoch = self._samples = self._tokens = 0
        self._stops: list[str] = []
        self._factors: dict[str, float] = {}
        self._reported: dict[str, None] = {}

    @property
    def results(self) -> dict[str, Any]:
        """Each monitor's result so far, by its name."""
        return self._audience.results()

    @property
    def stops(self) -> tuple[str, ...]:
        """Why the run should end, each reason once."""
        return tuple(self._stops)

    @property
    def rate_factor(self) -> float:
        """What the scheduled learning rates should be multiplied by."""
        return math.prod(self._factors.values())

    @property
    def asked(self) -> tuple[Signal, ...]:
        """What the monitors and sinks ask for now."""
        return tuple(signal for _, signal in self._audience.signals())

    def send(self, *events: Event) -> None:
        """Tell the monitors and sinks of these events, and take in what they ask for."""
        self._audience.tell(events)
        for event in events:
            if isinstance(event, EvalDone):
                self._reported |= dict.fromkeys(event.values)
        for who, signal in self._audience.signals():
            if isinstance(signal, Stop) and signal.reason not in self._stops:
                self._stops.append(signal.reason)
            elif isinstance(signal, ScaleRate):
                self._factors[who] = signal.factor

    def update(
        self,
        loss: SupportsFloat,
        *,
        weight: SupportsFloat = 1.0,
        rates: Mapping[str, float] = _NOTHING,
        grad_norm: SupportsFloat = math.nan,
        samples: int = 0,
        tokens: int = 0,
        measures: Mapping[str, tuple[SupportsFloat, SupportsFloat]] = _NOTHING,
        facts: Mapping[str, SupportsFloat] = _NOTHING,
    ) -> None:
        """An update was made: `loss` is the mean over its `weight` items; `samples` and `tokens` those of this update.

        A tensor is read at once: on an accelerator, that waits for it.
        """
        self._updates += 1
        self._samples += samples
        self._tokens += tokens
        self.send(
            UpdateDone(
                **self._stamp(),
                loss=float(loss),
                weight=float(weight),
                micro_batches=1,
                rates=dict(rates),
                grad_norm=float(grad_norm),
                samples=self._samples,
                tokens=self._tokens,
                measures={name: (float(total), float(count)) for name, (total, count) in measures.items()},
                facts={name: float(value) for name, value in facts.items()},
            )
        )

    def evaluation(
        self, name: str, values: Mapping[str, SupportsFloat], *, weight: SupportsFloat = 1.0, batches: int = 1
    ) -> None:
        """An evaluation was made: `values` are called `<name>_<measure>` from here on."""
        named = {f"{name}_{measure}": float(value) for measure, value in values.items()}
        self.send(EvalDone(**self._stamp(), name=name, values=named, weight=float(weight), batches=batches))

    def epoch_ended(self, *, batches: int = 0) -> None:
        """A pass over the data ended."""
        self._epoch += 1
        self.send(EpochEnded(**self._stamp(), batches=batches))

    def _stamp(self) -> dict[str, Any]:
        return {
            "micro_step": self._updates, "update": self._updates, "epoch": self._epoch, "time": self._clock(),
        }  # fmt: skip

    def __enter__(self) -> Self:
        with ExitStack() as closing:  # a sink that fails at once leaves none open
            for sink in self._audience.sinks:
                closing.callback(sink.close)
            self.send(RunStarted(**self._stamp(), until="the end of the loop"))
            closing.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as closing:
            for sink in self._audience.sinks:
                closing.callback(sink.close)
            if error is None:
                self.send(RunEnded(**self._stamp(), reasons=self.stops or ("the loop ended",)))
                if self._reported:
                    self._audience.check_watched(self._reported)
            else:
                reasons = (f"{type(error).__name__}: {error}",)
                self._audience.tell_of_failure(error, [RunEnded(**self._stamp(), reasons=reasons)])


def observe(
    monitors: Iterable[Monitor] = (), sinks: Iterable[Sink] = (), *, clock: Callable[[], float] = time.time
) -> Observer:
    """Watch a loop written by hand, or another library's: no fold, and no torch.

    Args:   clock: stamps the events, in seconds.
    Raises: DuplicateNameError for two monitors of one name; SettingError for what is no monitor or no sink.
    """
    return Observer(Audience(monitors, sinks), clock)

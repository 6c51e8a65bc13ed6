"""Who watches a run: the monitors' accumulators carried, the sinks fed, and what they ask for handed to the loop."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs

from pipeline._publication import settle
from pipeline.errors import MeasureError
from pipeline.events import EvalDone, Event, MicroBatchDone, RunEnded, UpdateDone
from pipeline.monitor import Monitor, ScaleRate, Signal, Stop
from pipeline.records import Progress, TrainState, Window
from pipeline.run import Run, Sink
from pipeline.tensors import Tensors

Clock = Callable[[], float]


def stamp(progress: Progress, now: float) -> dict[str, Any]:
    """Where in the run an event happens, and when."""
    return {"micro_step": progress.micro_steps, "update": progress.updates, "epoch": progress.epoch, "time": now}


@attrs.define
class Watched:
    """What the loop and whoever watches it share: the newest state, and the reasons to stop."""

    state: TrainState
    stops: list[str] = attrs.field(factory=list[str])
    factors: dict[str, float] = attrs.field(factory=dict[str, float])
    undelivered: tuple[Event, ...] = ()  # what has happened, and waits for an evaluation
    base: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.base = self.state.rate_factor  # what was asked for before this run

    def asked(self, monitor: str, signal: Signal) -> None:
        """Take in what a monitor asks for."""
        if isinstance(signal, Stop) and signal.reason not in self.stops:
            self.stops.append(signal.reason)
        elif isinstance(signal, ScaleRate):
            self.factors[monitor] = signal.factor

    def scaled(self, state: TrainState) -> TrainState:
        """The state with the learning rates scaled as the monitors ask, all their factors together."""
        if not self.factors:
            return state
        factor = math.prod(self.factors.values(), start=self.base)
        return state if factor == state.rate_factor else attrs.evolve(state, rate_factor=factor)


class Publisher:
    """Carries the accumulators; hands events to monitors and sinks, many at a time."""

    def __init__(
        self,
        watched: Watched,
        monitors: tuple[Monitor, ...],
        sinks: tuple[Sink, ...],
        evaluations: tuple[str, ...],
        every: int,
        clock: Clock,
    ) -> None:
        self.clock = clock
        self.watched, self.monitors, self.sinks, self.every = watched, monitors, sinks, every
        self.accumulators = [m.init() for m in monitors]
        self.pending: list[Event] = []
        self.waiting = 0
        # A queue each, so that one that fails takes nothing from the others.
        self.to_reduce = [deque[Event]() for _ in monitors]
        self.to_write = [deque[Event]() for _ in sinks]
        self.reasons: tuple[str, ...] = ()
        self.to_come = set(evaluations)
        self.reported: list[str] = []
        self._check_watched()

    def take(self, events: tuple[Event, ...]) -> None:
        """The events of one micro-batch; published when enough have come together, or at once if they tell of more."""
        if not events:
            return
        self.pending.extend(events)
        for event in events:
            if isinstance(event, UpdateDone):
                self.waiting += 1
            elif not isinstance(event, MicroBatchDone):
                self.waiting = self.every
        if self.waiting >= self.every:
            self.publish()

    def publish(self) -> None:
        """Everything that is pending, in order, through one transfer."""
        events, self.pending, self.waiting = settle(self.pending), [], 0
        self._queue(events)
        for place in range(len(self.monitors)):
            self._reduce(place)
        for place in range(len(self.sinks)):
            self._write(place)
        for event in events:
            if isinstance(event, RunEnded):
                self.reasons = event.reasons
            elif isinstance(event, EvalDone):
                self._note(event)
        for monitor, accumulator in zip(self.monitors, self.accumulators, strict=True):
            if hasattr(monitor, "signals"):
                for asked in monitor.signals(accumulator):  # type: ignore[attr-defined]
                    self.watched.asked(monitor.name, asked)

    def _queue(self, events: list[Event]) -> None:
        for queue in (*self.to_reduce, *self.to_write):
            queue.extend(events)

    def _reduce(self, place: int) -> None:
        queue, monitor = self.to_reduce[place], self.monitors[place]
        while queue:
            self.accumulators[place] = monitor.reduce(self.accumulators[place], queue.popleft())

    def _write(self, place: int) -> None:
        queue, sink = self.to_write[place], self.sinks[place]
        while queue:
            sink.write(queue.popleft())

    def _note(self, event: EvalDone) -> None:
        if event.name in self.to_come:
            self.to_come.discard(event.name)
            self.reported += event.values
            self._check_watched()

    def _check_watched(self) -> None:
        """Once every evaluation has run, what a monitor watches must have been among what they report."""
        for monitor in self.monitors:
            watched = getattr(monitor, "watches", None)
            if watched is not None and not self.to_come and watched not in self.reported:
                raise MeasureError(monitor.name, watched, self.reported)

    def run(self) -> Run:
        """The run as it stands, its state owned by nobody."""
        state = self.watched.scaled(self.watched.state)
        let_go(state)
        results = {m.name: m.result(a) for m, a in zip(self.monitors, self.accumulators, strict=True)}
        return Run(state.borrowed(), results, self.reasons)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """An error takes the run up to it along."""
        if error is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """Attach the run; then tell each monitor and each sink of it, so that one that fails too hides nothing."""
        state = self.watched.state
        pending = [*self.pending, *self.watched.undelivered]
        if not self.reasons:  # otherwise the run had ended, and was told of, before this error
            self.reasons = (f"{type(error).__name__}: {error}",)
            pending.append(RunEnded(**stamp(state.progress, self.clock()), reasons=self.reasons))
        self._queue(settle(pending))
        results: dict[str, Any] = {}
        for place, monitor in enumerate(self.monitors):
            with _noted(error, f"monitor {monitor.name!r}"):
                self._reduce(place)
                results[monitor.name] = monitor.result(self.accumulators[place])
        for place, sink in enumerate(self.sinks):
            with _noted(error, repr(sink)):
                self._write(place)
        attach(error, self.watched.scaled(state), results, self.reasons)


@contextmanager
def _noted(error: BaseException, who: str) -> Generator[None]:
    """A second error becomes a note on the first, which is the one to tell of."""
    try:
        yield
    except Exception as second:
        error.add_note(f"and then, on telling {who} of the end of the run: {second!r}")


def attach(error: BaseException, state: TrainState, results: Mapping[str, Any], reasons: tuple[str, ...]) -> None:
    """Let the error carry the run that it ended."""
    state, lost = _usable(state)
    let_go(state)
    error.__run__ = Run(state.borrowed(), results, reasons)  # type: ignore[attr-defined]
    error.add_note(f"the run up to here: pipeline.run_of(error){lost}")


def let_go(state: TrainState) -> None:
    """Leave no window's sums behind in the parameters' `.grad`."""
    if state.params.is_owned:
        for param in state.params.renewed().flat:
            param.grad = None


def _usable(state: TrainState) -> tuple[TrainState, str]:
    """The state with what a failed micro-batch had begun to write: said, and never silently wrong."""
    lost = ""
    if state.buffers.is_stale:
        state = attrs.evolve(state, buffers=state.buffers.renewed())
        lost += "; its buffers have seen the failed micro-batch"
    if state.params.is_stale:
        params, optimizer = state.params.renewed(), state.optimizer.renewed()
        state = attrs.evolve(state, params=params, optimizer=optimizer, window=Window())
        lost += "; its parameters have seen an update that it does not count"
    if state.window.grads.is_stale:
        state = attrs.evolve(state, window=Window())
        lost += "; the open window's sums were lost"
    for name, value in state.slots.items():
        if isinstance(value, Tensors) and value.is_stale:
            state = attrs.evolve(state, slots={**state.slots, name: value.renewed()})
            lost += f"; slot {name!r} has seen an update that it does not count"
    return state, lost

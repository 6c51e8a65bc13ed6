"""Who watches a run: the monitors' accumulators carried, the sinks fed, and what they ask for handed to the loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import attrs

from pipeline._publication import Transfer, settle
from pipeline.audience import Audience
from pipeline.checkpoint import Checkpoint
from pipeline.errors import LossError
from pipeline.events import EvalDone, Event, MemoryMeasured, MicroBatchDone, RunEnded, UpdateDone
from pipeline.monitor import Evaluate, Rewind, Save, ScaleRate, Signal, Stop
from pipeline.records import Part, Progress, TrainState, Window
from pipeline.run import Run
from pipeline.tensors import Tensors

Clock = Callable[[], float]


def stamp(progress: Progress, now: float) -> dict[str, Any]:
    """Where in the run an event happens, and when."""
    return {"micro_step": progress.micro_steps, "update": progress.updates, "epoch": progress.epoch, "time": now}


@attrs.define
class Watched:
    """What the loop and whoever watches it share: the newest state, and what is asked of the loop."""

    state: TrainState
    stops: list[str] = attrs.field(factory=list[str])
    interrupted: bool = False  # one of them comes from outside
    evaluate: list[str | None] = attrs.field(factory=list[str | None])  # by name; None is all of them
    saves: list[str] = attrs.field(factory=list[str])
    rewinds: list[Rewind] = attrs.field(factory=list[Rewind])
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
        elif isinstance(signal, Evaluate) and signal.name not in self.evaluate:
            self.evaluate.append(signal.name)
        elif isinstance(signal, Save) and signal.reason not in self.saves:
            self.saves.append(signal.reason)
        elif isinstance(signal, Rewind):
            self.rewinds.append(signal)

    def scaled(self, state: TrainState) -> TrainState:
        """The state with the learning rates scaled as the monitors ask, all their factors together."""
        if not self.factors:
            return state
        factor = math.prod(self.factors.values(), start=self.base)
        return state if factor == state.rate_factor else attrs.evolve(state, rate_factor=factor)


class Publisher:
    """Gathers the events of a fold and tells its audience of them, many at a time.

    Where the measured values lie on an accelerator, `late`, those of one publication are copied while the next updates
    are made, and told of with the next one: always one later, so that what monitors decide is reproducible. An
    evaluation, a skipped window, an epoch and the end are told of at once.
    """

    def __init__(
        self,
        watched: Watched,
        audience: Audience,
        evaluations: tuple[str, ...],
        every: int,
        clock: Clock,
        late: bool = False,
    ) -> None:
        self.clock, self.watched, self.audience, self.every, self.late = clock, watched, audience, every, late
        self.pending: list[Event] = []
        self.under_way = Transfer(())
        self.waiting = self.told = 0
        self.reasons: tuple[str, ...] = ()
        self.to_come = set(evaluations)
        self.reported: list[str] = []
        self._urgent = [monitor.urgent for monitor in audience.monitors if hasattr(monitor, "urgent")]  # type: ignore[attr-defined]
        self._check_watched()

    def take(self, events: tuple[Event, ...]) -> None:
        """The events of one micro-batch; published when enough have come together, or at once if they tell of more."""
        if not events:
            return
        self.pending.extend(events)
        at_once = False
        for event in events:
            if isinstance(event, UpdateDone):
                self.waiting += 1
            elif not isinstance(event, (MicroBatchDone, MemoryMeasured)):
                at_once = True
            at_once = at_once or any(urgent(event) for urgent in self._urgent)
        if at_once or self.waiting >= self.every:
            self.publish(at_once=at_once)

    def publish(self, *, at_once: bool) -> None:
        """Everything that is pending, in order, through one transfer."""
        before, self.under_way = self.under_way, Transfer(self.pending)
        self.pending, self.waiting = [], 0
        self._tell(before)
        if at_once or not self.late:
            now, self.under_way = self.under_way, Transfer(())
            self._tell(now)

    def unpublished(self) -> tuple[list[Event], list[Event]]:
        """The events that nobody was told of yet: those under way, and those that come after."""
        return self.under_way.events(), settle(self.pending)

    def go_on_from(self, checkpoint: Checkpoint) -> list[str]:
        """Begin where another run stood; what is not as it was there."""
        cut = checkpoint.under_way
        self.under_way, self.pending = Transfer(checkpoint.pending[:cut]), list(checkpoint.pending[cut:])
        self.waiting = sum(isinstance(event, UpdateDone) for event in self.pending)
        self.told = checkpoint.told
        names = self.audience.go_on_from(checkpoint.accumulators, checkpoint.told)
        for who, signal in self.audience.signals():
            if isinstance(signal, (Stop, ScaleRate)):  # the others were heard then
                self.watched.asked(who, signal)
        there = checkpoint.accumulators
        return [
            f"the monitor {name!r} of the checkpoint is not there any more: what it had gathered is dropped"
            if name in there
            else f"the monitor {name!r} was not there when the checkpoint was saved: it begins here"
            for name in names
        ]

    def _tell(self, transfer: Transfer) -> None:
        events = transfer.events()
        if not events:
            return
        self.audience.tell(events)
        self.told += len(events)
        for event in events:
            if isinstance(event, RunEnded):
                self.reasons = event.reasons
            elif isinstance(event, EvalDone):
                self._note(event)
        for who, signal in self.audience.signals():
            self.watched.asked(who, signal)

    def _note(self, event: EvalDone) -> None:
        if event.name in self.to_come:
            self.to_come.discard(event.name)
            self.reported += event.values
            self._check_watched()

    def _check_watched(self) -> None:
        """Once every evaluation has run, what a monitor watches must have been among what they report."""
        if not self.to_come:
            self.audience.check_watched(self.reported)

    def run(self) -> Run:
        """The run as it stands, its state owned by nobody."""
        state = self.watched.scaled(self.watched.state)
        let_go(state)
        return Run(state.borrowed(), self.audience.results(), self.reasons)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """An error takes the run up to it along."""
        if error is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """Attach the run; then tell each monitor and each sink of it, so that one that fails too hides nothing."""
        state = self.watched.state
        pending = self.under_way.events()
        for event in (*self.pending, *self.watched.undelivered):
            with suppress(LossError):  # what cannot be told of may be what the error is about
                pending += settle([event])
        if not self.reasons:  # otherwise the run had ended, and was told of, before this error
            self.reasons = (f"{type(error).__name__}: {error}",)
            pending.append(RunEnded(**stamp(state.progress, self.clock()), reasons=self.reasons))
        results = self.audience.tell_of_failure(error, pending)
        attach(error, self.watched.scaled(state), results, self.reasons)


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
        if isinstance(value, (Tensors, Part)) and value.is_stale:
            state = attrs.evolve(state, slots={**state.slots, name: value.renewed()})
            lost += f"; slot {name!r} has seen an update that it does not count"
    return state, lost

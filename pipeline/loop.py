"""The only loop: a step folded over a stream of batches, with the monitors and sinks that watch it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, cast

import attrs
from torch import nn

from pipeline import _randomness as randomness
from pipeline._binding import bind
from pipeline._publication import settle
from pipeline.errors import DuplicateNameError, MeasureError, SettingError
from pipeline.evaluation import Evaluation
from pipeline.events import (
    BatchSkipped,
    EpochEnded,
    EpochStarted,
    EvalDone,
    Event,
    MicroBatchDone,
    RunEnded,
    RunStarted,
    UpdateDone,
)
from pipeline.monitor import Monitor, Stop
from pipeline.records import Frame, LossScale, Progress, Rng, TrainState, Window
from pipeline.transform import Transform, chain
from pipeline.until import Epochs, Limit

__all__ = ["Run", "Sink", "apply", "fold", "init", "run_of", "scan"]

Clock = Callable[[], float]
_END = object()
_STREAM = 1  # the purpose of the draws that a stream makes, told apart from the step's


class Sink(Protocol):
    """Where events go: to a console, a file, a service. May hold resources, and is closed when the run ends."""

    def write(self, event: Event, /) -> None: ...

    def close(self) -> None: ...


@attrs.frozen(eq=False)
class Run:
    """What a fold returns: the last state, the monitors' results by name, and why it ended, all reasons kept."""

    state: TrainState
    results: Mapping[str, Any]
    stopped_by: tuple[str, ...]


def init(
    step: Transform, model: nn.Module, *, seed: int = 0, rank: int = 0, loss_scale: LossScale | None = None
) -> TrainState:
    """The state before the first batch, bound to `model`: it shares the module's parameters and buffers.

    Args: seed: all randomness in the steps follows from it; rank: tells processes that share a seed apart.
    Raises: what the step's transforms raise when their settings do not fit the model.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SettingError("init(model)", "a torch.nn.Module", model)
    params, buffers = bind(model)
    return chain(step).init(TrainState(params, buffers, rng=Rng(seed, rank), loss_scale=loss_scale))


def apply(step: Transform, state: TrainState, batch: Any, *, time: float = 0.0) -> tuple[TrainState, tuple[Event, ...]]:
    """One micro-batch, for a test or a REPL: the next state and the events. `state` and its module stay as they are.

    A batch of None is passed over, as in a fold.
    """
    generators = randomness.default_generators(state)
    if batch is None:
        return state, (BatchSkipped(**_at(state.progress, time)),)
    with randomness.isolated(generators):
        randomness.seed(generators, state.rng.key(state.progress.micro_steps))
        frame = chain(step)(Frame(state.borrowed(), batch, time))
    return frame.state, frame.events


def scan(
    step: Transform,
    state: TrainState,
    stream: Iterable[Any],
    *,
    until: Limit | None = None,
    evaluations: Iterable[Evaluation] = (),
    donate: bool = True,
    clock: Clock = time.time,
) -> Iterator[tuple[TrainState, tuple[Event, ...]]]:
    """The loop in your own hands: `(state, events)` after every micro-batch, after every epoch, and at the end.

    The state is updated in place: take `state.copy()` of one to keep, or `donate=False`. Between two items the random
    generators are yours. Measured values in the events are still on their device: `float(event.loss)` reads one.
    """
    state = state.owned() if donate else state.borrowed()
    return _with_own_randomness(_drive(step, state, stream, until, tuple(evaluations), clock, []), state)


def fold(
    step: Transform,
    state: TrainState,
    stream: Iterable[Any],
    *,
    monitors: Iterable[Monitor] = (),
    sinks: Iterable[Sink] = (),
    until: Limit | None = None,
    evaluations: Iterable[Evaluation] = (),
    donate: bool = True,
    publish_every: int = 10,
    clock: Clock = time.time,
) -> Run:
    """Fold `step` over `stream` from `state`, and return the run.

    The state is taken over and updated in place: a state bound to a module trains that module. With `donate=False`
    every state stays as it is, the module too, and `run.state.load_into(model)` puts the result there.

    Ctrl-C ends the run after the micro-batch at work, and the result is returned; a second one stops at once. An
    error, of the stream or of the step, keeps its type, and `run_of(error)` is the run up to there.

    Args: step: a chain, or any `Frame -> Frame`; stream: batches, read once per epoch; None among them is passed over;
          monitors: reducers over the events, by name in `run.results`; sinks: where events go; until: a `Limit`, one
          pass over the stream by default; evaluations: other folds, in between; publish_every: updates between two
          publications of events, which also come at evaluations, skipped windows, epochs and the end; clock: stamps the
          events, in seconds.
    Raises: DuplicateNameError for two monitors or evaluations of one name; MeasureError for a monitor that watches
          what no evaluation reports; StaleStateError for a state that was handed over before.
    """
    monitors, sinks, evaluations = tuple(monitors), tuple(sinks), tuple(evaluations)
    stops: list[str] = []
    with ExitStack() as closing:
        for sink in sinks:
            closing.callback(sink.close)
        _check_names("monitor", [m.name for m in monitors])
        _check_names("evaluation", [e.name for e in evaluations])
        if publish_every < 1:
            raise SettingError("fold(publish_every)", "at least 1 update", publish_every)
        state = state.owned() if donate else state.borrowed()
        publisher = _Publisher(state, monitors, sinks, tuple(e.name for e in evaluations), publish_every, stops)
        with randomness.isolated(randomness.default_generators(state)), _ctrl_c(stops), publisher:
            for now, events in _drive(step, state, stream, until, evaluations, clock, stops):
                publisher.take(now, events)
    return publisher.run()


def run_of(error: BaseException) -> Run:
    """The run that `error` ended: the state before the micro-batch that failed, and the results up to there.

    Raises: ValueError for an error that no fold raised.
    """
    run = getattr(error, "__run__", None)
    if not isinstance(run, Run):
        raise ValueError("this error did not come out of a fold")
    return run


def _check_names(kind: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise DuplicateNameError(kind, name)


def _at(progress: Progress, now: float) -> dict[str, Any]:
    return {"micro_step": progress.micro_steps, "update": progress.updates, "epoch": progress.epoch, "time": now}


def _drive(
    step: Transform,
    state: TrainState,
    stream: Iterable[Any],
    until: Limit | None,
    evaluations: tuple[Evaluation, ...],
    clock: Clock,
    stops: list[str],
) -> Iterator[tuple[TrainState, tuple[Event, ...]]]:
    """The loop itself. `stops` is filled by whoever watches, and read after every micro-batch."""
    step = chain(step)
    limit = Epochs(state.progress.epoch + 1) if until is None else until
    generators = randomness.default_generators(state)
    rng, started = state.rng, clock()

    def reasons(now: float) -> tuple[str, ...]:
        reached = limit.reasons(state.progress, now - started)
        return (*reached, *stops) if stops else reached

    def evaluate(*, updated: bool, epoch_ended: bool) -> tuple[Event, ...]:
        due = [e for e in evaluations if e.when.due(state.progress, updated=updated, epoch_ended=epoch_ended)]
        return tuple(e.run(state, time=clock()) for e in due)

    yield state, (RunStarted(**_at(state.progress, started), until=repr(limit), total_updates=limit.total_updates()),)
    ended = reasons(started)
    while not ended:
        yield state, (EpochStarted(**_at(state.progress, clock())),)
        batches = read = 0
        # What the stream draws hangs on its place alone, and not on who drew before.
        randomness.seed(generators, rng.key(state.progress.epoch << 32, _STREAM))
        iterator = iter(stream)
        while True:
            batch = next(iterator, _END)
            if batch is _END:
                break
            read += 1
            now = clock()
            if batch is None:
                yield state, (BatchSkipped(**_at(state.progress, now)),)
            else:
                batches += 1
                progress = state.progress
                randomness.seed(generators, rng.key(progress.micro_steps))
                frame = step(Frame.begin(state, batch, now))
                state, events = frame.state, frame.events
                del frame, batch  # nothing of this micro-batch stays alive while the next one is read
                if evaluations and state.progress.updates != progress.updates:
                    events = (*events, *evaluate(updated=True, epoch_ended=False))
                yield state, events
            ended = reasons(now)
            if ended:
                break
            randomness.seed(generators, rng.key((state.progress.epoch << 32) + read, _STREAM))
        events = ()
        if state.window.micro_batches:
            frame = step.finish(Frame(state, time=clock()))
            updated = frame.state.progress.updates != state.progress.updates
            state, events = frame.state, frame.events
            del frame
            events = (*events, *evaluate(updated=updated, epoch_ended=False))
        if not ended or read == _length(stream):
            state = attrs.evolve(state, progress=attrs.evolve(state.progress, epoch=state.progress.epoch + 1))
            events = (*events, *evaluate(updated=False, epoch_ended=True))
            events = (*events, EpochEnded(**_at(state.progress, clock()), batches=batches))
        if events:
            yield state, events
        ended = ended or reasons(clock())
        if not ended and not batches:
            ended = ("the stream gave no batches",)
        elif not ended and isinstance(stream, Iterator):
            ended = ("the stream is a generator, which can be read only once",)
    yield state, (RunEnded(**_at(state.progress, clock()), reasons=ended),)


def _length(stream: Iterable[Any]) -> int | None:
    """How many batches a pass gives, where the stream knows."""
    try:
        return len(cast("Sequence[Any]", stream))
    except (TypeError, NotImplementedError):
        return None


def _with_own_randomness(
    items: Iterator[tuple[TrainState, tuple[Event, ...]]], state: TrainState
) -> Iterator[tuple[TrainState, tuple[Event, ...]]]:
    """The loop's generators while it works, the caller's in between; what opens a run joins what follows."""
    generators = randomness.default_generators(state)
    own = randomness.read(generators)
    opening: tuple[Event, ...] = ()
    while True:
        with randomness.isolated(generators):
            randomness.write(generators, own)
            item = next(items, None)
            own = randomness.read(generators)
        if item is None:
            return
        state, events = item
        if all(isinstance(event, (RunStarted, EpochStarted)) for event in events) and events:
            opening += events
            continue
        yield state, (*opening, *events)
        opening = ()


@contextmanager
def _ctrl_c(stops: list[str]) -> Generator[None]:
    """The first Ctrl-C asks the loop to stop; the second stops at once. A handler of the user's own is left alone."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def ask(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stops.append("interrupted (Ctrl-C)")

    signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Publisher:
    """Carries the accumulators; hands events to monitors and sinks, many at a time."""

    def __init__(
        self,
        state: TrainState,
        monitors: tuple[Monitor, ...],
        sinks: tuple[Sink, ...],
        evaluations: tuple[str, ...],
        every: int,
        stops: list[str],
    ) -> None:
        self.monitors, self.sinks, self.every, self.stops = monitors, sinks, every, stops
        self.accumulators = [m.init() for m in monitors]
        self.pending: list[Event] = []
        self.waiting = 0
        self.reasons: tuple[str, ...] = ()
        self.state = state
        self.to_come = set(evaluations)
        self.reported: list[str] = []
        self._check_watched()

    def take(self, state: TrainState, events: tuple[Event, ...]) -> None:
        """The events of one micro-batch; published when enough have come together, or at once if they tell of more."""
        self.state = state
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
        for event in events:
            self.accumulators = [m.reduce(a, event) for m, a in zip(self.monitors, self.accumulators, strict=True)]
            for sink in self.sinks:
                sink.write(event)
            if isinstance(event, RunEnded):
                self.reasons = event.reasons
            elif isinstance(event, EvalDone):
                self._note(event)
        for monitor, accumulator in zip(self.monitors, self.accumulators, strict=True):
            if hasattr(monitor, "signals"):
                for asked in monitor.signals(accumulator):  # type: ignore[attr-defined]
                    if isinstance(asked, Stop) and asked.reason not in self.stops:
                        self.stops.append(asked.reason)

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
        state = self.state
        if state.params.is_owned:
            for param in state.params.flat:
                param.grad = None
        results = {m.name: m.result(a) for m, a in zip(self.monitors, self.accumulators, strict=True)}
        return Run(state.borrowed(), results, self.reasons)

    def __enter__(self) -> _Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """An error takes the run up to it along."""
        if error is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        state = self.state
        self.reasons = (f"{type(error).__name__}: {error}",)
        now = self.pending[-1].time if self.pending else 0.0
        self.pending.append(RunEnded(**_at(state.progress, now), reasons=self.reasons))
        try:
            self.publish()
        finally:
            self.state, lost = _usable(state)
            error.__run__ = self.run()  # type: ignore[attr-defined]
            error.add_note(f"the run up to here: pipeline.run_of(error){lost}")


def _usable(state: TrainState) -> tuple[TrainState, str]:
    """The state with what a failed micro-batch had begun to write: said, and never silently wrong."""
    lost = ""
    if state.buffers.is_stale:
        state = attrs.evolve(state, buffers=state.buffers.renewed())
        lost = "; its buffers have seen the failed micro-batch"
    if state.window.grads.is_stale:
        state = attrs.evolve(state, window=Window())
        lost += "; the open window's sums were lost"
    return state, lost

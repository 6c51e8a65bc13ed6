"""The only loop: a step folded over a stream of batches, with the monitors and sinks that watch it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import attrs
import torch
from torch import nn

from pipeline import _randomness as randomness
from pipeline._binding import bind
from pipeline._models import models_in
from pipeline._publisher import Clock, Publisher, Watched, attach, let_go, stamp
from pipeline.errors import DuplicateNameError, SettingError
from pipeline.evaluation import Evaluation
from pipeline.events import (
    BatchSkipped,
    EpochEnded,
    EpochStarted,
    Event,
    RunEnded,
    RunStarted,
)
from pipeline.monitor import Monitor
from pipeline.records import Frame, LossScale, Progress, Rng, TrainState
from pipeline.run import Run, Sink
from pipeline.tensors import Tensors
from pipeline.transform import Chain, Transform, chain
from pipeline.until import Epochs, Limit

__all__ = ["apply", "fold", "init", "scan"]

_END = object()
_STREAM, _FINISH = 1, 3  # purposes of draws, told apart from those of a step and (2) of an evaluation


def init(
    step: Transform, model: nn.Module, *, seed: int = 0, rank: int = 0, loss_scale: LossScale | None = None
) -> TrainState:
    """The state before the first batch, bound to `model`: it shares the module's parameters and buffers.

    Args: seed: all randomness in the steps follows from it; rank: tells processes that share a seed apart.
    Raises: what the step's transforms raise when their settings do not fit the model.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SettingError("init(model)", "a torch.nn.Module", model)
    for setting, value in (("seed", seed), ("rank", rank)):
        if not isinstance(value, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SettingError(f"init({setting})", "a whole number", value)
    params, buffers = bind(model)
    return chain(step).init(TrainState(params, buffers, rng=Rng(seed, rank), loss_scale=loss_scale))


def apply(step: Transform, state: TrainState, batch: Any, *, time: float = 0.0) -> tuple[TrainState, tuple[Event, ...]]:
    """One micro-batch, for a test or a REPL: the next state and the events. `state` and its module stay as they are.

    What the micro-batch did not change the two states share. A batch of None is passed over, as in a fold.
    """
    generators = randomness.default_generators(state)
    if batch is None:
        return state, (BatchSkipped(**stamp(state.progress, time)),)
    with randomness.isolated(generators):
        return _one(chain(step), state.borrowed(), batch, time, generators)


def _one(
    step: Chain, state: TrainState, batch: Any, now: float, generators: Sequence[torch.Generator]
) -> tuple[TrainState, tuple[Event, ...]]:
    """One micro-batch, seeded by its number, and counted where the step does not count it (it has no Accumulate)."""
    progress = state.progress
    randomness.seed(generators, state.rng.key(progress.micro_steps))
    frame = step(Frame.begin(state, batch, now))
    state = frame.state
    if state.progress.micro_steps == progress.micro_steps:
        counted = attrs.evolve(state.progress, micro_steps=progress.micro_steps + 1)
        state = attrs.evolve(state, progress=counted)
    return state, frame.events


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

    The state is updated in place: take `state.copy()` of one to keep, or `donate=False`. While a window is open, the
    `.grad` of the parameters hold its sums: leave them alone. Between two items the random generators are yours.
    Measured values in the events are still on their device: `float(event.loss)` reads one. An error keeps its type, and
    `run_of(error)` holds the last state.
    """
    watched = Watched(_taken(step, state, until, donate))
    items = _drive(step, watched, stream, until, tuple(evaluations), clock)
    return _with_own_randomness(items, watched)


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
    with ExitStack() as closing:
        for sink in sinks:
            closing.callback(sink.close)
        _check_names("monitor", [m.name for m in monitors])
        _check_names("evaluation", [e.name for e in evaluations])
        if not isinstance(state, TrainState):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SettingError("fold(state)", "a TrainState", state, "Make one with `init(step, model)`.")
        if publish_every < 1:
            raise SettingError("fold(publish_every)", "at least 1 update", publish_every)
        watched = Watched(state)
        publisher = Publisher(watched, monitors, sinks, tuple(e.name for e in evaluations), publish_every, clock)
        watched.state = _taken(step, state, until, donate)  # last: what was refused before has taken nothing
        kept = closing.pop_all()
    generators, run = randomness.default_generators(watched.state), None
    try:
        with randomness.isolated(generators), _ctrl_c(watched.stops), kept, publisher:
            for _, events in _drive(step, watched, stream, until, evaluations, clock):
                publisher.take(events)
            run = publisher.run()
    except Exception as error:
        if run is not None:  # it is over, and a sink could not be closed
            attach(error, run.state, run.results, run.stopped_by)
        raise
    return run


def _taken(step: Transform, state: TrainState, until: Limit | None, donate: bool) -> TrainState:
    """The state as the loop's own, after a look at what it was given."""
    if not isinstance(state, TrainState):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SettingError("fold(state)", "a TrainState", state, "Make one with `init(step, model)`.")
    if until is not None and not isinstance(until, Limit):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SettingError("fold(until)", "a limit, such as Updates(100)", until)
    for model in models_in(chain(step)):
        if state.params.lease.holds(model) and not _is_bound(state, model):
            cure = "Its parameters were replaced since `init`; make the state anew."
            raise SettingError("fold(state)", "bound to the model as it is", type(model).__name__, cure)
    return state.owned() if donate else state.borrowed()


def _is_bound(state: TrainState, model: nn.Module) -> bool:
    for kind, now in (("params", dict(model.named_parameters())), ("buffers", dict(model.named_buffers()))):
        kept: Tensors = getattr(state, kind)
        if kept.lease.holds(model) and not (kept.index.keys() == now.keys() and all(kept[n] is now[n] for n in now)):
            return False
    return True


def _check_names(kind: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise DuplicateNameError(kind, name)


def _drive(
    step: Transform,
    watched: Watched,
    stream: Iterable[Any],
    until: Limit | None,
    evaluations: tuple[Evaluation, ...],
    clock: Clock,
) -> Iterator[tuple[TrainState, tuple[Event, ...]]]:
    """The loop itself. `watched` has the newest state at any time, and says after every micro-batch whether to stop."""
    step, state = chain(step), watched.state
    limit = Epochs(state.progress.epoch + 1) if until is None else until
    generators = randomness.default_generators(state)
    rng, started = state.rng, clock()
    draws = not isinstance(stream, (list, tuple))  # those draw nothing

    def reasons(now: float) -> tuple[str, ...]:
        reached = limit.reasons(state.progress, now - started)
        return (*reached, *watched.stops) if watched.stops else reached

    def and_evaluated(events: tuple[Event, ...], before: Progress) -> tuple[Event, ...]:
        watched.state, watched.undelivered = state, events
        for evaluation in evaluations:
            if evaluation.when.due(before, state.progress):
                watched.undelivered += (evaluation.run(state, time=clock()),)
        events, watched.undelivered = watched.undelivered, ()
        return events

    yield state, (RunStarted(**stamp(state.progress, started), until=repr(limit), total_updates=limit.total_updates()),)
    ended = reasons(started)
    while not ended:
        began = state.progress
        yield state, (EpochStarted(**stamp(began, clock())),)
        batches = read = 0
        # What the stream draws hangs on its place alone, and not on who drew before.
        randomness.seed(generators, rng.key(began.epoch << 32, _STREAM))
        iterator = iter(stream)
        while True:
            batch = next(iterator, _END)
            if batch is _END:
                break
            read += 1
            now = clock()
            if batch is None:
                yield state, (BatchSkipped(**stamp(state.progress, now)),)
            else:
                batches += 1
                before = state.progress
                state, events = _one(step, watched.scaled(state), batch, now, generators)
                watched.state = state
                del batch  # nothing of this micro-batch stays alive while the next one is read
                if evaluations and state.progress.updates != before.updates:
                    events = and_evaluated(events, before)
                yield state, events
            ended = reasons(now)
            if ended:
                break
            if draws:
                randomness.seed(generators, rng.key((began.epoch << 32) + read, _STREAM))
        before, events = state.progress, ()
        if state.window.micro_batches:
            randomness.seed(generators, rng.key(before.micro_steps, _FINISH))
            frame = step.finish(Frame.begin(state, time=clock()))
            state, events = frame.state, frame.events
            del frame
            events = and_evaluated(events, before)
        if not ended or read == _length(stream):
            before = state.progress
            state = attrs.evolve(state, progress=attrs.evolve(before, epoch=before.epoch + 1))
            events = and_evaluated(events, before)
            events = (*events, EpochEnded(**stamp(state.progress, clock()), batches=batches))
        watched.state = state
        if events:
            yield state, events
        ended = ended or reasons(clock()) or _no_use(stream, limit, batches, began, state)
    yield state, (RunEnded(**stamp(state.progress, clock()), reasons=ended),)


def _no_use(stream: Iterable[Any], limit: Limit, batches: int, before: Progress, after: TrainState) -> tuple[str, ...]:
    """Why another pass would be no use: it would give nothing, or get no nearer to the limit."""
    if not batches:
        return ("the stream gave no batches",)
    if isinstance(stream, Iterator):
        return ("the stream is a generator, which can be read only once",)
    if limit.stuck(before, after.progress) and not after.window.micro_batches:  # one that is carried on will end
        skipped = after.progress.skipped - before.skipped
        return (f"{limit!r} is out of reach: a whole epoch came no nearer ({skipped} windows skipped)",)
    return ()


def _length(stream: Iterable[Any]) -> int | None:
    """How many batches a pass gives, where the stream knows."""
    try:
        return len(cast("Sequence[Any]", stream))
    except (TypeError, NotImplementedError):
        return None


def _with_own_randomness(
    items: Iterator[tuple[TrainState, tuple[Event, ...]]], watched: Watched
) -> Iterator[tuple[TrainState, tuple[Event, ...]]]:
    """The loop's generators while it works, the caller's in between; what opens a run joins what follows."""
    generators = randomness.default_generators(watched.state)
    own = randomness.read(generators)
    opening: tuple[Event, ...] = ()
    try:
        while True:
            with randomness.isolated(generators):
                randomness.write(generators, own)
                item = next(items, None)
                own = randomness.read(generators)
            if item is None:
                return
            state, events = item
            if events and all(isinstance(event, (RunStarted, EpochStarted)) for event in events):
                opening += events
                continue
            yield state, (*opening, *events)
            opening = ()
    except Exception as error:
        attach(error, watched.state, {}, (f"{type(error).__name__}: {error}",))
        raise
    finally:
        let_go(watched.state)


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

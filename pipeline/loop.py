"""The only loop: a step folded over a stream of batches, with the monitors and sinks that watch it."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from pipeline import _randomness as randomness
from pipeline._binding import bind
from pipeline._checks import whole
from pipeline._driver import Driver, one
from pipeline._keeper import Keeper, store_for, to_go_on_from
from pipeline._models import models_in
from pipeline._publisher import Clock, Publisher, Watched, attach, let_go, stamp
from pipeline._watchers import checked_sinks
from pipeline.audience import Audience, Sink
from pipeline.checkpoint import CheckpointStore
from pipeline.checkpoint._adopted import check_names
from pipeline.errors import DuplicateNameError, SettingError, UnknownNameError
from pipeline.events import (
    BatchSkipped,
    EpochStarted,
    Event,
    RunStarted,
)
from pipeline.monitor import Monitor
from pipeline.probes import MemoryProbe, Probe
from pipeline.records import LossScale, Rng, TrainState
from pipeline.run import Run
from pipeline.tensors import Tensors
from pipeline.transform import Transform, chain
from pipeline.until import Limit

__all__ = ["apply", "fold", "init", "scan"]


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
        return one(chain(step), state.borrowed(), batch, time, 0.0, generators)


def scan(
    step: Transform,
    state: TrainState,
    stream: Iterable[Any],
    *,
    until: Limit | None = None,
    evaluations: Iterable[Probe] = (),
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
    driver = Driver(chain(step), watched, stream, until, tuple(evaluations), clock)
    return _with_own_randomness(iter(driver), watched)


def fold(
    step: Transform,
    state: TrainState,
    stream: Iterable[Any],
    *,
    monitors: Iterable[Monitor] = (),
    sinks: Iterable[Sink] = (),
    until: Limit | None = None,
    evaluations: Iterable[Probe] = (),
    donate: bool = True,
    publish_every: int = 10,
    store: CheckpointStore | str | Path | None = None,
    resume: str | Path | None = None,
    clock: Clock = time.time,
) -> Run:
    """Fold `step` over `stream` from `state`, and return the run.

    The state is taken over and updated in place: a state bound to a module trains that module. With `donate=False`
    every state stays as it is, the module too, and `run.state.load_into(model)` puts the result there.

    Ctrl-C ends the run after the micro-batch at work, and the result is returned; a second one stops at once. An
    error, of the stream or of the step, keeps its type, and `run_of(error)` is the run up to there.

    With a `store`, checkpoints are saved where monitors ask for them (`SaveEvery`, `SaveBest`), at the end and at an
    interruption, by SIGTERM too. With `resume="latest"` the run goes on from the newest, to the bit as if it had not
    stopped; where there is none yet, it begins. The state is then what the checkpoint's is read into.

    Args: step: a chain, or any `Frame -> Frame`; stream: batches, read once per epoch; None among them is passed over;
          monitors: reducers over the events, by name in `run.results`; sinks: where events go; until: a `Limit`, one
          pass over the stream by default; evaluations: folds or probes in between; publish_every: updates between two
          publications of events, which also come at evaluations, skipped windows, epochs and the end; store: a
          `CheckpointStore`, or its folder; resume: "latest", "best", or a checkpoint's path; clock: stamps the events,
          in seconds.
    Raises: DuplicateNameError for two monitors or evaluations of one name; MeasureError for a monitor that watches
          what no evaluation reports; StaleStateError for a state that was handed over before; CheckpointError for a
          checkpoint that cannot be saved or read; StateMismatchError for one of another model or step.
    """
    sinks, evaluations = checked_sinks(sinks), tuple(evaluations)
    with ExitStack() as closing:
        for sink in sinks:
            closing.callback(sink.close)
        audience = Audience(monitors, sinks)
        for name, count in Counter(evaluation.name for evaluation in evaluations).items():
            if count > 1:
                raise DuplicateNameError("evaluation", name)
        _check_state(state)
        whole("fold(publish_every)", publish_every)
        store = store_for(store, audience.monitors)
        if store is not None:
            closing.enter_context(store)
        found = to_go_on_from(store, resume)
        if found is not None:
            check_names(state, found[1].state)
        watched = Watched(state)
        reporting = tuple(e.name for e in evaluations if not isinstance(e, MemoryProbe))
        late = any(param.is_cuda for param in state.params.flat)
        publisher = Publisher(watched, audience, reporting, publish_every, clock, late)
        watched.state = _taken(step, state, until, donate)  # last: what was refused before has taken nothing
        driver = Driver(chain(step), watched, stream, until, evaluations, clock, pauses=store is not None)
        kept = closing.pop_all()
    keeper = Keeper(store, driver, publisher)
    generators, run = randomness.default_generators(watched.state), None

    def tell(events: tuple[Event, ...]) -> None:
        keeper.note(events)
        publisher.take(events)

    try:
        with randomness.isolated(generators), _interrupts(watched, terminate=store is not None), kept, publisher:
            if found is not None:
                tell(keeper.go_on_from(found[1], found[0].name))
            for _, events in driver:
                if events:
                    tell(events)
                elif driver.ended:
                    tell(keeper.at_the_end())
                if publisher.reasons:
                    break  # it is over, and nothing comes after the end
                if watched.evaluate:
                    tell(_asked_for(watched, evaluations, clock))
                if watched.saves or watched.rewinds:
                    tell(keeper.asked_for())
            run = publisher.run()
    except Exception as error:
        if run is not None:  # it is over, and a sink could not be closed
            attach(error, run.state, run.results, run.stopped_by)
        raise
    return run


def _asked_for(watched: Watched, evaluations: Sequence[Probe], clock: Clock) -> tuple[Event, ...]:
    """The evaluations that a monitor has asked for, by name."""
    names, watched.evaluate = watched.evaluate, []
    unknown = sorted({name for name in names if name is not None} - {e.name for e in evaluations})
    if unknown:
        raise UnknownNameError("The fold's evaluations", unknown[0], [e.name for e in evaluations])
    due = [evaluation for evaluation in evaluations if evaluation.name in names or None in names]
    return tuple(evaluation.run(watched.state, time=clock()) for evaluation in due)


def _check_state(state: TrainState) -> None:
    if not isinstance(state, TrainState):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SettingError("fold(state)", "a TrainState", state, "Make one with `init(step, model)`.")


def _taken(step: Transform, state: TrainState, until: Limit | None, donate: bool) -> TrainState:
    """The state as the loop's own, after a look at what it was given."""
    _check_state(state)
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
def _interrupts(watched: Watched, *, terminate: bool) -> Generator[None]:
    """The first Ctrl-C, or SIGTERM where there is a store, asks the loop to stop; the second stops at once.

    A handler of the user's own is left alone.
    """
    replaced: dict[int, Any] = {}
    names = {signal.SIGINT: "Ctrl-C", **({signal.SIGTERM: "SIGTERM"} if terminate else {})}

    def ask(number: int, _: object) -> None:
        for again, before in replaced.items():
            signal.signal(again, before)
        watched.interrupted = True
        watched.stops.append(f"interrupted ({names[signal.Signals(number)]})")

    if threading.current_thread() is threading.main_thread():
        for number in names:
            if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                replaced[number] = signal.signal(number, ask)
    try:
        yield
    finally:
        for number, before in replaced.items():
            signal.signal(number, before)

"""Resuming from a checkpoint: each batch once, no epoch lost, half a window kept, the same draws, the same patience.

Also what is told of other parts and means a checkpoint: the loss scale (AMP-4) and the rates (LR-5) after a resume.
"""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from pipeline import (
    Accumulate,
    EmitEvents,
    Epochs,
    Evaluation,
    Forward,
    LossScale,
    MaybeStep,
    MicroBatches,
    Optimizer,
    Run,
    Save,
    ScaledBackward,
    Updates,
    chain,
    fold,
    init,
    monitors,
    schedules,
    stream,
    supervised,
    tap,
)
from pipeline.checkpoint import CheckpointStore
from pipeline.checkpoint._manifest import STATE
from pipeline.events import EpochEnded, EpochStarted, Event, UpdateDone
from pipeline.schedules import Schedule
from pipeline.until import Limit
from tests.cases.probe import Items, Probe, Recorder, bits, items, of, probe_step, step_of


class Crash(Exception):
    """The power fails."""


class Numbers(Dataset[Tensor]):
    """0, 1, 2, … n - 1, each a batch, which can be told apart."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Tensor:
        if not 0 <= i < self.n:
            raise IndexError(i)
        return torch.tensor(float(i))


STREAMS: dict[str, Callable[[int], Iterable[Any]]] = {
    "a list": lambda n: [torch.tensor([float(i)]) for i in range(n)],
    "a DataLoader": lambda n: DataLoader(Numbers(n), batch_size=1),
    "a stream": lambda n: stream.batches(Numbers(n), 1),
}
each_stream = pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)


def counted(
    folder: Path,
    batches: Iterable[Any],
    until: Limit,
    *,
    every: int = 1,
    at: Callable[[int], object] = str,
    **more: Any,
) -> tuple[Run, list[int]]:
    """A run over numbers, with momentum, and which of them it saw; `at` is called after each."""
    model, seen = Probe(), list[int]()

    def loss(model: Any, batch: Tensor) -> Tensor:
        seen.append(int(batch))
        return (model() - batch).square().mean() * 1e-3

    rule = Optimizer(torch.optim.SGD, lr=0.5, momentum=0.9)

    def told(frame: Any) -> None:
        if frame.batch is not None:
            at(int(frame.batch))

    step = chain(step_of(model, loss, rule, every=every), tap(told))
    given: dict[str, Any] = {"store": folder, "resume": "latest", "clock": lambda: 0.0}
    return fold(step, init(step, model), batches, until=until, **{**given, **more}), seen


# -- RES-1 -----------------------------------------------------------------------------------------


@each_stream
def test_res_1_each_batch_is_learnt_from_once(make: Callable[[int], Iterable[Any]], tmp_path: Path) -> None:
    def crash(batch: int) -> None:
        if batch == 5:
            raise Crash

    straight, _ = counted(tmp_path / "straight", make(10), Epochs(1))
    watch = [monitors.SaveEvery(updates=3)]
    with pytest.raises(Crash):
        counted(tmp_path, make(10), Epochs(1), at=crash, monitors=watch)
    (saved,) = CheckpointStore(tmp_path).list()
    found = CheckpointStore(tmp_path).load()
    assert (saved.update, found.place.read, found.state.progress.micro_steps) == (3, 3, 3)
    run, seen = counted(tmp_path, make(10), Epochs(1), monitors=watch)
    assert seen == [3, 4, 5, 6, 7, 8, 9]
    assert bits(run.state) == bits(straight.state)


# -- RES-2 -----------------------------------------------------------------------------------------


@attrs.frozen
class SaveAtEnds:
    """Ask for a checkpoint after the last batch of the first epoch, and once more when that has ended."""

    name: str = "SaveAtEnds"

    needs_store = True

    def init(self) -> str:
        return ""

    def reduce(self, accumulator: str, event: Event) -> str:
        if isinstance(event, UpdateDone) and event.update == 4:
            return "after its last batch"
        return "after its end" if isinstance(event, EpochEnded) and event.epoch == 1 else ""

    def result(self, accumulator: str) -> None:
        return None

    def urgent(self, event: Event) -> bool:
        return isinstance(event, UpdateDone)

    def signals(self, accumulator: str) -> Iterator[Save]:
        if accumulator:
            yield Save(accumulator)


@each_stream
@pytest.mark.parametrize(("name", "reason"), [("0000000004", "after its last batch"), ("0000000004e", "after its end")])
def test_res_2_saved_at_the_end_of_an_epoch_none_is_dropped_or_repeated(
    name: str, reason: str, make: Callable[[int], Iterable[Any]], tmp_path: Path
) -> None:
    straight, seen = counted(tmp_path / "straight", make(4), Epochs(4), monitors=[SaveAtEnds()])
    assert seen == [0, 1, 2, 3] * 4
    counted(tmp_path, make(4), Epochs(1), monitors=[SaveAtEnds()])
    path = CheckpointStore(tmp_path).path / name
    assert CheckpointStore(tmp_path).load(path).reasons == (reason,)
    recorder = Recorder()
    run, seen = counted(tmp_path / "on", make(4), Epochs(4), monitors=[SaveAtEnds()], resume=path, sinks=[recorder])
    assert seen == [0, 1, 2, 3] * 3
    assert run.state.progress.updates == 16
    assert [event.epoch for event in of(EpochStarted, recorder.events)] == [1, 2, 3]
    # An event of an ended epoch counts it: 1 is the first.
    assert [event.epoch for event in of(EpochEnded, recorder.events)] == [1, 2, 3, 4][len(name) - 10 :]
    assert bits(run.state) == bits(straight.state)


# -- RES-3 -----------------------------------------------------------------------------------------


@each_stream
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_res_3_half_a_window_is_kept(number: int, make: Callable[[int], Iterable[Any]], tmp_path: Path) -> None:
    def stop(batch: int) -> None:
        if batch == 5:
            signal.raise_signal(number)

    straight, _ = counted(tmp_path / "straight", make(8), Epochs(1), every=4)
    counted(tmp_path, make(8), Epochs(1), every=4, at=stop)
    found = CheckpointStore(tmp_path).load()
    assert (found.place.read, found.state.window.micro_batches, found.state.progress.updates) == (6, 2, 1)
    run, seen = counted(tmp_path, make(8), Epochs(1), every=4)
    assert seen == [6, 7]
    assert run.state.progress.updates == 2
    assert bits(run.state) == bits(straight.state)


@each_stream
def test_res_3_a_window_that_a_limit_cut_off_is_open_again_when_the_limit_is_lifted(
    make: Callable[[int], Iterable[Any]], tmp_path: Path
) -> None:
    straight, _ = counted(tmp_path / "straight", make(8), Epochs(1), every=4)
    run, _ = counted(tmp_path, make(8), MicroBatches(6), every=4)
    assert run.state.progress.updates == 2  # the second of half a window
    run, seen = counted(tmp_path, make(8), Epochs(1), every=4)
    assert seen == [6, 7]
    assert bits(run.state) == bits(straight.state)


# -- RES-4 -----------------------------------------------------------------------------------------

_PRIVATE = {"torch": torch.Generator(), "python": random.Random(), "numpy": np.random.default_rng()}
DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "python": random.random,
    "numpy": np.random.rand,
    "torch, a generator of its own": lambda: float(torch.rand((), generator=_PRIVATE["torch"])),
    "python, a generator of its own": _PRIVATE["python"].random,
    "numpy, a generator of its own": _PRIVATE["numpy"].random,
}


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Items with noise on them from one of the generators that there are."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(i), self.draw(), 1.0]), torch.tensor([i / 12])


def drawn(folder: Path, draw: Callable[[], float], until: Limit, *, stop_at: int = 0) -> tuple[Run, dict[int, float]]:
    """A run with dropout, shuffling and augmentation, and the losses that it saw, by update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 1))
    recorder = Recorder()

    def stop(frame: Any) -> None:
        if frame.loss is not None and frame.state.progress.micro_steps == stop_at:
            signal.raise_signal(signal.SIGTERM)

    step = chain(step_of(model, supervised(nn.functional.mse_loss), Optimizer(torch.optim.SGD, lr=0.1)), tap(stop))
    data = stream.batches(Augmented(draw), 3, shuffle=True, seed=4)
    run = fold(step, init(step, model, seed=4), data, until=until, store=folder, resume="latest", sinks=[recorder])
    return run, {event.update: float(event.loss) for event in of(UpdateDone, recorder.events)}


def reseed(seed: int) -> None:
    """Another process has other global seeds."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    _PRIVATE["torch"].manual_seed(seed)
    _PRIVATE["python"].seed(seed)
    _PRIVATE["numpy"].bit_generator.state = np.random.default_rng(seed).bit_generator.state


@pytest.mark.parametrize("where", ["in an epoch", "at its end"])
@pytest.mark.parametrize("draw", DRAWS)
def test_res_4_what_is_drawn_after_a_resume_is_what_would_have_been_drawn(
    draw: str, where: str, tmp_path: Path
) -> None:
    reseed(1)
    straight, losses = drawn(tmp_path / "straight", DRAWS[draw], Epochs(3))
    reseed(1)
    drawn(
        tmp_path, DRAWS[draw], Epochs(3) if where == "in an epoch" else Epochs(1), stop_at=6 * (where == "in an epoch")
    )
    reseed(2)
    run, after = drawn(tmp_path, DRAWS[draw], Epochs(3))
    same = after.items() <= losses.items() and bits(run.state) == bits(straight.state)
    # A control, for each kind: what nobody could have put back makes another run of it.
    assert same != draw.endswith("of its own")


# -- RES-5 -----------------------------------------------------------------------------------------


def patient(folder: Path, values: tuple[float, ...], until: int) -> Run:
    """A run that is evaluated after each epoch, with these values."""
    model = Probe()
    forward = Forward(model, lambda model, _: model().sum() * 0 + values[int(epochs[-1])])
    epochs = list[int]()

    def evaluated(frame: Any) -> Any:
        epochs.append(frame.state.progress.epoch - 1)
        return forward(frame)

    watch = [monitors.EarlyStopping("val_loss", patience=3)]
    step = probe_step(model)
    return fold(
        step,
        init(step, model),
        [items(1.0)],
        until=Epochs(until),
        evaluations=[Evaluation(evaluated, [items(0.0)])],
        monitors=watch,
        store=folder,
        resume="latest",
    )


def test_res_5_patience_goes_on_over_resumes_and_a_run_that_had_stopped_says_so(tmp_path: Path) -> None:
    values = (1.0, 1.1, 1.2, 1.3, 0.1)
    for until in (1, 2, 3):
        run = patient(tmp_path, values, until)
        assert run.stopped_by == (f"Epochs({until})",)
        assert run.results["EarlyStopping"] == {"best": 1.0, "update": 1, "waited": until - 1}
    stopped = patient(tmp_path, values, 9)
    assert stopped.results["EarlyStopping"] == {"best": 1.0, "update": 1, "waited": 3}
    assert stopped.state.progress.updates == 4
    (reason,) = stopped.stopped_by
    assert reason.startswith("EarlyStopping: val_loss no better for 3 evaluations")
    again = patient(tmp_path, values, 9)
    assert again.stopped_by == stopped.stopped_by
    assert bits(again.state) == bits(stopped.state)


# -- AMP-4 -----------------------------------------------------------------------------------------


def scaled(folder: Path, until: int) -> Run:
    model = nn.Linear(1, 1, bias=False)
    step = chain(
        Forward(model, lambda m, x: m(x).mean()),
        ScaledBackward(),
        Accumulate(),
        MaybeStep(Optimizer(torch.optim.SGD, lr=0.0)),
        EmitEvents(),
    )
    state = init(step, model, loss_scale=LossScale(scale=8.0, interval=3))
    return fold(step, state, [torch.ones(1, 1)] * 9, until=Updates(until), store=folder, resume="latest")


def loss_scale_in(folder: Path) -> bytes:
    path = CheckpointStore(folder).latest()
    assert path is not None
    return json.dumps(json.loads((path / STATE).read_text())["state"]["items"]["loss_scale"]).encode()


def test_amp_4_saved_after_four_windows_the_scale_goes_on(tmp_path: Path) -> None:
    scaled(tmp_path, 4)
    found = CheckpointStore(tmp_path).load().state.loss_scale
    assert found == LossScale(scale=16.0, interval=3, finite_windows=1)
    first = loss_scale_in(tmp_path)
    assert scaled(tmp_path, 4).state.loss_scale == found  # saved, loaded, and saved
    assert loss_scale_in(tmp_path) == first
    assert scaled(tmp_path, 6).state.loss_scale == LossScale(scale=32.0, interval=3)
    assert scaled(tmp_path / "straight", 6).state.loss_scale == LossScale(scale=32.0, interval=3)
    assert loss_scale_in(tmp_path) == loss_scale_in(tmp_path / "straight")


# -- LR-5 ------------------------------------------------------------------------------------------


def pull(model: Any, batch: Items) -> Tensor:
    """A loss whose gradient is -1 wherever `w` is, so that `w` is the sum of the rates."""
    return -model().sum() * batch.y.mean()


def rated(folder: Path, lr: Schedule, until: int) -> tuple[dict[int, float], float]:
    """The rates of this process's updates, and where `w` came to, with a plateau that cuts now and then."""
    model, recorder = Probe(), Recorder()
    step = step_of(model, pull, Optimizer(torch.optim.SGD, lr=lr))
    values = iter([1.0] * 99)
    evaluation = Evaluation(Forward(model, lambda m, _: m().sum() * 0 + next(values)), [items(0.0)])
    run = fold(
        step,
        init(step, model),
        [items(1.0)] * 3,
        until=Updates(until),
        evaluations=[evaluation],
        monitors=[monitors.Plateau("val_loss", factor=0.5, patience=1, cooldown=1)],
        sinks=[recorder],
        store=folder,
        resume="latest",
    )
    rates = {event.update: event.rates["default"] for event in of(UpdateDone, recorder.events)}
    return rates, float(run.state.params["w"].detach())


@pytest.mark.parametrize(
    "make",
    [lambda: schedules.warm_restarts(1.0, 0.0, 1, 2), lambda: schedules.warmup(0.1, 6)],
    ids=["restarts", "warmup"],
)
def test_lr_5_resumed_after_any_update_the_rates_are_those_of_the_straight_run(
    make: Callable[[], Schedule], tmp_path: Path
) -> None:
    straight, w = rated(tmp_path / "straight", make(), 20)
    assert list(straight) == [*range(1, 21)]
    assert straight[20] <= make()(19) / 4  # the plateau has cut
    for n in range(1, 20):
        before, _ = rated(tmp_path / f"{n}", make(), n)
        after, end = rated(tmp_path / f"{n}", make(), 20)
        assert {**before, **after} == straight
        assert end == w

"""When a fold saves, and how it goes on: the same call for the first start and the tenth."""

from __future__ import annotations

import itertools
import math
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    EmitEvents,
    Epochs,
    Evaluation,
    EveryUpdates,
    Forward,
    MaybeStep,
    MicroBatches,
    Optimizer,
    Rewind,
    Run,
    ScaledBackward,
    Stop,
    Updates,
    chain,
    fold,
    init,
    monitors,
    sinks,
    supervised,
    tap,
)
from pipeline.checkpoint import CheckpointStore, CheckpointWarning, load_checkpoint
from pipeline.errors import CheckpointError, SettingError, StoreInUseError, StreamError
from pipeline.events import CheckpointSaved, Rewound, RunEnded, RunStarted
from pipeline.monitor import Monitor
from pipeline.testing import assert_records_equal
from tests.cases.probe import Probe, Recorder, items, of, probe_step
from tests.checkpoint.cases import batches, started, training


def kept(folder: Path) -> list[tuple[str, int, tuple[str, ...]]]:
    """The name, the update and the reasons of each checkpoint."""
    return [(saved.path.name, saved.update, saved.reasons) for saved in CheckpointStore(folder).list()]


def probing(folder: Path, n: int, watch: Iterable[Monitor] = (), **settings: Any) -> Run:
    """A run of one update a batch."""
    model = Probe()
    step = probe_step(model)
    given: dict[str, Any] = {"store": CheckpointStore(folder, keep_last=99), "resume": "latest", "until": Updates(n)}
    return fold(step, init(step, model), [items(1.0)] * 100, monitors=watch, **{**given, **settings})


# -- when -------------------------------------------------------------------------------------------------------------


def test_every_so_many_updates_and_at_the_end(tmp_path: Path) -> None:
    recorder = Recorder()
    run = probing(tmp_path, 7, [monitors.SaveEvery(updates=3)], sinks=[recorder])
    every = ("every 3 updates",)
    assert kept(tmp_path) == [("0000000003", 3, every), ("0000000006", 6, every), ("0000000007", 7, ("Updates(7)",))]
    told = [(event.path, event.update, event.reasons) for event in of(CheckpointSaved, recorder.events)]
    assert told == kept(tmp_path)
    assert run.results["SaveEvery"] == 7
    assert isinstance(recorder.events[-1], RunEnded)


def test_where_the_end_is_a_checkpoint_already_it_is_not_saved_again(tmp_path: Path) -> None:
    probing(tmp_path, 6, [monitors.SaveEvery(updates=3)])
    assert [name for name, *_ in kept(tmp_path)] == ["0000000003", "0000000006"]


def test_every_so_many_minutes_of_the_clock_that_was_given(tmp_path: Path) -> None:
    now = iter(range(0, 100_000, 5))  # seconds: some of them go by with each look
    watch = [monitors.SaveEvery(minutes=1)]
    probing(tmp_path, 30, watch, clock=lambda: float(next(now)), publish_every=1)
    times = [saved.time for saved in CheckpointStore(tmp_path).list()]
    assert len(times) > 3
    assert all(60 <= after - before <= 90 for before, after in itertools.pairwise(times[:-1]))


def test_without_a_monitor_it_is_saved_at_the_end_alone(tmp_path: Path) -> None:
    probing(tmp_path, 4)
    assert kept(tmp_path) == [("0000000004", 4, ("Updates(4)",))]


def evaluated(folder: Path, *values: float, watch: Iterable[Monitor] = (), **settings: Any) -> Run:
    """A run that is evaluated after each update, with these values."""
    model = Probe()
    coming, step = iter(values), probe_step(model)
    loss = Forward(model, lambda model, batch: model().sum() * 0 + next(coming))
    given: dict[str, Any] = {"store": folder, "resume": "latest", "until": Updates(len(values))}
    evaluation = Evaluation(loss, [items(0.0)], EveryUpdates(1))
    return fold(
        step, init(step, model), [items(1.0)] * 100, evaluations=[evaluation], monitors=watch, **{**given, **settings}
    )


def test_whenever_it_is_better_than_ever_and_the_best_stays(tmp_path: Path) -> None:
    evaluated(tmp_path, 0.5, 0.3, 0.2, 0.4, 0.6, 0.5, 0.7, watch=[monitors.SaveBest("val_loss")])
    assert kept(tmp_path) == [
        ("0000000002", 2, ("best val_loss: 0.3",)),
        ("0000000003", 3, ("best val_loss: 0.2",)),
        ("0000000007", 7, ("Updates(7)",)),
    ]
    store = CheckpointStore(tmp_path, best="val_loss")
    assert store.find("best")[0].name == "0000000003"


def test_the_best_is_the_one_that_was_evaluated_and_not_one_that_was_saved_after_it(tmp_path: Path) -> None:
    model = Probe()
    coming, step = iter([0.2, 0.5]), probe_step(model)
    loss = Forward(model, lambda model, batch: model().sum() * 0 + next(coming))
    fold(
        step,
        init(step, model),
        [items(1.0)] * 100,
        evaluations=[Evaluation(loss, [items(0.0)], EveryUpdates(4))],
        monitors=[monitors.SaveEvery(updates=2)],
        store=CheckpointStore(tmp_path, best="val_loss", keep_last=9),
        until=Updates(9),
    )
    measured = {saved.update: saved.measures for saved in CheckpointStore(tmp_path).list()}
    assert measured == {2: {}, 4: {"val_loss": pytest.approx(0.2)}, 6: {}, 8: {"val_loss": pytest.approx(0.5)}, 9: {}}
    assert CheckpointStore(tmp_path, best="val_loss").find("best")[0].name == "0000000004"


@attrs.frozen
class AskAt:
    """Give these signals at an update, until it is gone back."""

    update: int
    asked: tuple[Any, ...]
    name: str = "AskAt"

    def init(self) -> int:
        return 0

    def reduce(self, accumulator: int, event: Any) -> int:
        return 0 if isinstance(event, Rewound) else event.update

    def result(self, accumulator: int) -> None:
        return None

    def signals(self, accumulator: int) -> Iterable[Any]:
        return self.asked if accumulator == self.update else ()


def test_before_a_stop(tmp_path: Path) -> None:
    run = probing(tmp_path, 9, [AskAt(4, (Stop("enough"),))], publish_every=1)
    assert run.stopped_by == ("enough",)
    assert kept(tmp_path) == [("0000000004", 4, ("enough",))]


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
@pytest.mark.parametrize("background", [False, True])
def test_when_it_is_interrupted_and_the_run_goes_on_as_if_it_had_not_been(
    number: int, name: str, background: bool, tmp_path: Path
) -> None:
    def run(folder: Path, stop_at: int | None = None) -> Run:
        _, step, state = started()

        def stop(frame: Any) -> None:
            if frame.loss is not None and frame.state.progress.micro_steps == stop_at:
                os.kill(os.getpid(), number)

        return fold(
            chain(step, tap(stop)),
            state,
            batches(),
            until=Updates(6),
            monitors=[monitors.MeanLoss()],
            sinks=[sinks.EventLog(folder)],
            store=CheckpointStore(folder, background=background),
            resume="latest",
            clock=lambda: 0.0,
        )

    straight = run(tmp_path / "straight")
    stopped = run(tmp_path, stop_at=7)
    assert stopped.stopped_by == (f"interrupted ({name})",)
    assert kept(tmp_path) == [("0000000007", 3, (f"interrupted ({name})",))]
    done = run(tmp_path)
    assert done.stopped_by == ("Updates(6)",)
    assert_records_equal(done.state, straight.state)
    assert done.results == straight.results
    assert (tmp_path / "events.jsonl").read_bytes() == (tmp_path / "straight" / "events.jsonl").read_bytes()


def test_sigterm_is_left_alone_without_a_store_and_a_handler_of_ones_own_with_one(tmp_path: Path) -> None:
    heard = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        model = Probe()
        step = chain(probe_step(model), tap(lambda frame: signal.raise_signal(signal.SIGTERM)))
        run = fold(step, init(step, model), [items(1.0)] * 2, store=tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(heard) >= 2
    assert run.stopped_by == ("Epochs(1)",)


# -- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "by hand"])
def test_the_first_start_and_the_tenth_are_one_call_and_the_end_is_the_same(
    background: bool, bound: bool, tmp_path: Path
) -> None:
    straight = training(tmp_path / "straight", updates=10)
    run = straight
    for updates in range(1, 11):
        _, step, state = started(seed=0 if updates == 1 else 5)  # of later ones the checkpoint has the last word
        run = fold(
            step,
            state if bound else state.copy(),
            batches(),
            until=Updates(updates),
            store=CheckpointStore(tmp_path, background=background),
            resume="latest",
            donate=bound,
        )
        assert run.state.progress.updates == updates
    assert_records_equal(run.state, straight.state)


def test_a_run_that_had_ended_does_nothing_and_says_why(tmp_path: Path) -> None:
    first = probing(tmp_path, 3)
    before, files = kept(tmp_path), sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*.json"))
    recorder = Recorder()
    again = probing(tmp_path, 3, sinks=[recorder])
    assert again.stopped_by == first.stopped_by == ("Updates(3)",)
    assert_records_equal(again.state, first.state)
    assert kept(tmp_path) == before
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")) == files
    assert of(RunStarted, recorder.events) == []


def test_a_limit_that_is_put_off_goes_on_and_is_told(tmp_path: Path) -> None:
    probing(tmp_path, 3)
    recorder = Recorder()
    run = probing(tmp_path, 5, sinks=[recorder])
    assert run.state.progress.updates == 5
    assert [event.until for event in of(RunStarted, recorder.events)] == ["Updates(5)"]


def test_after_an_error_it_goes_on_from_the_newest(tmp_path: Path) -> None:
    def failing(at: int) -> Callable[[Any], None]:
        def check(frame: Any) -> None:
            if frame.state.progress.micro_steps == at:
                raise ZeroDivisionError

        return check

    model = Probe()
    step = chain(probe_step(model), tap(failing(5)))
    given: dict[str, Any] = {"store": tmp_path, "resume": "latest", "monitors": [monitors.SaveEvery(updates=2)]}
    with pytest.raises(ZeroDivisionError):
        fold(step, init(step, model), [items(1.0)] * 9, **given)
    assert kept(tmp_path)[-1][:2] == ("0000000004", 4)
    step = probe_step(model := Probe())
    assert fold(step, init(step, model), [items(1.0)] * 9, **given).state.progress.updates == 9


def test_a_monitor_that_comes_or_goes_is_told(tmp_path: Path) -> None:
    probing(tmp_path, 2, [monitors.MeanLoss()])
    with pytest.warns(CheckpointWarning) as told:
        run = probing(tmp_path, 4, [monitors.GradNorm()])
    assert {warning.filename for warning in told} == {__file__}
    assert sorted(str(warning.message) for warning in told) == [
        "the monitor 'GradNorm' was not there when the checkpoint was saved: it begins here",
        "the monitor 'MeanLoss' of the checkpoint is not there any more: what it had gathered is dropped",
    ]
    assert run.state.progress.updates == 4


def test_from_a_checkpoint_of_another_folder_a_new_run_goes_on_there(tmp_path: Path) -> None:
    probing(tmp_path / "a", 6, [monitors.SaveEvery(updates=2)])
    path = tmp_path / "a" / "checkpoints" / "0000000002"
    run = probing(tmp_path / "b", 3, [monitors.SaveEvery(updates=2)], resume=path)
    assert run.state.progress.updates == 3
    assert kept(tmp_path / "b") == [("0000000003", 3, ("Updates(3)",))]
    with pytest.warns(CheckpointWarning, match="'SaveEvery' of the checkpoint is not there"):
        run = probing(tmp_path / "c", 5, resume=str(path), store=None)
    assert run.state.progress.updates == 5
    assert not (tmp_path / "c").exists()


def test_from_the_best_where_it_is_the_newest(tmp_path: Path) -> None:
    watch = [monitors.SaveBest("val_loss")]
    evaluated(tmp_path, 0.5, 0.3, watch=watch)
    run = evaluated(tmp_path, 0.1, 0.1, 0.1, watch=watch, resume="best")
    assert run.state.progress.updates == 3
    with pytest.raises(SettingError, match="the newest checkpoint"):
        evaluated(tmp_path, *[0.9] * 5, watch=watch, resume=tmp_path / "checkpoints" / "0000000002")


def test_a_generator_cannot_be_put_back_and_can_be_begun(tmp_path: Path) -> None:
    def run(n: int) -> Run:
        model = Probe()
        step = probe_step(model)
        numbers = (items(1.0) for _ in range(9))
        return fold(step, init(step, model), numbers, until=Updates(n), store=tmp_path, resume="latest")

    run(2)
    with pytest.raises(StreamError, match="no way back"):
        run(4)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_folder_with_checkpoints_is_not_begun_in_by_mistake(tmp_path: Path) -> None:
    probing(tmp_path, 2)
    with pytest.raises(SettingError, match='Say "latest" to go on'):
        probing(tmp_path, 2, resume=None)


def test_a_folder_whose_checkpoints_are_all_damaged_is_not_begun_in_by_mistake(tmp_path: Path) -> None:
    probing(tmp_path, 2)
    for path in CheckpointStore(tmp_path).folders():
        (path / "manifest.json").unlink()
    with pytest.raises(SettingError, match='Say "latest" to go on'):
        probing(tmp_path, 2, resume=None)


@pytest.mark.parametrize("resume", [True, False, 1, b"latest"], ids=repr)
def test_what_is_no_path_is_nothing_to_go_on_from(resume: Any, tmp_path: Path) -> None:
    for store in (tmp_path, None):
        with pytest.raises(SettingError, match=r"fold\(resume\) must be \"latest\""):
            probing(tmp_path, 2, resume=resume, store=store)


@pytest.mark.parametrize("folder", [True, 1, b"runs/a", {}], ids=repr)
def test_what_is_no_path_is_no_folder_of_a_store(folder: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"CheckpointStore\(folder\) must be a path"):
        probing(tmp_path, 2, store=folder)


def test_the_folder_of_a_run_is_no_checkpoint_and_the_cure_is_told(tmp_path: Path) -> None:
    probing(tmp_path, 2)
    for path in (tmp_path, tmp_path / "checkpoints"):
        with pytest.raises(CheckpointError, match=r"is the folder of a run.*CheckpointStore\('.*'\)\.latest\(\)"):
            probing(tmp_path, 4, resume=path, store=None)


@pytest.mark.parametrize("watch", [monitors.SaveEvery(updates=1), monitors.SaveBest("val_loss")], ids=repr)
def test_a_monitor_that_asks_for_checkpoints_needs_a_store(watch: Monitor, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the fold has no store"):
        probing(tmp_path, 2, [watch], store=None, resume=None)


@pytest.mark.parametrize("which", ["latest", "best"])
def test_latest_and_best_need_a_store(which: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="a checkpoint's path where there is no store"):
        probing(tmp_path, 2, resume=which, store=None)


@pytest.mark.parametrize("settings", [{}, {"best": "val_error"}, {"best": "val_loss", "mode": "max"}], ids=str)
def test_a_store_that_goes_by_another_measure_than_save_best_is_refused(settings: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="otherwise it may delete the best"):
        evaluated(tmp_path, 0.1, watch=[monitors.SaveBest("val_loss")], store=CheckpointStore(tmp_path, **settings))


def test_two_measures_to_save_the_best_by_are_refused(tmp_path: Path) -> None:
    watch = [monitors.SaveBest("val_loss"), monitors.SaveBest("val_error", name="other")]
    with pytest.raises(SettingError, match="without a SaveBest for another measure"):
        evaluated(tmp_path, 0.1, watch=watch)


def test_two_runs_on_one_folder_are_refused_and_the_state_of_the_second_is_not_taken(tmp_path: Path) -> None:
    model = Probe()
    step = probe_step(model)
    state = init(step, model)
    with CheckpointStore(tmp_path), pytest.raises(StoreInUseError):
        fold(step, state, [items(1.0)], store=tmp_path)
    assert fold(step, state, [items(1.0)], store=tmp_path).state.progress.updates == 1


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({}, "SaveEvery"),
        ({"updates": 1, "minutes": 1}, "SaveEvery"),
        ({"updates": 0}, "SaveEvery.updates"),
        ({"updates": True}, "SaveEvery.updates"),
        ({"updates": 1.5}, "SaveEvery.updates"),
        ({"minutes": 0}, "SaveEvery.minutes"),
        ({"minutes": math.inf}, "SaveEvery.minutes"),
        ({"minutes": math.nan}, "SaveEvery.minutes"),
    ],
    ids=str,
)
def test_save_every_takes_updates_or_minutes(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(SettingError, match=f"{what} must be"):
        monitors.SaveEvery(**settings)


def test_save_best_takes_min_or_max() -> None:
    with pytest.raises(SettingError, match=r"SaveBest\.mode must be"):
        monitors.SaveBest("val_loss", mode="low")  # type: ignore[arg-type]


# -- going back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_a_monitor_can_ask_to_go_back_to_the_best_and_the_counts_go_on(background: bool, tmp_path: Path) -> None:
    recorder = Recorder()
    run = evaluated(
        tmp_path,
        *(0.1, 0.5, 0.6, 0.7),
        watch=[monitors.SaveBest("val_loss"), AskAt(3, (Rewind("it got worse", to="best"),))],
        sinks=[recorder],
        store=CheckpointStore(tmp_path, best="val_loss", background=background, keep_last=9),
    )
    (rewound,) = of(Rewound, recorder.events)
    assert (rewound.path, rewound.update, rewound.reasons) == ("0000000001", 3, ("it got worse",))
    best = load_checkpoint(tmp_path / "checkpoints" / "0000000001").state
    step = probe_step(model := Probe())
    once_more = fold(step, best.load_into(model), [items(1.0)])  # one update from the best
    assert torch.equal(run.state.params["w"], once_more.state.params["w"])
    assert run.state.progress.updates == 4
    # The weights that it went back to were not those that had been measured.
    assert CheckpointStore(tmp_path).load().measures == {"val_loss": pytest.approx(0.7)}


def test_a_model_that_is_evaluated_in_between_gives_its_best_as_a_module_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    forward = Forward(model, supervised(F.cross_entropy))
    step = chain(forward, ScaledBackward(), Accumulate(), MaybeStep(Optimizer(torch.optim.SGD, lr=0.3)), EmitEvents())
    held_out = batches(2, seed=7)
    run = fold(
        step,
        init(step, model),
        batches(),
        until=Epochs(4),
        evaluations=[Evaluation(forward, held_out)],
        monitors=[monitors.SaveBest("val_loss")],
        store=tmp_path,
    )
    best = CheckpointStore(tmp_path, best="val_loss").load("best")
    other = nn.Linear(4, 3)
    best.state.load_into(other)
    value = Evaluation(Forward(other, supervised(F.cross_entropy)), held_out).run(best.state).values["val_loss"]
    assert value == run.results["SaveBest"]["best"] == best.measures["val_loss"]


def test_a_limit_within_an_epoch_can_be_put_off_many_times(tmp_path: Path) -> None:
    straight = training(tmp_path / "straight", updates=99, until=MicroBatches(13))
    for n in range(1, 13):
        training(tmp_path, until=MicroBatches(n))
    assert_records_equal(training(tmp_path, until=MicroBatches(13)).state, straight.state)

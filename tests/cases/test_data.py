"""The stream: without a length, empty, broken, or with batches to skip."""

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader, IterableDataset

from pipeline import Epochs, Optimizer, Updates, apply, fold, init, run_of, scan, sinks
from pipeline.events import (
    BatchSkipped,
    EpochEnded,
    EpochStarted,
    MicroBatchDone,
    RunEnded,
    RunStarted,
    UpdateDone,
    UpdateSkipped,
)
from tests.cases.probe import Items, Probe, Recorder, all_monitors, bits, items, of, probe_step, step_of, summed

both_ways = pytest.mark.parametrize("donate", [True, False], ids=["donated", "copied"])

SEVEN = [0.0, 0.0, 3.0, 5.0, 6.0, 7.0, 4.0]
"""Targets of seven micro-batches: the three windows have means 1, 6 and 4."""


def without_length(n: int) -> Iterator[Items]:
    yield from (items(y) for y in SEVEN[:n])


class Endless(IterableDataset[Items]):
    """Batches without a count: `len()` of a loader over it raises."""

    def __iter__(self) -> Iterator[Items]:
        return without_length(7)


# -- DATA-2 ----------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize(
    "stream",
    [lambda: without_length(7), lambda: DataLoader(Endless(), batch_size=None)],
    ids=["a generator", "a loader without a length"],
)
def test_data_2_a_stream_without_a_length_ends_its_last_window(stream: Any, donate: bool) -> None:
    model, recorder = Probe(), Recorder()
    step = probe_step(model, every=3)
    run = fold(step, init(step, model), stream(), donate=donate, sinks=[recorder])
    updates = of(UpdateDone, recorder.events)
    assert [u.micro_batches for u in updates] == [3, 3, 1]
    assert [float(u.weight) for u in updates] == [3.0, 3.0, 1.0]
    assert run.state.params["w"].item() == 4.0  # 4/3 if the last window were divided by its full size
    assert run.state.progress.updates == 3
    assert run.state.progress.epoch == 1
    assert [e.batches for e in of(EpochEnded, recorder.events)] == [7]


def test_data_2_progress_runs_without_a_total() -> None:
    model, recorder, shown = Probe(), Recorder(), io.StringIO()
    step = probe_step(model, every=3)
    console = sinks.Console(console=Console(file=shown, force_terminal=True, width=100), per_second=1e9)
    fold(step, init(step, model), without_length(7), sinks=[recorder, console], publish_every=1)
    (started,) = of(RunStarted, recorder.events)
    assert started.total_updates is None
    assert "ended after 3 updates" in shown.getvalue()


@both_ways
def test_data_2_no_batch_at_all_is_an_epoch_without_an_update(donate: bool) -> None:
    model, recorder = Probe(), Recorder()
    step = probe_step(model, every=3)
    run = fold(
        step, init(step, model), without_length(0), donate=donate, sinks=[recorder], monitors=all_monitors_unwatched()
    )
    assert run.state.params["w"].item() == 0.0
    assert run.state.progress.updates == run.state.progress.skipped == 0
    assert [type(event) for event in recorder.events] == [RunStarted, EpochStarted, EpochEnded, RunEnded]
    assert set(run.results.values()) == {None}


def all_monitors_unwatched() -> list:
    """All monitors but those that ask for an evaluation, which there is none of here."""
    return [monitor for monitor in all_monitors() if not hasattr(monitor, "watches")]


@pytest.mark.parametrize("stream", [list[Items], lambda: without_length(0)], ids=["a list", "a generator"])
def test_data_2_a_limit_that_an_empty_stream_never_reaches_still_ends(stream: Any) -> None:
    model = Probe()
    step = probe_step(model)
    run = fold(step, init(step, model), stream(), until=Updates(5))
    assert run.stopped_by == ("the stream gave no batches",)


@both_ways
def test_data_2_one_batch_is_one_update(donate: bool) -> None:
    model, recorder = Probe(), Recorder()
    step = probe_step(model, every=3)
    run = fold(step, init(step, model), iter([items(5.0)]), donate=donate, sinks=[recorder])
    assert run.state.params["w"].item() == 5.0
    assert [u.micro_batches for u in of(UpdateDone, recorder.events)] == [1]


class BrokenDiskError(Exception):
    pass


def broken_after(n: int) -> Iterator[Items]:
    yield from without_length(n)
    raise BrokenDiskError("sector 7")


@both_ways
@pytest.mark.parametrize("after", [0, 2, 3, 4])
def test_data_2_an_error_in_the_stream_keeps_its_type_and_leaves_a_usable_state(after: int, donate: bool) -> None:
    model, recorder = Probe(), Recorder()
    step = probe_step(model, every=3)
    with pytest.raises(BrokenDiskError, match="sector 7") as failure:
        fold(step, init(step, model), broken_after(after), donate=donate, sinks=[recorder])
    run = run_of(failure.value)
    assert run.state.progress.micro_steps == after
    assert run.state.window.micro_batches == after % 3
    assert recorder.closed
    (ended,) = of(RunEnded, recorder.events)
    assert ended.reasons == ("BrokenDiskError: sector 7",)
    # Going on with what had not come yet ends where the unbroken stream ends, its windows the same.
    on = Recorder()
    rest = [items(y) for y in SEVEN[after:]]
    end = fold(step, run.state, rest, donate=donate, sinks=[on])
    windows = [u.micro_batches for u in (*of(UpdateDone, recorder.events), *of(UpdateDone, on.events))]
    assert windows == [3, 3, 1]
    assert end.state.params["w"].item() == 4.0


# -- DATA-5 ----------------------------------------------------------------------------------------

WITH_A_HOLE = [items(1.0), items(3.0), None, items(5.0), items(7.0), items(9.0)]


@both_ways
@pytest.mark.parametrize("stream", [lambda: WITH_A_HOLE, lambda: iter(WITH_A_HOLE)], ids=["a list", "a generator"])
def test_data_5_none_is_passed_over_and_takes_no_place_in_the_window(stream: Any, donate: bool) -> None:
    model, recorder = Probe(), Recorder()
    step = probe_step(model, every=2, micro_batches=True)
    run = fold(step, init(step, model), stream(), donate=donate, sinks=[recorder])
    updates = of(UpdateDone, recorder.events)
    assert [u.micro_batches for u in updates] == [2, 2, 1]
    # The parameter is the mean target of each window in turn, and the loss the mean of (w - y)² / 2 before it.
    assert [float(u.loss) for u in updates] == pytest.approx([2.5, 8.5, 4.5])
    assert run.state.params["w"].item() == 9.0
    (skip,) = of(BatchSkipped, recorder.events)
    assert (skip.micro_step, skip.update) == (2, 1)
    assert len(of(MicroBatchDone, recorder.events)) == run.state.progress.micro_steps == 5
    assert of(UpdateSkipped, recorder.events) == []


@pytest.mark.parametrize("place", range(6))
def test_data_5_a_hole_anywhere_changes_nothing(place: int) -> None:
    full = [items(y) for y in (1.0, 3.0, 5.0, 7.0, 9.0)]
    model = Probe()
    step = probe_step(model, every=2)
    plain = fold(step, init(step, model, seed=1), full).state
    model = Probe()
    step = probe_step(model, every=2)
    holed = fold(step, init(step, model, seed=1), [*full[:place], None, *full[place:]]).state
    assert bits(holed) == bits(plain)


@both_ways
def test_data_5_nothing_but_none_leaves_everything_untouched(donate: bool) -> None:
    model, recorder = Probe(), Recorder()
    step = step_of(model, summed, Optimizer(torch.optim.AdamW, lr=0.1), every=2)
    warm = fold(step, init(step, model), [items(1.0)] * 2).state
    before, moments = bits(warm), {name: t.clone() for name, t in warm.optimizer.tensors.items()}
    assert moments
    run = fold(step, warm, [None] * 6, donate=donate, sinks=[recorder])
    after = bits(run.state)
    assert before.pop("progress").epoch + 1 == after.pop("progress").epoch
    assert after == before
    assert len(of(BatchSkipped, recorder.events)) == 6
    assert of(UpdateDone, recorder.events) == of(UpdateSkipped, recorder.events) == []
    assert len(of(EpochEnded, recorder.events)) == 1


class NothingButNone:
    """A stream of None that gives up when it is read again and again."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[None]:
        self.passes += 1
        if self.passes > 20:
            raise RuntimeError("read 20 times over, and no end of the run in sight")
        return iter([None] * 3)


def test_data_5_a_limit_that_nothing_but_none_never_reaches_still_ends() -> None:
    model = Probe()
    step = probe_step(model)
    run = fold(step, init(step, model), NothingButNone(), until=Updates(5))
    assert run.state.progress.updates == 0
    assert run.stopped_by


def test_data_5_an_epoch_limit_counts_the_epochs_of_nothing() -> None:
    model = Probe()
    step = probe_step(model)
    run = fold(step, init(step, model), [None, items(1.0)], until=Epochs(3))
    assert run.state.progress.updates == 3


def test_data_5_apply_and_scan_say_the_same() -> None:
    model = Probe()
    step = probe_step(model, every=2)
    state = init(step, model)
    same, (skip,) = apply(step, state, None, time=5.0)
    assert same is state
    assert isinstance(skip, BatchSkipped)
    assert skip.time == 5.0
    steps = list(scan(step, state, WITH_A_HOLE))
    assert [sum(isinstance(e, BatchSkipped) for e in events) for _, events in steps][2] == 1

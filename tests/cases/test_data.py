"""The stream: what its items draw, without a length, empty, broken, shared out, by weight, with batches to skip."""

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader, IterableDataset

from pipeline import (
    Accumulate,
    Epochs,
    MicroBatches,
    Optimizer,
    Updates,
    apply,
    fold,
    init,
    run_of,
    scan,
    sinks,
    stream,
)
from pipeline.errors import SettingError
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
from tests.stream.work import Drawing

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


@pytest.mark.parametrize(
    ("limit", "total"),
    [(None, 3), (Epochs(4), 12), (Epochs(4) | Updates(7), 7), (Epochs(0), 0), (MicroBatches(9), None)],
    ids=str,
)
def test_data_2_with_a_length_the_total_is_known_in_windows(limit: Any, total: int | None) -> None:
    model, recorder = Probe(), Recorder()
    step = probe_step(model, every=3)
    run = fold(step, init(step, model), list(without_length(7)), until=limit, sinks=[recorder])
    (started,) = of(RunStarted, recorder.events)
    assert started.total_updates == total
    assert total is None or run.state.progress.updates == total
    fold(step, run.state, list(without_length(7)), until=Epochs(6), sinks=[recorder])  # goes on from there
    began, updates = run.state.progress.epoch, run.state.progress.updates
    assert of(RunStarted, recorder.events)[-1].total_updates == updates + 3 * (6 - began)


@pytest.mark.parametrize(
    ("at_end", "total"), [("flush", 6), ("drop", 4), ("carry", None)], ids=["flushed", "dropped", "carried"]
)
def test_data_2_the_total_counts_what_becomes_of_the_last_window(at_end: Any, total: int | None) -> None:
    model, recorder = Probe(), Recorder()
    step = probe_step(model, every=3).replace("Accumulate", Accumulate(3, at_end=at_end))
    run = fold(step, init(step, model), list(without_length(7)), until=Epochs(2), sinks=[recorder])
    assert of(RunStarted, recorder.events)[0].total_updates == total
    assert run.state.progress.updates == (total or 4)


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


# -- DATA-1 ----------------------------------------------------------------------------------------

PER_EPOCH = 20


@pytest.mark.parametrize("batch_size", [1, 5])
def test_data_1_every_item_draws_numbers_of_its_own_from_all_three_generators(batch_size: int) -> None:
    def draws(workers: int) -> list[list[tuple[int, ...]]]:
        with stream.batches(Drawing(PER_EPOCH), batch_size, seed=11, workers=workers, collate=list) as batches:
            return [[item for batch in batches for item in batch] for _ in range(2)]

    epochs = draws(workers=2)
    for numbers in zip(*epochs[0], *epochs[1], strict=True):  # of one generator each
        assert len(numbers) == len(set(numbers)) == 2 * PER_EPOCH
    assert draws(workers=2) == epochs
    assert draws(workers=0) == epochs


def test_data_1_another_seed_draws_other_numbers() -> None:
    first, second = ([*stream.source(Drawing(5), seed=seed)] for seed in (1, 2))
    assert not {number for item in first for number in item} & {number for item in second for number in item}


# -- DATA-2, through a stream ----------------------------------------------------------------------


def test_data_2_a_stream_over_an_iterable_without_a_length_ends_its_last_window() -> None:
    model, recorder = Probe(), Recorder()
    step = probe_step(model, every=3)
    batches = stream.prefetch(lambda epoch: without_length(7), 2)
    run = fold(step, init(step, model), batches, sinks=[recorder])
    assert [u.micro_batches for u in of(UpdateDone, recorder.events)] == [3, 3, 1]
    assert run.state.params["w"].item() == 4.0


@pytest.mark.parametrize("after", [0, 2, 3])
def test_data_2_an_error_in_a_stream_keeps_its_type_and_its_place(after: int) -> None:
    batches = stream.prefetch(lambda epoch: broken_after(after), 2)
    model = Probe()
    step = probe_step(model, every=3)
    with pytest.raises(BrokenDiskError, match="sector 7") as failure:
        fold(step, init(step, model), batches)
    assert run_of(failure.value).state.progress.micro_steps == after
    assert batches.state_dict()["items"] == after


# -- DATA-3 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "batch_size"), [(8, 1), (7, 2), (9, 4), (5, 3)])
def test_data_3_ranks_of_uneven_data_have_equally_many_batches(n: int, batch_size: int) -> None:
    ranks = [stream.batches(range(n), batch_size, rank=rank, world=2, collate=list) for rank in range(2)]
    dropped = [[*node] for node in ranks]
    assert len(dropped[0]) == len(dropped[1]) == len(ranks[0])
    assert [*map(len, dropped[0])] == [*map(len, dropped[1])]
    assert n - sum(len(batch) for batches in dropped for batch in batches) == n % 2

    ranks = [stream.batches(range(n), batch_size, rank=rank, world=2, uneven="pad", collate=list) for rank in range(2)]
    padded = [[*node] for node in ranks]
    assert len(padded[0]) == len(padded[1])
    assert sorted(x for batches in padded for batch in batches if batch is not None for x in batch) == list(range(n))


def test_data_3_a_rank_that_has_nothing_gives_none_which_a_fold_passes_over() -> None:
    model = Probe()
    step = probe_step(model, every=2)
    loader = stream.batches([1.0, 2.0, 3.0], 1, rank=1, world=2, uneven="pad", collate=lambda ys: items(*ys))
    assert [batch is None for batch in loader] == [False, True]
    recorder = Recorder()
    run = fold(step, init(step, model), loader, sinks=[recorder])
    assert run.state.params["w"].item() == 2.0
    assert len(of(BatchSkipped, recorder.events)) == 1


# -- DATA-4 ----------------------------------------------------------------------------------------


def test_data_4_more_draws_without_replacement_than_items_with_a_weight_are_refused() -> None:
    with pytest.raises(SettingError, match="at most 2, the items that have a weight"):
        stream.weighted(range(3), [1, 1, 0], draws=3, replacement=False)
    assert sorted(stream.weighted(range(3), [1, 1, 0], draws=2, replacement=False)) == [0, 1]


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")], []])
def test_data_4_weights_that_are_none_are_refused_when_built(weights: list[float]) -> None:
    with pytest.raises(SettingError, match=r"weighted\(weights\) must be"):
        stream.weighted(range(2), weights)


@pytest.mark.parametrize("replacement", [True, False])
def test_data_4_there_may_be_more_than_two_to_the_24_items(replacement: bool) -> None:
    n = 2**24 + 1
    drawn = [*stream.weighted(range(n), torch.ones(n), draws=2, replacement=replacement, seed=1)]
    assert len(drawn) == 2
    assert all(0 <= item < n for item in drawn)


def test_data_4_the_share_of_a_class_is_that_of_its_weights() -> None:
    weights = [0.2] * 20 + [0.8] * 80
    draws = 100_000
    node = stream.batch(stream.weighted(range(100), weights, draws=draws, seed=3), 1000, collate=list)
    share = sum(item < 20 for batch in node for item in batch) / draws
    assert share == pytest.approx(4 / 68, abs=0.003)


@pytest.mark.parametrize("replacement", [True, False])
def test_data_4_draws_are_gone_on_with_exactly(replacement: bool) -> None:
    def build() -> stream.Node:
        return stream.weighted(range(30), range(30), draws=20, replacement=replacement, seed=5)

    uncut = [[*build()], [*build()]]
    assert uncut[0] == uncut[1]
    for cut in range(21):
        node, other = build(), build()
        head = [next(node) for _ in range(cut)]
        other.load_state_dict(node.state_dict())
        assert [*head, *other] == uncut[0]


# -- DATA-5, through a stream ----------------------------------------------------------------------


@pytest.mark.parametrize("workers", [None, stream.Threads(2)], ids=["plain", "threads"])
def test_data_5_none_in_a_stream_is_a_batch_to_skip(workers: Any) -> None:
    for batches in (
        stream.prefetch(WITH_A_HOLE, workers=workers),
        stream.map(lambda epoch: WITH_A_HOLE, lambda batch: batch, workers=workers),
    ):
        model, recorder = Probe(), Recorder()
        step = probe_step(model, every=2)
        run = fold(step, init(step, model), batches, sinks=[recorder])
        assert [u.micro_batches for u in of(UpdateDone, recorder.events)] == [2, 2, 1]
        assert run.state.params["w"].item() == 9.0
        assert len(of(BatchSkipped, recorder.events)) == 1
        batches.close()

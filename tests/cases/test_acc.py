"""Gradient accumulation: how micro-batches weigh, how windows end, what is reported.

Left out of ACC-1 and ACC-5: the same over several ranks, which needs the distributed part.
"""

import itertools
import random
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from pipeline import (
    Epochs,
    Evaluation,
    Forward,
    Frame,
    Loss,
    LossScale,
    MicroBatches,
    fold,
    init,
    monitors,
    scan,
    tap,
)
from pipeline.events import EpochEnded, EvalDone, Event, MicroBatchDone, RunStarted, UpdateDone
from pipeline.monitor import Signal, Stop
from pipeline.until import Limit
from tests.cases.probe import (
    Items,
    Probe,
    Recorder,
    averaged,
    items,
    of,
    probe_step,
    summed,
    summed_on_device,
)

each_loss = pytest.mark.parametrize("loss", [summed, summed_on_device, averaged])
both_ways = pytest.mark.parametrize("donate", [True, False], ids=["donated", "copied"])


def w_after(batches: Iterable[Any], *, every: int, donate: bool = True, scale: float | None = None, loss: Any = summed):
    """The probe's parameter after one pass, and the run."""
    model = Probe()
    step = probe_step(model, every=every, loss=loss)
    state = init(step, model, loss_scale=None if scale is None else LossScale(scale=scale))
    run = fold(step, state, batches, donate=donate)
    return run.state.params["w"].item(), run


# -- ACC-1 -----------------------------------------------------------------------------------------


@each_loss
@both_ways
@pytest.mark.parametrize(("masked_a", "masked_b"), [(0, 0), (90, 0), (0, 7), (3, 5)])
def test_acc_1_unequal_token_counts_weigh_by_items(loss: Any, donate: bool, masked_a: int, masked_b: int) -> None:
    a, b = items(*[1.0] * 10, masked=masked_a), items(*[0.0] * 100, masked=masked_b)
    w, run = w_after([a, b], every=2, donate=donate, loss=loss)
    assert w == pytest.approx(10 / 110, rel=1e-6)
    assert run.state.progress.updates == 1


@each_loss
def test_acc_1_the_order_of_the_micro_batches_does_not_matter(loss: Any) -> None:
    a, b = items(*[1.0] * 10), items(*[0.0] * 100)
    assert w_after([b, a], every=2, loss=loss)[0] == pytest.approx(10 / 110, rel=1e-6)


@pytest.mark.parametrize("scale", [None, 65536.0])
@pytest.mark.parametrize("loss", [summed, summed_on_device])
def test_acc_1_any_partition_of_the_same_items_gives_the_same_update(loss: Any, scale: float | None) -> None:
    rng = random.Random(0)
    targets = [rng.uniform(-2, 2) for _ in range(24)]
    whole, _ = w_after([items(*targets)], every=1, loss=loss)
    assert whole == pytest.approx(sum(targets) / 24, rel=1e-6)
    for _ in range(20):
        cuts = sorted(rng.sample(range(25), rng.randint(1, 8)))  # a cut at 0 or 24 leaves a micro-batch empty
        parts = [targets[i:j] for i, j in itertools.pairwise([0, *cuts, 24])]
        split = [items(*part, masked=rng.randint(0, 3) if part else 1) for part in parts]
        w, run = w_after(split, every=len(split), loss=loss, scale=scale)
        assert w == pytest.approx(whole, abs=1e-6)
        assert run.state.progress.updates == 1


@pytest.mark.parametrize("loss", [summed, summed_on_device, averaged])
@pytest.mark.parametrize("place", [0, 1, 2])
@both_ways
def test_acc_1_a_micro_batch_that_is_all_masked_changes_nothing(loss: Any, place: int, donate: bool) -> None:
    batches = [items(*[1.0] * 10), items(*[0.0] * 100)]
    batches.insert(place, items(masked=4))
    w, run = w_after(batches, every=3, donate=donate, loss=loss)
    assert w == pytest.approx(10 / 110, rel=1e-6)
    assert run.state.progress.updates == 1


def test_acc_1_the_weight_and_the_loss_of_the_window_are_those_of_all_its_items() -> None:
    model, recorder = Probe(), Recorder()
    step = probe_step(model, every=2)
    fold(step, init(step, model), [items(*[1.0] * 10, masked=5), items(*[0.0] * 100)], sinks=[recorder])
    (update,) = of(UpdateDone, recorder.events)
    assert float(update.weight) == pytest.approx(110)
    assert float(update.loss) == pytest.approx(0.5 * 10 / 110, rel=1e-6)
    assert float(update.grad_norm) == pytest.approx(10 / 110, rel=1e-6)


# -- ACC-2 -----------------------------------------------------------------------------------------

FIVE = [items(y) for y in (0.0, 0.0, 0.0, 0.0, 1.0)]


def endless() -> Iterator[Items]:
    """The five, and then items that would show in `w` if they were let in."""
    yield from FIVE
    while True:
        yield items(1000.0)


@attrs.frozen(kw_only=True)
class Seen(Event):
    """A user's own event, for every micro-batch."""

    count: int


def say_seen(frame: Frame) -> Frame:
    p = frame.state.progress
    seen = Seen(micro_step=p.micro_steps, update=p.updates, epoch=p.epoch, time=frame.time, count=p.micro_steps)
    return frame.having(events=(*frame.events, seen))


@attrs.frozen
class StopAfter:
    """Asks to stop after `n` micro-batches, wherever in a window that is."""

    n: int
    name: str = "StopAfter"

    def init(self) -> int:
        return 0

    def reduce(self, accumulator: int, event: Event) -> int:
        return event.count if isinstance(event, Seen) else accumulator

    def result(self, accumulator: int) -> int:
        return accumulator

    def signals(self, accumulator: int) -> Iterable[Signal]:
        if accumulator >= self.n:
            yield Stop("seen enough")


def check_two_updates(trace: list[float], events: list[Event]) -> None:
    updates = of(UpdateDone, events)
    assert trace == [0.0, 1.0]
    assert [u.micro_batches for u in updates] == [4, 1]
    assert [float(u.weight) for u in updates] == [4.0, 1.0]
    assert [float(u.loss) for u in updates] == [0.0, 0.5]


def run_five(stream: Iterable[Any], *, donate: bool, until: Limit | None = None, stop: int | None = None):
    """The value of `w` after every update, the events, and the run."""
    model, recorder = Probe(), Recorder()
    trace: list[float] = []

    def note(frame: Frame) -> None:
        if frame.applied:
            trace.append(frame.state.params["w"].item())

    step = probe_step(model, every=4).insert_after("MaybeStep", tap(note))
    step = step if stop is None else step.insert_before("EmitEvents", say_seen)
    run = fold(
        step,
        init(step, model),
        stream,
        donate=donate,
        until=until,
        sinks=[recorder],
        monitors=[] if stop is None else [StopAfter(stop)],
    )
    return trace, recorder.events, run


@both_ways
@pytest.mark.parametrize("stream", [lambda: FIVE, lambda: iter(FIVE)], ids=["list", "no length"])
def test_acc_2_a_short_last_window_is_divided_by_its_own_size(stream: Any, donate: bool) -> None:
    trace, events, run = run_five(stream(), donate=donate)
    check_two_updates(trace, events)
    assert run.state.params["w"].item() == 1.0
    assert run.state.window.micro_batches == 0


@both_ways
def test_acc_2_so_is_one_that_a_step_limit_cuts_short(donate: bool) -> None:
    trace, events, run = run_five(endless(), donate=donate, until=MicroBatches(5))
    check_two_updates(trace, events)
    assert run.stopped_by == ("MicroBatches(5)",)


@both_ways
def test_acc_2_so_is_one_that_an_early_stop_cuts_short(donate: bool) -> None:
    trace, events, run = run_five(endless(), donate=donate, until=MicroBatches(100), stop=5)
    check_two_updates(trace, events)
    assert run.stopped_by == ("seen enough",)


def test_acc_2_every_epoch_ends_its_own_window() -> None:
    model, recorder = Probe(), Recorder()
    step = probe_step(model, every=4)
    fold(step, init(step, model), FIVE, until=Epochs(2), sinks=[recorder])
    assert [u.micro_batches for u in of(UpdateDone, recorder.events)] == [4, 1, 4, 1]
    assert [e.update for e in of(EpochEnded, recorder.events)] == [2, 4]


def test_acc_2_scan_closes_the_window_too() -> None:
    model = Probe()
    step = probe_step(model, every=4)
    *_, (state, events) = scan(step, init(step, model), FIVE)
    assert state.params["w"].item() == 1.0
    assert events


# -- ACC-3 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 1.0, 65536.0])
@pytest.mark.parametrize("every", [1, 3, 4])
@pytest.mark.parametrize("loss", [summed, summed_on_device, averaged])
@both_ways
def test_acc_3_the_reported_loss_knows_neither_window_nor_loss_scale(
    every: int, scale: float | None, loss: Any, donate: bool
) -> None:
    model, recorder = Probe(), Recorder()
    step = probe_step(model, every=every, lr=0.0, loss=loss, micro_batches=True)
    state = init(step, model, loss_scale=None if scale is None else LossScale(scale=scale))
    batches = [items(*[1.0] * n) for n in (2, 2, 1, 3, 2, 2, 1, 3)]
    run = fold(
        step,
        state,
        batches,
        donate=donate,
        sinks=[recorder],
        monitors=[monitors.MeanLoss(), monitors.GradNorm()],
        evaluations=[Evaluation(Forward(model, loss), batches)],
    )
    micro, windows = of(MicroBatchDone, recorder.events), of(UpdateDone, recorder.events)
    assert [float(e.loss) for e in micro] == [0.5] * 8
    assert [float(e.weight) for e in micro] == [2, 2, 1, 3, 2, 2, 1, 3]
    assert [float(e.loss) for e in windows] == pytest.approx([0.5] * -(-8 // every), rel=1e-6)
    assert [float(e.grad_norm) for e in windows] == pytest.approx([1.0] * -(-8 // every), rel=1e-6)
    assert run.results["MeanLoss"] == pytest.approx(0.5, rel=1e-6)
    assert [e.values["val_loss"] for e in of(EvalDone, recorder.events)] == [pytest.approx(0.5)]
    assert len(of(RunStarted, recorder.events)) == 1


# -- ACC-5 -----------------------------------------------------------------------------------------


@cache
def bfloat16_window(n: int, donate: bool = True, scale: float | None = None) -> tuple[UpdateDone, Tensor]:
    """The update of a window of n items of target 1, and the parameter after it."""
    model, recorder = Probe(torch.bfloat16), Recorder()
    step = probe_step(model, every=n)
    state = init(step, model, loss_scale=None if scale is None else LossScale(scale=scale))
    run = fold(step, state, [items(1.0)] * n, donate=donate, sinks=[recorder])
    (update,) = of(UpdateDone, recorder.events)
    return update, run.state.params["w"]


@pytest.mark.parametrize(("n", "donate"), [(1000, True), (1000, False), (4096, True)])
def test_acc_5_the_gradients_of_a_bfloat16_parameter_are_summed_wider(n: int, donate: bool) -> None:
    update, w = bfloat16_window(n, donate)
    assert w.dtype == torch.bfloat16
    assert w.item() == pytest.approx(1.0, rel=0.01)
    assert float(update.grad_norm) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("n", [1000, 4096])
def test_acc_5_the_loss_of_a_bfloat16_window_is_summed_wider_too(n: int) -> None:
    update, _ = bfloat16_window(n)
    assert float(update.loss) == pytest.approx(0.5, rel=0.01)


def test_acc_5_so_are_its_measures() -> None:
    def loss(model: Any, y: Tensor) -> Loss:
        each = (model() - y) ** 2 / 2
        return Loss.mean(each.mean(), measures={"half": each.detach().mean()})

    model = Probe(torch.bfloat16)
    step = probe_step(model, every=1000, loss=loss)
    batches = [torch.ones(1, dtype=torch.bfloat16)] * 1000
    run = fold(step, init(step, model), batches, monitors=[monitors.Mean("half")])
    assert run.results["Mean half"] == pytest.approx(0.5, rel=0.01)


def test_acc_5_so_is_the_loss_of_an_evaluation() -> None:
    model = Probe(torch.bfloat16)
    step = probe_step(model)
    evaluated = Evaluation(Forward(model, summed), [items(1.0)] * 1000).run(init(step, model))
    assert evaluated.values["val_loss"] == pytest.approx(0.5, rel=0.01)


def test_acc_5_a_loss_scale_does_not_change_that() -> None:
    update, w = bfloat16_window(1000, scale=1024.0)
    assert w.item() == pytest.approx(1.0, rel=0.01)
    assert float(update.grad_norm) == pytest.approx(1.0, rel=0.01)


def test_acc_5_a_bfloat16_parameter_beside_wide_ones_does_not_narrow_them() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
            self.wide = nn.Parameter(torch.zeros(1))

    def loss(model: Any, y: Tensor) -> Tensor:
        return ((model.narrow.float() - y) ** 2 / 2 + (model.wide - y) ** 2 / 2).mean()

    model = Two()
    step = probe_step(model, every=1000, loss=loss)
    run = fold(step, init(step, model), [torch.ones(1)] * 1000)
    assert run.state.params["narrow"].item() == pytest.approx(1.0, rel=0.01)
    assert run.state.params["wide"].item() == pytest.approx(1.0, rel=1e-6)

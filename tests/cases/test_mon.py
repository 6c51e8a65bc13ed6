"""Monitors: what is best where values are no numbers, two of a kind, measures that are missing, rates as they were
used, any order of the monitors, and means over batches of unequal size.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from pipeline import (
    Epochs,
    Evaluation,
    EveryEpoch,
    EveryUpdates,
    Forward,
    Loss,
    Optimizer,
    Save,
    Updates,
    fold,
    init,
    monitors,
    replay,
    supervised,
)
from pipeline.checkpoint import CheckpointStore
from pipeline.errors import DuplicateNameError, MeasureError
from pipeline.events import EvalDone, Event, UpdateDone
from tests.cases.probe import Items, Probe, Recorder, bits, items, of, probe_step, step_of


def reported(*values: float) -> list[Event]:
    """Evaluations with these values of `val_loss`, one after each update."""
    return [
        EvalDone(micro_step=n, update=n, epoch=0, time=0.0, name="val", values={"val_loss": v}, weight=1.0, batches=1)
        for n, v in enumerate(values, start=1)
    ]


def told(model: nn.Module, *values: float) -> Evaluation:
    """An evaluation after every update that gives these values of `val_loss`, one after the other."""
    coming = iter(values)
    forward = Forward(model, lambda model, batch: model().sum() * 0 + next(coming))
    return Evaluation(forward, [items(0.0)], EveryUpdates(1))


# -- MON-1 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [
        ("min", [math.nan, 0.5, 0.4, math.nan], 0.4),
        ("max", [math.nan, 0.1, 0.2, math.nan], 0.2),
        ("min", [math.inf, 0.5, math.inf], 0.5),
        ("max", [-math.inf, 0.5, -math.inf], 0.5),
        ("min", [0.5, -math.inf, math.nan], -math.inf),
        ("max", [0.5, math.inf, math.nan], math.inf),
    ],
)
def test_mon_1_nan_is_never_best_and_counts_as_no_improvement(mode: Any, values: list[float], best: float) -> None:
    watch = [monitors.Best("val_loss", mode=mode), monitors.EarlyStopping("val_loss", 9, mode=mode)]
    results = replay(reported(*values), watch)
    update = values.index(best) + 1
    assert results["Best val_loss"] == {"best": best, "update": update, "epoch": 0}
    assert results["EarlyStopping"] == {"best": best, "update": update, "waited": len(values) - update}


def test_mon_1_a_state_of_nan_is_not_asked_to_be_saved_over_the_best() -> None:
    saving = monitors.SaveBest("val_loss")
    accumulator, asked = saving.init(), list[list[str]]()
    for event in reported(math.nan, 0.5, 0.4, math.nan):
        accumulator = saving.reduce(accumulator, event)
        asked.append([signal.reason for signal in saving.signals(accumulator) if isinstance(signal, Save)])
    first, second = "best val_loss: 0.5", "best val_loss: 0.4"
    assert asked == [[], [first], [second], [second]]  # the last one again, since nothing tells that it was done


def test_mon_1_the_last_good_checkpoint_stays_the_best(tmp_path: Path) -> None:
    model = Probe()
    step, store = probe_step(model), CheckpointStore(tmp_path, best="val_loss", keep_last=1)
    evaluations = [told(model, math.nan, 0.5, 0.4, math.nan)]
    watch = [monitors.SaveBest("val_loss"), monitors.SaveEvery(updates=1)]
    fold(step, init(step, model), [items(1.0)] * 4, evaluations=evaluations, monitors=watch, store=store)
    assert [saved.update for saved in store.list()] == [3, 4]
    assert store.load("best").measures == {"val_loss": pytest.approx(0.4)}


# -- MON-2 -----------------------------------------------------------------------------------------


def two_of_each() -> list[Any]:
    return [
        monitors.EarlyStopping("val_loss", patience=1, name="soon"),
        monitors.EarlyStopping("val_loss", patience=3, min_delta=0.2, name="late"),
        monitors.Best("val_loss", name="low"),
        monitors.Best("val_loss", mode="max", name="high"),
    ]


def test_mon_2_two_of_a_kind_have_a_state_each() -> None:
    results = replay(reported(1.0, 0.9, 1.1), two_of_each())
    assert results == {
        "soon": {"best": 0.9, "update": 2, "waited": 1},
        "late": {"best": 1.0, "update": 1, "waited": 2},
        "low": {"best": 0.9, "update": 2, "epoch": 0},
        "high": {"best": 1.1, "update": 3, "epoch": 0},
    }


def test_mon_2_saved_three_times_and_resumed_each_goes_on_with_its_own(tmp_path: Path) -> None:
    values = (1.0, 0.9, 0.95, 0.8, 0.7, 1.2)

    def run(until: int, evaluated: tuple[float, ...], folder: Path, resume: str | None) -> Any:
        step = probe_step(model := Probe())
        return fold(
            step,
            init(step, model),
            [items(1.0)] * 6,
            until=Updates(until),
            evaluations=[told(model, *evaluated)],
            monitors=[*(attrs.evolve(m, patience=9) if hasattr(m, "patience") else m for m in two_of_each()), *saving],
            store=CheckpointStore(folder, keep_last=9, best="val_loss"),
            resume=resume,
            clock=lambda: 0.0,
        )

    saving = [monitors.SaveEvery(updates=2), monitors.SaveBest("val_loss")]
    expected = run(6, values, tmp_path / "whole", None).results
    run(4, values[:4], tmp_path / "cut", None)
    store = CheckpointStore(tmp_path / "cut")
    kept = [store.load(saved.path).accumulators for saved in store.list()]
    assert len(kept) >= 3
    assert all({"soon", "late", "low", "high"} <= set(accumulators) for accumulators in kept)
    assert len({tuple(len(a) for a in accumulators.values()) for accumulators in kept}) == 1
    assert run(6, values[4:], tmp_path / "cut", "latest").results == expected


def test_mon_2_two_of_one_name_are_refused_before_the_run() -> None:
    step = probe_step(model := Probe())
    two = [monitors.EarlyStopping("val_loss", 1), monitors.EarlyStopping("val_loss", 3)]
    with pytest.raises(DuplicateNameError, match="Two monitors are called 'EarlyStopping'"):
        fold(step, init(step, model), [items(1.0)], monitors=two)


# -- MON-3 -----------------------------------------------------------------------------------------


def level(model: nn.Module, when: EveryEpoch | EveryUpdates, name: str = "val") -> Evaluation:
    """An evaluation whose loss is 1 every time."""
    return Evaluation(Forward(model, lambda model, batch: model().sum() * 0 + 1), [items(0.0)], when, name)


def test_mon_3_only_new_values_count() -> None:
    # The measure comes with every second epoch: the first is the best one, and two bad ones follow.
    step = probe_step(model := Probe())
    run = fold(
        step,
        init(step, model),
        [items(1.0)],
        until=Epochs(20),
        evaluations=[level(model, EveryEpoch(2)), level(model, EveryEpoch(), "other")],
        monitors=[monitors.EarlyStopping("val_loss", patience=2)],
    )
    assert run.state.progress.epoch == 6
    assert run.results["EarlyStopping"] == {"best": 1.0, "update": 2, "waited": 2}
    assert run.stopped_by == ("EarlyStopping: val_loss no better for 2 evaluations (best 1 at update 2)",)


@pytest.mark.parametrize("inside", ["alone", "mapped", "combined"])
def test_mon_3_a_misspelt_measure_is_named_with_those_that_exist(inside: str) -> None:
    watch: Any = monitors.EarlyStopping("val_los")
    wrapped = {"mapped": monitors.map(watch, str), "combined": monitors.combine(watch)}.get(inside, watch)
    step = probe_step(model := Probe())
    with pytest.raises(MeasureError, match=r"watches 'val_los', which nothing reports.*: val_loss\."):
        fold(step, init(step, model), [items(1.0)], evaluations=[level(model, EveryUpdates(1))], monitors=[wrapped])


@pytest.mark.parametrize("monitor", [monitors.EarlyStopping("val_loss"), monitors.Best("val_loss")])
def test_mon_3_without_an_evaluation_it_is_said_before_the_first_batch(monitor: Any) -> None:
    step = probe_step(model := Probe())
    with pytest.raises(MeasureError, match="give the fold an Evaluation"):
        fold(step, init(step, model), [items(1.0)], monitors=[monitor])
    assert float(model.w.detach()) == 0.0


# -- MON-4 -----------------------------------------------------------------------------------------


def test_mon_4_the_rate_shown_is_the_one_that_the_update_used() -> None:
    rates = [1.0, 0.1, 1.0, 0.1]
    model, recorder = Probe(torch.float64), Recorder()
    step = step_of(model, lambda model, batch: model().sum(), Optimizer(torch.optim.SGD, lr=lambda n: rates[n]))
    state, before, moved = init(step, model), 0.0, list[float]()
    shown = list[float]()
    for n in range(4):
        run = fold(
            step, state, [items(0.0)], until=Updates(n + 1), monitors=[monitors.LearningRate()], sinks=[recorder]
        )
        state, after = run.state, float(model.w.detach())
        moved.append(abs(after - before))
        shown.append(run.results["LearningRate"])
        before = after
    assert [event.rates["default"] for event in of(UpdateDone, recorder.events)] == rates
    assert shown == rates
    assert moved == pytest.approx(rates, abs=1e-12)


# -- MON-5 -----------------------------------------------------------------------------------------


def in_order(order: tuple[int, ...], folder: Path) -> tuple[Any, ...]:
    """State, results, reasons, events and checkpoints of the same run with four monitors in this order."""
    watch = [
        monitors.EarlyStopping("val_loss", patience=2),
        monitors.MeanLoss(),
        monitors.Plateau("val_loss", patience=0, factor=0.5),
        monitors.SaveBest("val_loss"),
    ]
    model, recorder = Probe(), Recorder()
    step = probe_step(model, lr=0.1)
    run = fold(
        step,
        init(step, model),
        [items(1.0), items(2.0, 3.0)],
        until=Epochs(9),
        evaluations=[level(model, EveryUpdates(2))],
        monitors=[watch[place] for place in order],
        sinks=[recorder],
        store=folder,
        publish_every=1,
        clock=lambda: 0.0,
    )
    store = CheckpointStore(folder)
    saved = [(path.name, store.load(path)) for path in (saved.path for saved in store.list())]
    kept = [(name, bits(c.state), dict(c.accumulators), c.reasons, c.measures) for name, c in saved]
    return bits(run.state), dict(run.results), run.stopped_by, list(map(repr, recorder.events)), kept


def test_mon_5_in_all_orders_the_run_and_its_checkpoints_are_the_same(tmp_path: Path) -> None:
    first = in_order((0, 1, 2, 3), tmp_path / "first")
    assert first[2] == ("EarlyStopping: val_loss no better for 2 evaluations (best 1 at update 2)",)
    assert first[1]["Plateau"] == 0.25
    assert len(first[4]) == 2
    for order in itertools.permutations(range(4)):
        assert in_order(order, tmp_path / "".join(map(str, order))) == first


def test_mon_5_a_checkpoint_holds_what_every_monitor_knows_of_its_update(tmp_path: Path) -> None:
    _, _, accumulators, _, measures = in_order((3, 2, 1, 0), tmp_path)[4][0]
    assert measures == {"val_loss": 1.0}
    stopping = monitors.EarlyStopping("val_loss").result(accumulators["EarlyStopping"])
    assert stopping == {"best": 1.0, "update": 2, "waited": 0}
    assert monitors.SaveBest("val_loss").result(accumulators["SaveBest"]) == {"best": 1.0, "update": 2}
    assert accumulators["MeanLoss"][1] == 3.0  # the items of both batches
    assert monitors.Plateau("val_loss").result(accumulators["Plateau"]) == 1.0


# -- MON-6 -----------------------------------------------------------------------------------------


def losses(*told: tuple[float, int]) -> list[Any]:
    return [
        UpdateDone(
            micro_step=n, update=n, epoch=0, time=0.0, loss=loss, weight=w, micro_batches=1, rates={}, grad_norm=0.0
        )
        for n, (loss, w) in enumerate(told, start=1)
    ]


def test_mon_6_a_short_batch_counts_for_what_it_holds() -> None:
    told = [(0.7, 256), (0.8, 256), (0.9, 10)]
    watch = [monitors.MeanLoss(), monitors.window(monitors.MeanLoss(), 3, name="recent")]
    for log in (told, [*told, (math.nan, 0)]):
        results = replay(losses(*log), watch)
        assert results["MeanLoss"] == results["recent"] == pytest.approx(0.75287, abs=1e-5)
    assert replay(losses((math.nan, 0)), watch) == {"MeanLoss": None, "recent": None}


def test_mon_6_in_a_run_the_mean_over_an_epoch_is_that_over_its_items() -> None:
    def loss(model: Any, batch: Items) -> Loss:
        each: Tensor = model() * 0 + batch.y[batch.counted]
        count = int(batch.counted.sum())
        return Loss.sum(each.sum(), count, measures={"y": (each.detach().sum(), count)})

    batches = [items(*[0.5] * 16), items(*[0.25] * 16), items(4.0, masked=15), items(masked=4)]
    step = probe_step(model := Probe(), loss=loss)
    watch = [monitors.MeanLoss(), monitors.Mean("y"), monitors.per_epoch(monitors.MeanLoss(), name="epochs")]
    run = fold(step, init(step, model), batches, until=Epochs(2), monitors=watch)
    expected = (16 * 0.5 + 16 * 0.25 + 4.0) / 33
    assert run.results["MeanLoss"] == pytest.approx(expected, rel=1e-6)
    assert run.results["Mean y"] == pytest.approx(expected, rel=1e-6)
    assert run.results["epochs"] == pytest.approx((expected, expected), rel=1e-6)


def test_mon_6_an_epoch_of_nothing_has_no_mean() -> None:
    model = Probe()
    step = step_of(model, supervised(nn.functional.mse_loss), Optimizer(torch.optim.SGD, lr=0.1))
    run = fold(step, init(step, model), [None], monitors=[monitors.per_epoch(monitors.MeanLoss(), name="epochs")])
    assert run.results["epochs"] == (None,)

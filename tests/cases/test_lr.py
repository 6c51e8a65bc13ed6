"""Schedules: counted in applied updates, from the first one on, and the same after a resume."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Evaluation, EveryUpdates, Forward, Group, Optimizer, fold, init, monitors, replay, schedules
from pipeline.events import EvalDone, UpdateDone
from pipeline.monitor import ScaleRate
from pipeline.schedules import Schedule
from tests.cases.probe import Items, Probe, Recorder, averaged, items, of, step_of

SGD = torch.optim.SGD


def pull(model: Any, batch: Items) -> Tensor:
    """A loss whose gradient is -1 wherever `w` is, so that `w` is the sum of the rates."""
    return -model().sum() * batch.y.mean()


def rates_of(recorder: Recorder, group: str = "default") -> list[float]:
    return [event.rates[group] for event in of(UpdateDone, recorder.events)]


def run_with(lr: Schedule | float, micro_batches: int, every: int = 1) -> tuple[list[float], float]:
    """The rates of all updates, and where `w` came to."""
    model, recorder = Probe(), Recorder()
    step = step_of(model, pull, Optimizer(SGD, lr=lr), every=every)
    fold(step, init(step, model), [items(1.0)] * micro_batches, sinks=[recorder])
    return rates_of(recorder), float(model.w.detach())


# -- LR-1 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("updates", "start", "expected"),
    [
        (4, None, [0.25, 0.5, 0.75, 1, 1, 1]),
        (1, None, [1, 1, 1, 1, 1, 1]),
        (0, None, [1, 1, 1, 1, 1, 1]),
        (4, 0.2, [0.2, 0.4, 0.6, 0.8, 1, 1]),
        (4, 0.0, [0, 0.25, 0.5, 0.75, 1, 1]),
    ],
)
def test_lr_1_a_warmup_wastes_no_update_unless_it_is_told_where_to_start(
    updates: int, start: float | None, expected: list[float]
) -> None:
    rates, w = run_with(schedules.warmup(1.0, updates, start), 6)
    assert rates == pytest.approx(expected, abs=1e-15)
    assert w == pytest.approx(sum(expected), abs=1e-6)


@pytest.mark.parametrize(
    "lr",
    [
        schedules.warmup_cosine(1.0, 4, 6),
        schedules.warmup_stable_decay(1.0, 6, warmup=4, decay=2),
        schedules.warmup(schedules.cosine(1.0, 0.0, 2), 4),
        schedules.one_cycle(1.0, 6),
    ],
    ids=repr,
)
def test_lr_1_the_first_update_moves_the_weights(lr: Schedule) -> None:
    rates, w = run_with(lr, 1)
    assert rates[0] > 0
    assert w == pytest.approx(rates[0], abs=1e-7)


# -- LR-2, one process -----------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 4, 16])
def test_lr_2_the_schedule_counts_updates_and_not_micro_batches(every: int) -> None:
    rates, w = run_with(lambda n: 1 / (1 + n), 16, every)
    expected = [1 / (1 + n) for n in range(16 // every)]
    assert rates == expected
    assert w == pytest.approx(sum(expected), abs=1e-6)


def test_lr_2_a_short_last_window_is_one_update_and_a_skipped_window_is_none() -> None:
    assert run_with(lambda n: 1 / (1 + n), 6, 4)[0] == [1, 0.5]
    model, recorder = Probe(), Recorder()
    step = step_of(model, averaged, Optimizer(SGD, lr=lambda n: 1 / (1 + n)))
    fold(
        step,
        init(step, model),
        [items(1.0), items(math.inf), items(1.0), items(math.nan), items(1.0)],
        sinks=[recorder],
    )
    assert rates_of(recorder) == [1, 1 / 2, 1 / 3]


# -- LR-3 ------------------------------------------------------------------------------------------


def evaluated(values: list[float], update: int = 0) -> list[EvalDone]:
    """One evaluation after another, an update apart."""
    return [
        EvalDone(micro_step=n, update=n, epoch=n, time=0.0, name="val", values={"val_loss": v}, weight=1.0, batches=1)
        for n, v in enumerate(values, update + 1)
    ]


def factors(plateau: monitors.Plateau, values: list[float]) -> list[float]:
    """What it asks for after each evaluation."""
    accumulator, asked = plateau.init(), []
    for event in evaluated(values):
        accumulator = plateau.reduce(accumulator, event)
        asked.append(plateau.result(accumulator) or 1.0)
        assert list(plateau.signals(accumulator)) == [ScaleRate(asked[-1])] * (asked[-1] < 1)
    return asked


def level(model: nn.Module) -> Evaluation:
    """An evaluation after each update that never finds anything better or worse."""
    return Evaluation(Forward(model, lambda m, _: 0 * m().sum() + 1), [items(1.0)], EveryUpdates(1))


@pytest.mark.parametrize(
    ("patience", "cooldown", "expected"),
    [
        (2, 0, [0.1] * 3 + [0.01] * 3 + [0.001] * 3 + [1e-4]),
        (2, 1, [0.1] * 3 + [0.01] * 4 + [0.001] * 3),
        (0, 2, [0.1] + [0.01] * 3 + [0.001] * 3 + [1e-4] * 3),
    ],
)
def test_lr_3_patience_and_cooldown_are_torchs_to_the_evaluation(
    patience: int, cooldown: int, expected: list[float]
) -> None:
    plateau = monitors.Plateau("val_loss", factor=0.1, patience=patience, cooldown=cooldown)
    lr = schedules.constant(0.1)
    rates = [schedules.scale(lr, factor)(n) for n, factor in enumerate(factors(plateau, [1.0] * 10))]
    assert rates == pytest.approx(expected, rel=1e-12)
    # In a run, evaluated after each update: what an evaluation decides is the rate of the very next update.
    model, recorder = Probe(), Recorder()
    step = step_of(model, pull, Optimizer(SGD, lr=lr))
    fold(step, init(step, model), [items(1.0)] * 11, evaluations=[level(model)], monitors=[plateau], sinks=[recorder])
    assert rates_of(recorder) == pytest.approx([0.1, *expected], rel=1e-12)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_lr_3_nan_counts_as_bad_and_never_as_best(mode: Any) -> None:
    plateau = monitors.Plateau("val_loss", factor=0.1, patience=1, mode=mode)
    assert factors(plateau, [math.nan, math.nan, math.nan]) == pytest.approx([1, 0.1, 0.1])
    better = [1.0, 0.5, 0.25] if mode == "min" else [1.0, 2.0, 4.0]
    mixed = [better[0], math.nan, better[1], math.nan, better[2]]
    assert factors(plateau, mixed) == [1.0] * 5


# -- LR-4: what there is of it: a new step with one group more goes on from the state ---------------


class Backbone(nn.Module):
    """A head, and a backbone that is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.zeros(1))
        self.backbone = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self) -> Tensor:
        return self.head + self.backbone


LRS: dict[str, Schedule] = {
    "a function": lambda n: 1 / (1 + n),
    "cosine with warmup": schedules.warmup_cosine(0.1, 2, 8),
}


@pytest.mark.parametrize("new_lr", [0.01, None], ids=["its own rate", "the optimizer's"])
@pytest.mark.parametrize("lr", LRS.values(), ids=LRS)
def test_lr_4_a_group_added_at_update_3_leaves_the_others_rates_alone(lr: Schedule, new_lr: float | None) -> None:
    model, recorder = Backbone(), Recorder()
    first = step_of(model, pull, Optimizer(torch.optim.AdamW, lr=lr))
    state = fold(first, init(first, model), [items(1.0)] * 3, sinks=[recorder]).state
    assert float(model.backbone) == 0.0
    model.backbone.requires_grad_()
    second = step_of(model, pull, Optimizer(torch.optim.AdamW, lr=lr, groups=[Group("backbone", lr=new_lr)]))
    fold(second, state, [items(1.0)] * 5, sinks=[recorder])
    assert rates_of(recorder) == [lr(n) for n in range(8)]
    added = [event.rates["backbone"] for event in of(UpdateDone, recorder.events)[3:]]
    # The documented rule: the group's own rate, or else the optimizer's schedule at the run's count.
    assert added == [lr(n) if new_lr is None else new_lr for n in range(3, 8)]
    assert float(model.backbone.detach()) > 0.0


def test_lr_4_a_plateau_scales_the_added_group_as_the_others() -> None:
    def rates(groups: list[Group]) -> tuple[list[float], list[float]]:
        model, recorder = Backbone(), Recorder()
        first = step_of(model, pull, Optimizer(SGD, lr=0.1))
        state = fold(first, init(first, model), [items(1.0)] * 3, sinks=[recorder]).state
        model.backbone.requires_grad_()
        second = step_of(model, pull, Optimizer(SGD, lr=0.1, groups=groups))
        plateau = monitors.Plateau("val_loss", factor=0.1, patience=0)
        fold(second, state, [items(1.0)] * 5, evaluations=[level(model)], monitors=[plateau], sinks=[recorder])
        return rates_of(recorder), [e.rates["backbone"] for e in of(UpdateDone, recorder.events)[3:] if groups]

    old, added = rates([Group("backbone", lr=0.01)])
    assert old == rates([])[0]
    assert old == pytest.approx([0.1] * 5 + [0.01, 0.001, 1e-4], rel=1e-12)
    assert added == pytest.approx([0.01] * 2 + [0.001, 1e-4, 1e-5], rel=1e-12)


# -- LR-5 ------------------------------------------------------------------------------------------

EXPECTED = [1, 1, 0.5, 1, 0.8536, 0.5, 0.1464, 1, 0.9619]


def restarts() -> Schedule:
    return schedules.warm_restarts(1.0, 0.0, 1, 2)


def warmed_up() -> Schedule:
    return schedules.warmup(schedules.warm_restarts(1.0, 0.0, 1, 2), 5)


@pytest.mark.parametrize("schedule_first", [True, False])
@pytest.mark.parametrize("make", [restarts, warmed_up])
def test_lr_5_going_on_from_any_update_is_the_straight_run(make: Callable[[], Schedule], schedule_first: bool) -> None:
    straight, w = run_with(make(), 20)
    if make is restarts:
        assert straight[:9] == pytest.approx(EXPECTED, abs=1e-4)
    for cut in range(21):
        model, recorder = Probe(), Recorder()
        step = step_of(model, pull, Optimizer(SGD, lr=make()))
        saved = fold(step, init(step, model), [items(1.0)] * cut, sinks=[recorder]).state.copy()
        if schedule_first:
            optimizer = Optimizer(SGD, lr=make())
            other = Probe()
        else:
            other = Probe()
            optimizer = Optimizer(SGD, lr=make())
        state = fold(step_of(other, pull, optimizer), saved, [items(1.0)] * (20 - cut), sinks=[recorder]).state
        assert rates_of(recorder) == straight
        assert float(state.params["w"].detach()) == w


def test_lr_5_a_warmup_and_a_plateau_go_on_from_any_evaluation() -> None:
    values = [1.0, 0.9, 0.9, math.nan, 0.9, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.7, 0.7, 0.7, 0.7]
    lr, plateau = schedules.warmup(0.1, 4), monitors.Plateau("val_loss", factor=0.5, patience=1, cooldown=1, warmup=4)
    events = evaluated(values)

    def rates(accumulator: Any, events: list[EvalDone]) -> list[float]:
        found = []
        for event in events:
            accumulator = plateau.reduce(accumulator, event)
            found.append(lr(event.update) * (plateau.result(accumulator) or 1.0))
        return found

    straight = rates(plateau.init(), events)
    assert straight[-1] <= 0.1 * 0.5**2 < max(straight)  # cut at least twice
    for cut in range(len(events)):
        saved = plateau.init()
        for event in events[:cut]:
            saved = plateau.reduce(saved, event)
        travelled = tuple(json.loads(json.dumps(saved)))
        assert rates(travelled, events[cut:]) == straight[cut:]
    assert replay(events, [plateau])["Plateau"] == pytest.approx(straight[-1] / 0.1)

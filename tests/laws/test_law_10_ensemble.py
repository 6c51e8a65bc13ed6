"""Law 10: member i of an ensemble equals the single run i.

Within 1e-5 of the largest magnitude in each tensor over 100 updates in float32, and within 1e-9 in float64, with
dropout, BatchNorm, clipping, a loss scale, and rates, weight decays and loss weights of each member's own. Masks of
dropout are the single run's to the bit (on the CPU); sums are not, since the members' products are taken together.
Centered RMSprop divides by a difference that rounding can make all of: it is held to the law in float64 alone, as any
two ways to sum the same gradient would have to be.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import attrs
import pytest
import torch
from lion_pytorch import Lion
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    ClipByGlobalNorm,
    EmitEvents,
    Forward,
    LossScale,
    MaybeStep,
    Optimizer,
    Run,
    ScaledBackward,
    chain,
    fold,
    init,
    initialise,
    no_decay,
    schedules,
    supervised,
)
from pipeline.ensembles import Ensemble, ensemble
from pipeline.events import Event, LossScaleChanged, MicroBatchDone, UpdateDone, UpdateSkipped
from pipeline.testing import assert_records_equal
from pipeline.transform import Chain
from tests.laws.cases import IN, OUT, accuracy, make_batch

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"groups": [no_decay()]}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "eps": 1e-3}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "Lion": (Lion, {"betas": (0.8, 0.9)}),
}
MORE: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "plain SGD": (torch.optim.SGD, {"maximize": True}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "Adam, decoupled": (torch.optim.Adam, {"decoupled_weight_decay": True, "maximize": True}),
    "AdamW of a group": (torch.optim.AdamW, {"groups": [no_decay()], "betas": (0.5, 0.9), "eps": 1e-3}),
    "centered RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "plain RMSprop": (torch.optim.RMSprop, {"alpha": 0.9}),
}
UPDATES, WINDOW, SEEDS = 100, 2, (3, 3, 5)
RATES = (0.01, schedules.warmup_cosine(peak=0.02, warmup=10, total=UPDATES), 0.003)
DECAYS, FACTORS = (0.0, 0.01, schedules.linear(0.02, 0.0, UPDATES)), (1.0, 2.0, 0.5)
SCALE = LossScale(scale=512.0, interval=30)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Kept in train mode, so that it draws and gathers statistics."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(IN, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, OUT)
        )
        return model.to(dtype)


def make_step(model: nn.Module, rule: Optimizer, window: int = WINDOW) -> Chain:
    return chain(
        Forward(model, supervised(F.cross_entropy, measures={"accuracy": accuracy})),
        ScaledBackward(),
        Accumulate(window),
        ClipByGlobalNorm(0.3),
        MaybeStep(rule),
        EmitEvents(micro_batches=True),
    )


def make_ensemble(rule: Optimizer, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Ensemble, nn.Module]:
    model = make_model(dtype)
    given = {"seeds": SEEDS, "rates": RATES, "weight_decays": DECAYS, "loss_weights": FACTORS, **settings}
    return ensemble(make_step(model, rule), **given), model


def single(several: Ensemble, number: int, batches: list[Any], sinks: Any = (), scale: LossScale = SCALE) -> Run:
    """The run of one member by itself: its step, over a model of its own that is initialised with its seed."""
    step = several.steps[number]
    forward: Any = step["Forward"]
    model = initialise(copy.deepcopy(forward.model), seed=SEEDS[number])
    step = step.replace("Forward", Forward(model, forward.loss))
    return fold(step, init(step, model, seed=SEEDS[number], loss_scale=scale), batches, sinks=sinks)


def assert_member_equals(run: Run, several: Ensemble, number: int, alone: Run, rtol: float) -> None:
    own = several.member(run.state, number)
    for field in ("params", "buffers", "optimizer", "window"):
        what = f"member {number} against the single run, {field}"
        assert_records_equal(getattr(own, field), getattr(alone.state, field), rtol=rtol, what=what)
    for field in ("progress", "loss_scale", "rng", "slots", "rate_factor"):
        assert getattr(own, field) == getattr(alone.state, field), field


class Kept:
    """A sink that keeps what is told of windows and micro-batches."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, event: Event) -> None:
        if isinstance(event, (MicroBatchDone, UpdateDone, UpdateSkipped, LossScaleChanged)):
            self.events.append(event)

    def close(self) -> None:
        pass

    def of(self, part: str | None) -> list[dict[str, Any]]:
        """What was told of one member; the clock and the run's count of updates are not the member's."""
        told = [{"is": type(event).__name__, **vars(event)} for event in self.events if event.part == part]
        return [{k: v for k, v in fields.items() if k not in ("part", "update", "time", "waited")} for fields in told]


def own_batches(n: int) -> list[tuple[Tensor, Tensor]]:
    """A row for each member; in some of the rows what makes every gradient NaN."""
    batches = [
        tuple(map(torch.stack, zip(*(make_batch(10 * i + j, 8) for j in range(3)), strict=True))) for i in range(n)
    ]
    for at, members in ((0, [2]), (6, [1]), (9, [1, 2]), (20, [0, 1, 2]), (21, [1]), (23, [0, 1, 2]), (30, [0])):
        batches[at][0][members, 3, 1] = math.inf
    return batches  # type: ignore[return-value]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_member_equals_its_single_run_over_100_updates(name: str) -> None:
    cls, settings = OPTIMIZERS[name]
    several, model = make_ensemble(Optimizer(cls, lr=0.01, **settings))
    batches = [make_batch(i, 8) for i in range(UPDATES * WINDOW)]
    run = fold(several, init(several, model, loss_scale=SCALE), batches)
    assert run.state.progress.updates == UPDATES
    for number in range(3):
        assert_member_equals(run, several, number, single(several, number, batches), rtol=1e-5)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *MORE])
def test_in_float64_they_are_nine_digits_close(name: str) -> None:
    cls, settings = {**OPTIMIZERS, **MORE}[name]
    several, model = make_ensemble(Optimizer(cls, lr=0.01, **settings), torch.float64)
    batches = [make_batch(i, 8, torch.float64) for i in range(30 * WINDOW)]
    run = fold(several, init(several, model, loss_scale=SCALE), batches)
    for number in range(3):
        assert_member_equals(run, several, number, single(several, number, batches), rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "donate"), [*((name, True) for name in OPTIMIZERS), ("AdamW", False)], ids=[*OPTIMIZERS, "AdamW, copying"]
)
def test_each_member_skips_scales_and_tells_on_its_own(name: str, donate: bool) -> None:
    cls, settings = OPTIMIZERS[name]
    several, model = make_ensemble(Optimizer(cls, lr=0.01, **settings), batches="own")
    batches, seen = own_batches(41), Kept()
    scale = attrs.evolve(SCALE, interval=3)
    run = fold(several, init(several, model, loss_scale=scale), batches, sinks=[seen], donate=donate)
    assert [run.state.slots[f"member {i}"].skipped for i in range(3)] == [3, 4, 4]
    assert (run.state.progress.updates, run.state.progress.skipped) == (19, 2)
    for number in range(3):
        kept = Kept()
        alone = single(several, number, [(x[number], y[number]) for x, y in batches], [kept], scale)
        assert_member_equals(run, several, number, alone, rtol=1e-5)
        ours, theirs = seen.of(f"member {number}"), kept.of(None)
        assert len(ours) == len(theirs)
        for mine, own in zip(ours, theirs, strict=True):
            assert mine.keys() == own.keys()
            for field, value in own.items():
                assert mine[field] == approximately(value), (mine["is"], field)


def approximately(value: Any) -> Any:
    """The value up to rounding, through mappings and pairs."""
    if isinstance(value, dict):
        return {name: approximately(entry) for name, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(map(approximately, value))
    return pytest.approx(value, rel=1e-4, nan_ok=True) if isinstance(value, float) else value

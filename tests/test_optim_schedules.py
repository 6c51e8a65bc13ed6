"""Settings that follow a schedule: by the count of updates alone, checked before they are used, and no state."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lion_pytorch import Lion

from pipeline import Group, Optimizer, fold, init, no_decay, run_of, schedules
from pipeline.errors import SettingError
from pipeline.optim import layer_decay
from pipeline.testing import assert_records_equal
from tests.laws.cases import make_batches, make_model, make_step

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW

RULES: dict[str, Callable[[], Optimizer]] = {
    "SGD": lambda: Optimizer(SGD, lr=0.1, momentum=schedules.linear(0.0, 0.9, 6), weight_decay=lambda n: n / 100),
    "fused AdamW": lambda: Optimizer(AdamW, lr=0.1, betas=lambda n: (0.8 + n / 100, 0.99)),
    "groups": lambda: Optimizer(
        AdamW,
        lr=0.1,
        weight_decay=schedules.linear(0.5, 0.0, 8),
        groups=[Group("*.bias", betas=lambda n: (n / 9, 0.9))],
    ),
}


@pytest.mark.parametrize("cut", range(9))
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_run_goes_on_at_its_count(rule: Callable[[], Optimizer], cut: int) -> None:
    model = make_model("mlp")
    state = init(make_step(model, 1, rule()), model)
    straight = fold(make_step(model, 1, rule()), state.copy(), make_batches(8)).state
    middle = fold(make_step(model, 1, rule()), state.copy(), make_batches(8)[:cut]).state.copy()
    rest = fold(make_step(model, 1, rule()), middle, make_batches(8)[cut:]).state
    assert_records_equal(rest.params, straight.params)
    assert_records_equal(rest.optimizer, straight.optimizer)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_in_place_and_copying_give_the_same_bits(rule: Callable[[], Optimizer]) -> None:
    ends = []
    for donate in (True, False):
        model = make_model("mlp")
        step = make_step(model, 1, rule())
        ends.append(fold(step, init(step, model), make_batches(8), donate=donate).state)
    assert_records_equal(ends[0].params, ends[1].params)
    assert_records_equal(ends[0].optimizer, ends[1].optimizer)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_what_a_schedule_gave_is_no_state(rule: Callable[[], Optimizer]) -> None:
    model = make_model("mlp")
    step = make_step(model, 1, rule())
    optimizer = fold(step, init(step, model), make_batches(4)).state.optimizer
    assert not optimizer.numbers
    assert not [key for key in optimizer.tensors if key.startswith("group ")]


def test_a_step_with_a_constant_goes_on_from_one_with_a_schedule() -> None:
    ends = []
    for first in (RULES["SGD"](), Optimizer(SGD, lr=0.0, momentum=0.9)):
        model = make_model("mlp")
        state = fold(make_step(model, 1, first), init(make_step(model, 1, first), model), make_batches(3)).state
        state = fold(make_step(model, 1, Optimizer(SGD, lr=0.1, momentum=0.5)), state, make_batches(3)).state
        ends.append(state.optimizer.numbers)
    assert ends == [{}, {}]


def settings_at(rule: Optimizer, count: int) -> dict[str, dict[str, Any]]:
    """What torch's optimizer has in its groups in update number `count`."""
    seen: dict[str, dict[str, Any]] = {}

    class Spy(rule.cls):  # type: ignore[name-defined, misc]
        def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            seen.update({g["name"]: {k: v for k, v in g.items() if k != "params"} for g in self.param_groups})

    model = make_model("mlp")
    step = make_step(model, 1, Optimizer(Spy, lr=rule.lr, groups=rule.groups, **rule.settings))
    fold(step, init(step, model), make_batches(count + 1))
    return seen


def test_a_groups_own_value_stands_against_the_optimizers_schedule_and_the_other_way_round() -> None:
    decay = schedules.linear(0.8, 0.0, 8)
    rule = Optimizer(
        AdamW,
        lr=0.1,
        weight_decay=decay,
        eps=1e-3,
        groups=[no_decay(), Group("2.*", name="head", eps=lambda n: 1 / (n + 1))],
    )
    seen = settings_at(rule, 3)
    assert [(seen[name]["weight_decay"], seen[name]["eps"]) for name in ("default", "no decay", "head")] == [
        (0.5, 1e-3), (0.0, 1e-3), (0.5, 0.25)
    ]  # fmt: skip


def test_layers_may_have_schedules_of_their_own() -> None:
    groups = layer_decay(["0.*", "2.*"], lr=0.1, decay=0.5, momentum=schedules.linear(0.5, 0.9, 4))
    seen = settings_at(Optimizer(SGD, lr=0.1, groups=groups), 2)
    assert [(seen[name]["lr"], seen[name]["momentum"]) for name in ("0.*", "2.*")] == [(0.05, 0.7), (0.1, 0.7)]


def test_a_class_that_takes_a_function_gets_it_from_a_schedule_of_functions() -> None:
    class Shaped(SGD):
        def __init__(self, params: Any, lr: float, shape: Callable[[float], float] = abs) -> None:
            super().__init__(params, lr=lr)
            for group in (self.defaults, *self.param_groups):
                group["shape"] = shape

    assert settings_at(Optimizer(Shaped, lr=0.1, shape=lambda _: math.sqrt), 1)["default"]["shape"] is math.sqrt


class TestRefusals:
    """Each says whose setting it is, when, what came, and what the class has against it."""

    @pytest.mark.parametrize(
        ("rule", "message"),
        [
            (
                Optimizer(SGD, lr=0.1, momentum=lambda n: 0.5 - n / 4),
                r"Optimizer's settings in update 3 must be what SGD takes, got \{'momentum': -0.25\}\. "
                r"It says: Invalid momentum value: -0\.25",
            ),
            (
                Optimizer(AdamW, lr=0.1, betas=lambda n: (0.9, 0.7 + n / 10)),
                r"Optimizer's settings in update 3 .*It says: Invalid beta parameter at index 1: 1\.0",
            ),
            (
                Optimizer(AdamW, lr=0.1, groups=[Group("*.bias", weight_decay=lambda n: 3.0 - n if n < 3 else -1.0)]),
                r"Group '\*\.bias''s settings in update 3 must be what AdamW takes, got \{'weight_decay': -1\.0\}",
            ),
            (
                Optimizer(SGD, lr=0.1, weight_decay=lambda n: math.inf if n == 3 else 0.0),
                r"Optimizer\.weight_decay in update 3 must be finite, got inf",
            ),
            (
                Optimizer(AdamW, lr=0.1, betas=lambda n: (0.9, math.nan if n == 3 else 0.9)),
                r"Optimizer\.betas in update 3 must be finite, got \(0\.9, nan\)",
            ),
            (
                Optimizer(SGD, lr=lambda n: 0.3 - n / 8),
                r"Optimizer\.lr in update 3 must be a number, 0 or more and finite, got -0\.07",
            ),
            (
                Optimizer(SGD, lr=lambda n: "0.1" if n == 3 else 0.1),  # type: ignore[arg-type, return-value]
                r"Optimizer\.lr in update 3 must be a number, 0 or more and finite, got '0\.1'",
            ),
            (
                Optimizer(SGD, lr=0.1, momentum=lambda n: np.float64("nan") if n == 3 else 0.5),
                r"Optimizer\.momentum in update 3 must be finite, got .*nan",
            ),
            (
                Optimizer(SGD, lr=0.1, weight_decay=lambda n: torch.tensor(math.nan) if n == 3 else 0.0),
                r"Optimizer\.weight_decay in update 3 must be finite, got tensor\(nan\)",
            ),
            (
                Optimizer(SGD, lr=0.1, groups=[Group("0.*", lr=lambda n: math.nan if n == 3 else 0.0)]),
                r"Group '0\.\*'\.lr in update 3 must be a number, 0 or more and finite, got nan",
            ),
        ],
        ids=[
            "momentum",
            "betas",
            "group",
            "infinite",
            "half nan",
            "below 0",
            "text",
            "numpy nan",
            "torch nan",
            "group rate",
        ],
    )
    @pytest.mark.parametrize("donate", [True, False])
    def test_of_a_value_at_its_update_and_the_run_up_to_there_is_whole(
        self, rule: Optimizer, message: str, donate: bool
    ) -> None:
        model, twin = make_model("mlp"), make_model("mlp")
        step, three = make_step(model, 1, rule), make_step(twin, 1, rule)
        with pytest.raises(SettingError, match=message) as failure:
            fold(step, init(step, model), make_batches(6), donate=donate)
        expected = fold(three, init(three, twin), make_batches(3)).state
        assert_records_equal(run_of(failure.value).state.params, expected.params)

    @pytest.mark.parametrize(
        ("rule", "message"),
        [
            (Optimizer(SGD, lr=0.1, momentum=schedules.linear(0, 0.9, 9), nesterov=True), "Nesterov momentum requires"),
            (Optimizer(SGD, lr=0.1, weight_decay=lambda n: n - 1.0), "Invalid weight_decay value: -1.0"),
            (Optimizer(SGD, lr=0.1, groups=[Group("0.*", momentum=-1.0)]), "Group '0.*''s settings in update 0"),
            (Optimizer(Lion, lr=0.0), "got {'lr': 0.0}. It says: AssertionError"),
            (Optimizer(AdamW, lr=0.1, betas=0.9), "It says: "),
            (Optimizer(Lion, lr=0.1, decoupled_weight_decay=lambda n: n > 3), "a constant: Lion reads it only once"),
        ],
        ids=["nesterov", "at once", "a group's constant", "no reason given", "no pair", "read once"],
    )
    def test_by_init(self, rule: Optimizer, message: str) -> None:
        model = make_model("mlp")
        with pytest.raises(SettingError) as failure:
            init(make_step(model, 1, rule), model)
        assert message in str(failure.value)


def test_a_rate_of_0_from_the_first_to_the_last_is_fine() -> None:
    model = make_model("mlp")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step = make_step(model, 1, Optimizer(SGD, lr=schedules.constant(0.0), momentum=lambda n: n / 10))
    fold(step, init(step, model), make_batches(4))
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])

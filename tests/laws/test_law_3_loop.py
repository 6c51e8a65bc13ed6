"""Law 3: the chain equals the plain PyTorch loop that a careful person would write.

Bit for bit (float32, CPU) for windows of 1 and 4 where the factor is multiplied into the gradients. Where it rides in
the optimizer's fused kernel, or in a window of 3, the mean gradient is rounded once more or elsewhere: g·(1/3) against
g/3 summed. The relative error of a gradient is then a few 2^-24, and that of an update of the optimizers here
likewise: n updates differ by a few n units in the last place of the largest parameter. This does not hold for a
parameter whose gradient is zero but for rounding (a bias in front of BatchNorm) under Adam, which divides by it: there
any two ways to sum the same gradient part, in torch alone too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lion_pytorch import Lion
from prodigyopt import Prodigy
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import Group, Optimizer, apply, fold, init, no_decay, schedules
from pipeline.errors import LawError
from pipeline.records import Rng
from pipeline.testing import assert_matches_loop, assert_records_equal
from tests.laws.cases import MODELS, make_batches, make_model, make_step

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
}
CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "ASGD": (torch.optim.ASGD, {"t0": 2}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Lion": (Lion, {"weight_decay": 0.1}),
    "Prodigy": (Prodigy, {"d0": 0.1}),
}
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
EACH = [
    pytest.param(cls, {**settings, **how}, id=f"{name}, {implementation}")
    for name, (cls, settings) in CLASSES.items()
    for implementation, how in IMPLEMENTATIONS.items()
    if how.keys() <= inspect.signature(cls).parameters.keys()
]
UPDATES, LR, MAX_NORM = 12, 1e-2, 0.3
SCHEDULE = schedules.warmup_cosine(peak=LR, warmup=3, total=UPDATES)
A_FEW = 8
"""The bound where roundings differ: units in the last place of the largest parameter, an update."""

Loop = Callable[[nn.Module, list[Any]], None]


def plain_loop(optimizer_name: str, window: int, clip: bool, scheduled: bool, **settings: Any) -> Loop:
    """What a careful person would write."""
    cls, defaults = OPTIMIZERS[optimizer_name]
    return loop_of(cls, window, clip, scheduled, **defaults, **settings)


def loop_of(cls: type[torch.optim.Optimizer], window: int, clip: bool, scheduled: bool, **settings: Any) -> Loop:
    """The same for any class."""

    def loop(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
        optimizer = cls(model.parameters(), lr=LR, **settings)
        updates = 0
        for i, (x, y) in enumerate(batches):
            torch.default_generator.manual_seed(Rng(0).key(i))
            loss = F.cross_entropy(model(x), y) / window
            loss.backward()
            if (i + 1) % window == 0:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                if scheduled:
                    for group in optimizer.param_groups:
                        group["lr"] = SCHEDULE(updates)
                optimizer.step()
                optimizer.zero_grad()
                updates += 1

    return loop


def chain_of(model: nn.Module, name: str, window: int, clip: bool, scheduled: bool, **settings: Any) -> Any:
    cls, defaults = OPTIMIZERS[name]
    rule = Optimizer(cls, lr=SCHEDULE if scheduled else LR, **defaults, **settings)
    return make_step(model, window, rule, MAX_NORM if clip else None)


@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
@pytest.mark.parametrize("clip", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("model_name", MODELS)
def test_bit_for_bit(model_name: str, name: str, window: int, clip: bool, scheduled: bool) -> None:
    model = make_model(model_name)
    step = chain_of(model, name, window, clip, scheduled, fused=False)
    loop = plain_loop(name, window, clip, scheduled, fused=False)
    before = torch.get_rng_state()
    try:
        assert_matches_loop(step, model, make_batches(UPDATES * window), loop)
    finally:
        torch.set_rng_state(before)


@pytest.mark.parametrize(("window", "fused"), [(3, False), (1, True), (3, True), (4, True)])
@pytest.mark.parametrize("clip", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("model_name", MODELS)
def test_within_the_stated_bound(model_name: str, name: str, clip: bool, window: int, fused: bool) -> None:
    if fused and model_name == "unused" and name == "SGD with momentum":
        fused = False  # torch's own fused kernel fails where a parameter gets its first gradient late
    model = make_model(model_name)
    step = chain_of(model, name, window, clip, True, fused=fused)
    loop = plain_loop(name, window, clip, True, fused=fused)
    bound = A_FEW * UPDATES * torch.finfo(torch.float32).eps
    before = torch.get_rng_state()
    try:
        assert_matches_loop(step, model, make_batches(UPDATES * window), loop, rtol=bound)
    finally:
        torch.set_rng_state(before)


def is_fused(cls: type[torch.optim.Optimizer], settings: dict[str, Any]) -> bool:
    chosen = cls in (torch.optim.Adam, torch.optim.AdamW) and "foreach" not in settings
    return settings.get("fused", chosen)


@pytest.mark.parametrize(("cls", "settings"), EACH)
def test_any_class_in_each_of_its_implementations(cls: type[torch.optim.Optimizer], settings: dict[str, Any]) -> None:
    fused = is_fused(cls, settings)
    model = make_model("mlp")
    step = make_step(model, 4, Optimizer(cls, lr=SCHEDULE, **settings), MAX_NORM)
    how = {"fused": True} if fused else {}
    loop = loop_of(cls, 4, True, True, **{**settings, **how})
    bound = A_FEW * UPDATES * torch.finfo(torch.float32).eps if fused else 0.0
    assert_matches_loop(step, model, make_batches(UPDATES * 4), loop, rtol=bound)


@pytest.mark.parametrize(("cls", "settings"), [case for case in EACH if is_fused(*case.values)])
def test_any_fused_class_without_a_factor_bit_for_bit(
    cls: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    model = make_model("mlp")
    step = make_step(model, 1, Optimizer(cls, lr=SCHEDULE, **settings), None)
    loop = loop_of(cls, 1, False, True, **{**settings, "fused": True})
    assert_matches_loop(step, model, make_batches(UPDATES), loop)


MOVING: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "momentum and decay of SGD": (
        torch.optim.SGD,
        {"momentum": schedules.linear(0.5, 0.95, 8), "weight_decay": schedules.cosine(0.1, 0.0, 10)},
    ),
    "a momentum that starts and ends": (torch.optim.SGD, {"momentum": lambda n: 0.0 if n % 5 < 2 else 0.9}),
    "betas and decay of AdamW, fused": (
        torch.optim.AdamW,
        {"betas": lambda n: (0.8 + n / 100, 0.99), "weight_decay": schedules.linear(0.5, 0.1, 12)},
    ),
    "betas and eps of Adam": (
        torch.optim.Adam,
        {"betas": lambda n: [0.95 - n / 100, 0.9 + n / 1000], "eps": lambda n: 10.0**-n, "fused": False},
    ),
    "betas of NAdam": (torch.optim.NAdam, {"betas": lambda n: (0.8 + n / 100, 0.99)}),
    "alpha of RMSprop": (torch.optim.RMSprop, {"alpha": schedules.linear(0.5, 0.99, 12), "foreach": True}),
    "dampening in fused SGD": (torch.optim.SGD, {"momentum": 0.9, "dampening": lambda n: n / 20, "fused": True}),
    "betas of Lion": (Lion, {"betas": lambda n: (0.8 + n / 100, 0.99), "weight_decay": lambda n: n / 10}),
}


@pytest.mark.parametrize("name", MOVING)
def test_any_setting_follows_a_schedule_as_if_the_loop_had_set_it(name: str) -> None:
    cls, settings = MOVING[name]
    moving = {key: value for key, value in settings.items() if callable(value)}
    start = {**settings, **{key: schedule(0) for key, schedule in moving.items()}}
    if "fused" in name:
        start["fused"] = True

    def loop(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
        vectors, matrices = ([p for p in model.parameters() if (p.ndim < 2) == small] for small in (True, False))
        optimizer = cls([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=LR, **start)
        for n, (x, y) in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = SCHEDULE(n)
                group.update({key: schedule(n) for key, schedule in moving.items() if key != "weight_decay"})
            if "weight_decay" in moving:
                optimizer.param_groups[0]["weight_decay"] = moving["weight_decay"](n)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    model = make_model("mlp")
    step = make_step(model, 1, Optimizer(cls, lr=SCHEDULE, groups=[no_decay()], **settings), None)
    assert_matches_loop(step, model, make_batches(UPDATES), loop)


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("model_name", MODELS)
def test_bit_for_bit_over_a_functional_call_too(model_name: str, name: str, window: int) -> None:
    model, twin = make_model(model_name), make_model(model_name)
    step = chain_of(model, name, window, True, True, fused=False)
    batches = make_batches(UPDATES * window)
    with torch.random.fork_rng():
        plain_loop(name, window, True, True, fused=False)(twin, batches)
    end = fold(step, init(step, model).copy(), batches).state
    assert_records_equal({**end.params, **end.buffers}, {**dict(twin.named_parameters()), **dict(twin.named_buffers())})


def test_parameter_groups_get_their_own_settings_as_in_torch() -> None:
    def loop(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
        vectors = [p for p in model.parameters() if p.ndim < 2]
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0, "lr": 3 * LR}]
        optimizer = torch.optim.AdamW(groups, lr=LR, fused=False)
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    model = make_model("mlp")
    groups = [Group("*.bias", weight_decay=0.0, lr=3 * LR)]
    rule = Optimizer(torch.optim.AdamW, lr=LR, weight_decay=0.5, groups=groups, fused=False)
    assert_matches_loop(make_step(model, 1, rule, None), model, make_batches(10), loop)


def test_the_optimizer_state_is_torchs_own_by_name() -> None:
    model, twin = make_model("mlp"), make_model("mlp")
    step = chain_of(model, "AdamW", 1, False, False, fused=False)
    run = fold(step, init(step, model), make_batches(5))
    plain_loop_optimizer = torch.optim.AdamW(twin.parameters(), lr=LR, weight_decay=0.1, fused=False)
    for x, y in make_batches(5):
        plain_loop_optimizer.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        plain_loop_optimizer.step()
    for name, param in twin.named_parameters():
        assert_records_equal(run.state.optimizer.of(name), dict(plain_loop_optimizer.state[param]), what=name)


def test_apply_by_hand_equals_the_fold() -> None:
    model = make_model("dropout")
    step = chain_of(model, "Adam", 2, True, True)
    state = init(step, model)
    by_hand = state.copy()
    for batch in make_batches(6):
        by_hand, _ = apply(step, by_hand, batch)
    run = fold(step, state, make_batches(6))
    assert_records_equal(by_hand.params, run.state.params)
    assert_records_equal(by_hand.optimizer, run.state.optimizer)


def test_the_assertion_finds_a_loop_that_forgets_the_window() -> None:
    model = make_model("mlp")
    step = chain_of(model, "AdamW", 4, True, True, fused=False)
    with pytest.raises(LawError, match="fold against loop"):
        assert_matches_loop(step, model, make_batches(8), plain_loop("AdamW", 1, True, True, fused=False))

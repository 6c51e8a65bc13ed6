"""Another optimizer, another grouping or a larger model in mid-run: the state goes on by name."""

from typing import Any

import attrs
import pytest
import torch
from prodigyopt import Prodigy
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import Group, Optimizer, TrainState, fold, init, schedules
from pipeline.records import OptimizerState
from pipeline.tensors import Tensors
from pipeline.testing import assert_records_equal
from tests.laws.cases import make_batches, make_model, make_step

RATE = schedules.warmup_cosine(peak=0.05, warmup=2, total=12)
RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "SGD, foreach": (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    "AdamW": (torch.optim.AdamW, {"fused": False}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5}),
}
each_rule = pytest.mark.parametrize(("cls", "settings"), RULES.values(), ids=RULES)


def grown(model: nn.Module) -> nn.Sequential:
    """The same layers, the very same parameters, and one layer more."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(*model.children(), nn.Tanh(), nn.Linear(3, 3))


def torchs(cls: type[torch.optim.Optimizer], settings: dict[str, Any], own_group: bool) -> dict[str, Tensor]:
    """The plain loop: `add_param_group` after the fourth of eight updates."""
    model: nn.Module = make_model("mlp")
    optimizer = cls(model.parameters(), lr=0.0, **settings)
    for n, (x, y) in enumerate(make_batches(8)):
        if n == 4:
            model = grown(model)
            optimizer.add_param_group({"params": list(model[4].parameters())})
        for group in optimizer.param_groups:
            group["lr"] = RATE(n)
        if n >= 4 and own_group:
            optimizer.param_groups[1].update(lr=0.01, weight_decay=0.0)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return dict(model.named_parameters())


def going_on(state: TrainState, fresh: TrainState) -> TrainState:
    """The run of `state`, in the model of `fresh`."""
    return attrs.evolve(state, params=fresh.params, buffers=fresh.buffers)


@pytest.mark.parametrize("own_group", [True, False], ids=["a group of its own", "the default group"])
@each_rule
def test_a_model_that_grew_goes_on_as_with_add_param_group(
    cls: type[torch.optim.Optimizer], settings: dict[str, Any], own_group: bool
) -> None:
    model = make_model("mlp")
    first = make_step(model, 1, Optimizer(cls, lr=RATE, **settings), None)
    state = fold(first, init(first, model), make_batches(8)[:4]).state
    before = {key: value.clone() for key, value in state.optimizer.tensors.items()}
    larger = grown(model)
    groups = [Group("4.*", lr=0.01, weight_decay=0.0)] if own_group else []
    second = make_step(larger, 1, Optimizer(cls, lr=RATE, groups=groups, **settings), None)
    start = going_on(state, init(second, larger))
    assert_records_equal(dict(start.optimizer.tensors), before)
    end = fold(second, start, make_batches(8)[4:]).state
    assert_records_equal(dict(end.params), torchs(cls, settings, own_group))
    assert end.progress.updates == 8
    assert end.optimizer.of("4.weight").keys() == end.optimizer.of("0.weight").keys()


def test_layers_that_have_moved_are_found_under_their_new_names() -> None:
    ends = []
    for wrapped in (True, False):
        model = make_model("mlp")
        rule = Optimizer(torch.optim.AdamW, lr=RATE)
        first = make_step(model, 1, rule)
        state = fold(first, init(first, model), make_batches(8)[:4]).state
        outer = nn.Sequential(model) if wrapped else model
        second = make_step(outer, 1, rule)
        start = going_on(state, init(second, outer))
        if wrapped:
            renamed = {f"0.{key}": value for key, value in state.optimizer.tensors.items()}
            start = attrs.evolve(start, optimizer=OptimizerState(Tensors(renamed)))
        ends.append(fold(second, start, make_batches(8)[4:]).state)
    assert list(ends[0].params) == [f"0.{name}" for name in ends[1].params]
    assert_records_equal(list(ends[0].params.values()), list(ends[1].params.values()))


@each_rule
def test_parameters_that_are_gone_take_their_state_with_them(
    cls: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    model = grown(make_model("mlp"))
    first = make_step(model, 1, Optimizer(cls, lr=RATE, **settings))
    state = fold(first, init(first, model), make_batches(3)).state
    smaller = nn.Sequential(*list(model.children())[:3])
    second = make_step(smaller, 1, Optimizer(cls, lr=RATE, **settings))
    end = fold(second, going_on(state, init(second, smaller)), make_batches(3)).state
    assert {key.rpartition("/")[0] for key in end.optimizer.tensors} == set(end.params)


def test_what_is_counted_by_group_goes_on_by_the_groups_name() -> None:
    def run(groups: list[Group]) -> dict[str, Any]:
        model = make_model("mlp")
        first = make_step(model, 1, Optimizer(Prodigy, lr=1.0))
        state = fold(first, init(first, model), make_batches(3)).state
        second = make_step(model, 1, Optimizer(Prodigy, lr=1.0, groups=groups))
        return dict(fold(second, state, make_batches(2)).state.optimizer.numbers)

    assert run([])["group default/k"] == 5
    numbers = run([Group("2.*", name="head")])
    assert (numbers["group default/k"], numbers["group head/k"]) == (5, 2)


@pytest.mark.parametrize("donate", [True, False])
def test_frozen_for_a_while_its_state_waits(donate: bool) -> None:
    model = make_model("mlp")
    step = make_step(model, 1, Optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5))
    state = fold(step, init(step, model), make_batches(3), donate=donate).state
    waiting = {key: value.clone() for key, value in state.optimizer.of("0.weight").items()}
    value = state.params["0.weight"].detach().clone()
    state.params["0.weight"].requires_grad_(False)
    state = fold(step, state, make_batches(3), donate=donate).state
    assert torch.equal(state.params["0.weight"], value)
    assert_records_equal(state.optimizer.of("0.weight"), waiting)
    state.params["0.weight"].requires_grad_()
    state = fold(step, state, make_batches(1), donate=donate).state
    assert state.optimizer.of("0.weight")["step"] == 4
    assert state.optimizer.of("0.bias")["step"] == 7

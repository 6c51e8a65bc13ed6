"""Compiled updates: one graph however rates and settings move, the numbers of the others, and nothing left behind."""

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from lion_pytorch import Lion
from prodigyopt import Prodigy
from torch._dynamo.utils import counters
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipeline import Group, Optimizer, apply, fold, init, schedules
from pipeline.errors import SettingError
from pipeline.testing import assert_records_equal
from tests.laws.cases import make_batches, make_model, make_step

# Torch's compiler loads what torch itself calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

UPDATES = 20
RATE = schedules.warmup_cosine(peak=1e-2, warmup=5, total=UPDATES)
MOVING: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": schedules.linear(0.6, 0.9, 20), "weight_decay": lambda n: (n + 1) / 100}),
    "AdamW": (torch.optim.AdamW, {"betas": lambda n: (0.8 + n / 200, 0.99), "weight_decay": lambda n: 0.3 - n / 100}),
    "AdamW, foreach": (torch.optim.AdamW, {"betas": lambda n: (0.8 + n / 200, 0.99), "foreach": True}),
    "Adam": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adadelta": (torch.optim.Adadelta, {"rho": schedules.linear(0.8, 0.9, 20)}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": schedules.linear(0.6, 0.9, 20), "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Lion": (Lion, {"betas": lambda n: (0.8 + n / 200, 0.99), "weight_decay": 0.1}),
}


def settings_of_torch() -> tuple[dict[str, Any], ...]:
    return torch._dynamo.config.get_config_copy(), torch._inductor.config.get_config_copy()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No graphs of another test and none for the next, and torch's own settings afterwards as before."""
    torch._dynamo.reset()
    counters.clear()
    before = settings_of_torch()
    yield
    assert settings_of_torch() == before
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def trained(rule: Optimizer, n: int = UPDATES, model_name: str = "mlp", **more: Any) -> Any:
    model = make_model(model_name)
    step = make_step(model, 1, rule)
    return fold(step, init(step, model), make_batches(n), **more).state


def both(cls: type[torch.optim.Optimizer], backend: bool | str, **settings: Any) -> None:
    compiled = trained(Optimizer(cls, lr=RATE, compiled=backend, **settings))
    plain = trained(Optimizer(cls, lr=RATE, **({"fused": False} if cls is torch.optim.Adam else {}), **settings))
    assert_records_equal(compiled.params, plain.params, rtol=1e-6)
    assert compiled.optimizer.tensors.keys() == plain.optimizer.tensors.keys()
    assert compiled.optimizer.numbers == plain.optimizer.numbers


@pytest.mark.parametrize("name", MOVING)
def test_twenty_updates_under_schedules_are_one_graph_and_the_same_numbers(name: str) -> None:
    cls, settings = MOVING[name]
    both(cls, "aot_eager", **settings)
    assert graphs() == 1


def test_torchs_own_compiler_gives_the_same_numbers() -> None:
    cls, settings = MOVING["AdamW"]
    both(cls, True, **settings)
    assert graphs() == 1


def test_groups_each_with_a_rate_and_a_setting_of_their_own() -> None:
    groups = [Group("*.bias", lr=schedules.linear(0.3, 0.1, 20), momentum=0.0), Group("2.*", momentum=lambda n: 0.6)]
    both(torch.optim.SGD, "aot_eager", momentum=schedules.linear(0.6, 0.9, 20), groups=groups)
    assert graphs() == 1


def test_a_lowered_rate_compiles_nothing_again() -> None:
    model = make_model("mlp")
    step = make_step(model, 1, Optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, compiled="eager"))
    state = init(step, model)
    for factor in (1.0, 0.5, 0.3, 0.01):
        state = fold(step, attrs.evolve(state, rate_factor=factor), make_batches(3)).state
    assert graphs() == 1


def test_where_a_setting_is_0_or_passes_a_half_it_is_compiled_once_more() -> None:
    both(torch.optim.SGD, "aot_eager", momentum=lambda n: (0.0, 0.4, 0.7)[min(n // 5, 2)])
    assert graphs() == 4  # no momentum, the first update with a little and the next, and with much


@pytest.mark.parametrize("model_name", ["frozen", "unused", "tied"])
def test_a_parameter_without_a_gradient_is_left_alone(model_name: str) -> None:
    rules = [Optimizer(torch.optim.SGD, lr=RATE, momentum=0.9, compiled=backend) for backend in ("aot_eager", False)]
    compiled, plain = (trained(rule, 8, model_name) for rule in rules)
    assert_records_equal(compiled.params, plain.params, rtol=1e-6)
    assert compiled.optimizer.tensors.keys() == plain.optimizer.tensors.keys()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_in_place_and_copying_give_the_same_bits_from_one_graph_each(backend: str) -> None:
    rule = Optimizer(torch.optim.SGD, lr=RATE, momentum=schedules.linear(0.6, 0.9, 20), compiled=backend)
    in_place = trained(rule)
    assert graphs() == 1
    copied = trained(rule, donate=False)
    assert graphs() == 2
    assert_records_equal(copied.params, in_place.params)
    assert_records_equal(copied.optimizer, in_place.optimizer)


def test_it_goes_on_from_a_copy_and_from_an_uncompiled_run() -> None:
    model = make_model("mlp")
    rules = [Optimizer(torch.optim.Adam, lr=RATE, foreach=False, compiled=backend) for backend in ("eager", False)]
    compiled, plain = (make_step(model, 1, rule) for rule in rules)
    state = init(compiled, model)
    straight = fold(compiled, state.copy(), make_batches(8)).state
    for first, rtol in ((compiled, 0.0), (plain, 1e-6)):
        middle = fold(first, state.copy(), make_batches(8)[:4]).state.copy()
        rest = fold(compiled, middle, make_batches(8)[4:]).state
        assert_records_equal(rest.params, straight.params, rtol=rtol)
        assert_records_equal(rest.optimizer, straight.optimizer, rtol=10 * rtol)


def test_apply_gives_the_same_twice() -> None:
    model = make_model("mlp")
    step = make_step(model, 1, Optimizer(torch.optim.SGD, lr=RATE, momentum=0.9, compiled="eager"))
    state, _ = apply(step, init(step, model), make_batches(1)[0])
    first, second = (apply(step, state, make_batches(2)[1])[0] for _ in range(2))
    assert_records_equal(first.params, second.params)


def test_masters_are_stepped_compiled() -> None:
    ends = []
    for backend in ("aot_eager", False):
        model = make_model("mlp", dtype=torch.bfloat16)
        step = make_step(model, 1, Optimizer(torch.optim.SGD, lr=RATE, momentum=0.9, masters=True, compiled=backend))
        ends.append(fold(step, init(step, model), [(x.bfloat16(), y) for x, y in make_batches(6)]).state)
    assert_records_equal(ends[0].optimizer, ends[1].optimizer, rtol=1e-6)


def test_what_an_optimizer_counts_in_its_group_and_in_itself_goes_on() -> None:
    class Counting(torch.optim.SGD):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr=lr)
            self.calls = 0

        def step(self, closure: Any = None) -> None:
            self.calls += 1
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
                for p in group["params"]:
                    if p.grad is not None:
                        with torch.no_grad():
                            p.sub_(p.grad * group["lr"] / self.calls)

    both(Counting, "aot_eager")


def test_many_compiled_optimizers_do_not_stand_in_each_others_way() -> None:
    for n in range(9):
        trained(Optimizer(torch.optim.SGD, lr=0.1, momentum=0.6 + n / 100, compiled="eager"), 2)
    assert graphs() == 9


class TestRefusals:
    def refused(self, message: str, rule: Optimizer, n: int = 2) -> None:
        with pytest.raises(SettingError, match=message):
            trained(rule, n)

    def test_of_what_torch_cannot_compile_as_one_graph(self) -> None:
        self.refused(
            "torch cannot compile the step of Prodigy as one graph, got 'eager'. It says: .*data-dependent",
            Optimizer(Prodigy, lr=1.0, compiled="eager"),
        )

    def test_of_a_class_with_hooks(self) -> None:
        class Hooked(torch.optim.SGD):
            def __init__(self, *args: Any, **more: Any) -> None:
                super().__init__(*args, **more)
                self.register_step_post_hook(lambda *_: None)

        self.refused("hooks on the step of Hooked, or it wraps another", Optimizer(Hooked, lr=0.1, compiled="eager"))

    def test_of_hooks_on_all_optimizers(self) -> None:
        handle = register_optimizer_step_post_hook(lambda *_: None)
        try:
            self.refused("there are hooks on all optimizers", Optimizer(torch.optim.SGD, lr=0.1, compiled="eager"))
        finally:
            handle.remove()

    def test_of_what_would_be_compiled_at_each_update(self) -> None:
        class Drifting(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                for group in self.param_groups:
                    group["pull"] = group.get("pull", 0.1) * 0.9
                    for p in group["params"]:
                        with torch.no_grad():
                            p.mul_(1 - group["pull"])

        self.refused("changes too often", Optimizer(Drifting, lr=0.1, compiled="eager"), n=20)

    def test_of_a_backend_that_there_is_not(self) -> None:
        self.refused("Invalid backend: 'nothing'", Optimizer(torch.optim.SGD, lr=0.1, compiled="nothing"))

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"compiled": True, "fused": True}, "Optimizer.fused must be left out where `compiled` is given"),
            ({"compiled": 1}, "Optimizer.compiled must be True, False or the name of a backend"),
        ],
    )
    def test_when_built(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(SettingError, match=message):
            Optimizer(torch.optim.SGD, lr=0.1, **settings)


def test_it_prints_as_it_was_written() -> None:
    rule = Optimizer(torch.optim.SGD, lr=0.1, compiled="eager", momentum=schedules.constant(0.9))
    assert repr(rule) == "Optimizer(SGD, lr=0.1, compiled='eager', momentum=Constant(rate=0.9))"

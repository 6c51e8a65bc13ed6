"""Optimizers as pure functions: any class, groups, settings, and state by name."""

import functools
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipeline import (
    Accumulate,
    Forward,
    Frame,
    Group,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    Tensors,
    TrainState,
    apply,
    chain,
    fold,
    init,
    supervised,
)
from pipeline._running import Running
from pipeline.errors import DuplicateNameError, OptimizerMismatchError, SettingError
from pipeline.optim import layer_decay, no_decay
from pipeline.records import OptimizerState
from pipeline.testing import assert_records_equal, frame
from tests.laws.cases import make_batches, make_model, make_step

CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"fused": False}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True, "fused": False}),
}


class CountingSGD(torch.optim.Optimizer):
    """A third party's: a plain number and a None in the state, and a counter in the group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["steps"] = state.get("steps", 0) + 1
                    state["extra"] = None
                    p.sub_(p.grad * group["lr"] / (group["k"] * state["steps"]))


@pytest.mark.parametrize("name", [*CLASSES, "third party"])
def test_in_place_and_copying_give_the_same_bits_and_the_same_state(name: str) -> None:
    cls, settings = CLASSES.get(name, (CountingSGD, {}))
    ends = []
    for donate in (True, False):
        model = make_model("mlp")
        step = make_step(model, 2, Optimizer(cls, lr=0.01, **settings))
        ends.append(fold(step, init(step, model), make_batches(8), donate=donate).state)
    assert_records_equal(ends[0], ends[1])
    assert len(ends[0].optimizer.tensors) + len(ends[0].optimizer.numbers) > 0 or name == "SGD"


@pytest.mark.parametrize("cut", range(9))
def test_a_third_partys_numbers_go_on_where_they_were(cut: int) -> None:
    model = make_model("mlp")
    step = make_step(model, 1, Optimizer(CountingSGD, lr=0.1))
    state = init(step, model)
    straight = fold(step, state.copy(), make_batches(8)).state
    middle = fold(step, state.copy(), make_batches(8)[:cut]).state.copy()
    rest = fold(step, middle, make_batches(8)[cut:]).state
    assert_records_equal(rest.params, straight.params)
    assert_records_equal(rest.optimizer, straight.optimizer)
    assert straight.optimizer.numbers["group default/k"] == 8
    assert straight.optimizer.of("0.weight")["steps"] == 8


class Sometimes(nn.Module):
    """The second layer gets gradients only while it is used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.is_used = nn.Linear(4, 4), nn.Linear(4, 4), True

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        return self.sometimes(x) if self.is_used else x


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"amsgrad": True},
        {"maximize": True},
        {"betas": lambda n: (0.9 - n / 10, 0.99)},
        {"amsgrad": lambda n: n != 3},
    ],
)
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("used", [[True] * 5, [True, True, False, True, True], [False, True, True, True, True]])
def test_the_fused_kernel_is_torchs_own_step_whichever_parameters_have_gradients(
    cls: type[torch.optim.Adam], settings: dict[str, Any], used: list[bool]
) -> None:
    model, plain = Sometimes(), Sometimes()
    bare = [param for name, param in plain.named_parameters() if name.endswith("bias")]
    shaped = [param for name, param in plain.named_parameters() if name.endswith("weight")]
    moved = {key: value for key, value in settings.items() if callable(value)}
    constant = {key: value(0) if key in moved else value for key, value in settings.items()}
    groups = [{"params": shaped}, {"params": bare, "weight_decay": 0.0}]
    torchs = cls(groups, lr=0.01, weight_decay=0.1, fused=True, **constant)
    rule = Optimizer(cls, lr=0.01, groups=[Group("*.bias", weight_decay=0.0)], weight_decay=0.1, **settings)
    step = chain(Forward(model, lambda m, x: m(x).square().mean()), ScaledBackward(), Accumulate(), MaybeStep(rule))
    batches = [torch.randn(3, 4) for _ in used]

    def stream() -> Iterator[Tensor]:
        for batch, is_used in zip(batches, used, strict=True):
            model.is_used = is_used
            yield batch

    state = fold(step, init(step, model), stream()).state
    for n, (batch, plain.is_used) in enumerate(zip(batches, used, strict=True)):
        plain(batch).square().mean().backward()
        for group in torchs.param_groups:
            group.update({key: schedule(n) for key, schedule in moved.items()})
        torchs.step()
        torchs.zero_grad()
    for name, param in plain.named_parameters():
        assert torch.equal(state.params[name], param)
        for key, value in torchs.state[param].items():
            assert torch.equal(state.optimizer.of(name)[key], value)


def test_frozen_parameters_stay_and_unused_ones_get_no_state() -> None:
    for name in ("frozen", "unused"):
        model = make_model(name)
        still = {k: p.detach().clone() for k, p in model.named_parameters() if "never" in k or not p.requires_grad}
        step = make_step(model, 1, Optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5))
        run = fold(step, init(step, model), make_batches(6))
        for key, value in still.items():
            assert torch.equal(dict(model.named_parameters())[key], value)
            assert run.state.optimizer.of(key) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_precision_steps_with_gradients_of_its_own(dtype: torch.dtype) -> None:
    for settings in ({}, {"fused": False}):
        given = frame({"w": torch.ones(2, dtype=dtype, requires_grad=True)}, sums={"w": [4.0, 8.0]}, ready=True)
        given = given.having(update_factor=0.25)
        after = MaybeStep(Optimizer(torch.optim.SGD, lr=0.5, **settings))(given).state.params["w"]
        assert after.dtype == dtype
        assert after.tolist() == [0.5, 0.0]


def test_rates_follow_the_schedule_by_group_and_by_applied_updates() -> None:
    rule = Optimizer(
        torch.optim.SGD,
        lr=lambda n: 1.0 / (1 + n),
        groups=[Group("*.bias", lr=0.5), Group(lambda name, p: p.ndim == 2, name="matrices")],
    )
    assert rule.rates(3) == {"default": 0.25, "*.bias": 0.5, "matrices": 0.25}
    assert "groups=" in repr(rule)


def test_each_parameter_belongs_to_the_first_group_that_matches() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    rule = Optimizer(torch.optim.SGD, lr=0.0, groups=[Group("0.*", lr=1.0), Group("*.bias", lr=2.0)])
    optimizer, names = rule.build(init(make_step(model, 1, rule), model).params)
    assert [(g["name"], len(g["params"]), g["lr"]) for g in optimizer.param_groups] == [
        ("default", 1, 0.0), ("0.*", 2, 1.0), ("*.bias", 1, 2.0)
    ]  # fmt: skip
    assert names == ["1.weight", "0.weight", "0.bias", "1.bias"]


def test_groups_of_one_label_are_refused() -> None:
    even, odd = (lambda name, p: name < "1"), (lambda name, p: name >= "1")
    for groups in ([Group(even), Group(odd)], [Group("*", name="default")]):
        with pytest.raises(DuplicateNameError, match="group"):
            Optimizer(torch.optim.SGD, lr=0.1, groups=groups)


def test_settings_come_from_the_rule_and_counters_from_the_state() -> None:
    model = make_model("mlp")
    rules = [Optimizer(torch.optim.AdamW, lr=0.1, groups=[Group("*.bias", weight_decay=wd)]) for wd in (0.0, 0.7)]
    steps = [make_step(model, 1, rule) for rule in rules]
    state = fold(steps[0], init(steps[0], model), make_batches(2)).state.copy()
    fresh = attrs.evolve(state, optimizer=OptimizerState(state.optimizer.tensors))
    ends = [fold(steps[1], given.copy(), make_batches(2)).state.params for given in (state, fresh)]
    assert_records_equal(ends[0], ends[1])
    assert not state.optimizer.numbers


@pytest.mark.parametrize("donate", [True, False])
def test_sparse_gradients_train_as_dense_ones(donate: bool) -> None:
    ends = []
    for sparse in (True, False):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Linear(3, 1))
        step = make_step(model, 2, Optimizer(torch.optim.SGD, lr=0.1), 0.5)
        step = step.replace("Forward", Forward(model, lambda m, ids: m(ids).pow(2).mean()))
        ids = [torch.tensor([1, 1, 3]), torch.tensor([0, 1, 1]), torch.tensor([2])]
        ends.append(fold(step, init(step, model), ids, donate=donate).state.params)
    assert_records_equal(ends[0], ends[1], rtol=1e-6)


class ListSGD(torch.optim.SGD):
    """A third party's: a list of tensors in its state."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    history = self.state[p].setdefault("history", [])
                    history.append(p.grad.clone())
                    with torch.no_grad():
                        p.sub_(sum(history) * group["lr"])


def test_lists_in_the_state_are_no_way_round_immutability() -> None:
    model = make_model("mlp")
    step = make_step(model, 1, Optimizer(ListSGD, lr=0.1))
    state = fold(step, init(step, model), make_batches(2)).state.copy()
    first, second = (apply(step, state, make_batches(3)[2])[0] for _ in range(2))
    assert_records_equal(first.params, second.params)
    assert len(state.optimizer.of("0.weight")["history"]) == 2


@pytest.mark.parametrize("capturable", [False, True])
def test_entries_from_the_host_go_to_the_device_of_their_parameters_and_step_counts_only_if_captured(
    capturable: bool,
) -> None:
    there = Tensors({"w": torch.ones(2, device="meta"), "narrow": torch.ones(2, device="meta", dtype=torch.bfloat16)})
    entries = Tensors({f"{name}/{key}": torch.zeros(2) for name in there for key in ("exp_avg", "step", "master")})
    numbers = {"w/history": [torch.zeros(2), 1]}
    rule = Optimizer(torch.optim.AdamW, lr=0.1, capturable=capturable, masters=True)
    running = Running(rule, there, entries, numbers)
    state = {name: running.optimizer.state[running.stepped[name]] for name in there}
    count = "meta" if capturable else "cpu"
    assert [str(own["exp_avg"].device) for own in state.values()] == ["meta", "meta"]
    assert [str(own["step"].device) for own in state.values()] == [count, count]
    assert str(state["w"]["history"][0].device) == "meta"
    assert str(running.masters["narrow"].device) == "meta"


def test_an_optimizer_that_finds_another_ones_entries_says_so() -> None:
    model = make_model("mlp")
    first, second = (make_step(model, 1, Optimizer(cls, lr=0.1)) for cls in (torch.optim.Adagrad, torch.optim.AdamW))
    state = fold(first, init(first, model), make_batches(2)).state
    with pytest.raises(OptimizerMismatchError, match="begin them anew"):
        fold(second, state.copy(), make_batches(2))
    anew = attrs.evolve(state.copy(), optimizer=OptimizerState())
    assert fold(second, anew, make_batches(2)).state.progress.updates == 4


ADAMW, SGD = (torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})
AMSGRAD, ADAGRAD = (torch.optim.AdamW, {"amsgrad": True}), (torch.optim.Adagrad, {})
OTHERS = {"momentum": (ADAMW, SGD), "AdamW": (SGD, ADAMW), "amsgrad": (ADAMW, AMSGRAD), "Adagrad": (ADAMW, ADAGRAD)}


@pytest.mark.parametrize(("one", "other"), OTHERS.values(), ids=OTHERS)
def test_before_it_changes_anything_an_optimizer_misses_what_another_did_not_keep(one: Any, other: Any) -> None:
    model = make_model("mlp")
    first, second = (make_step(model, 1, Optimizer(cls, lr=0.1, **settings)) for cls, settings in (one, other))
    state = fold(first, init(first, model), make_batches(2)).state
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(OptimizerMismatchError, match=f"{other[0].__name__} finds no"):
        fold(second, state, make_batches(2))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


class Noisy(torch.optim.SGD):
    """Draws in its step."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().step(closure)
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.add_(torch.rand_like(param), alpha=0.01)


def test_what_an_optimizer_draws_is_the_same_for_entries_that_were_read() -> None:
    model = make_model("mlp")
    step = make_step(model, 1, Optimizer(Noisy, lr=0.1, momentum=0.9))
    straight = fold(step, init(step, model), make_batches(2)).state
    step = make_step(model := make_model("mlp"), 1, Optimizer(Noisy, lr=0.1, momentum=0.9))
    first = fold(step, init(step, model), make_batches(1)).state
    again = fold(step, first.copy(), make_batches(2)[1:]).state
    assert_records_equal(again.params, straight.params)


def test_a_momentum_that_has_ended_is_no_mismatch_nor_one_that_begins() -> None:
    model = make_model("mlp")
    for moving in (lambda n: 0.9 if n < 2 else 0.0, lambda n: 0.0 if n < 2 else 0.9):
        step = make_step(model, 1, Optimizer(torch.optim.SGD, lr=0.1, momentum=moving))
        state = fold(step, init(step, model), make_batches(2)).state
        assert fold(step, state.copy(), make_batches(3)).state.progress.updates == 5


def test_a_key_error_of_the_optimizers_own_is_left_as_it_is() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            raise KeyError("mine")

    model = make_model("mlp")
    step = make_step(model, 1, Optimizer(Broken, lr=0.1))
    with pytest.raises(KeyError, match="mine"):
        fold(step, init(step, model), make_batches(1))


def test_hooks_on_all_optimizers_and_a_step_that_wraps_another_are_called() -> None:
    called: list[str] = []

    class Wrapping(torch.optim.SGD):
        @functools.wraps(torch.optim.SGD.step)
        def step(self, *args: Any, **more: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            called.append("own")
            return super().step(*args, **more)

    model = make_model("mlp")
    step = make_step(model, 1, Optimizer(Wrapping, lr=0.1))
    fold(step, init(step, model), make_batches(2))
    assert called == ["own"] * 2
    handle = register_optimizer_step_post_hook(lambda *_: called.append("global"))
    try:
        plain = make_step(model, 1, Optimizer(torch.optim.AdamW, lr=0.1))
        fold(plain, init(plain, model), make_batches(2))
    finally:
        handle.remove()
    assert called == ["own"] * 2 + ["global"] * 2


def test_hooks_of_the_class_are_called() -> None:
    called: list[int] = []

    class Hooked(torch.optim.SGD):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.register_step_post_hook(lambda *_: called.append(1))

    model = make_model("mlp")
    step = make_step(model, 1, Optimizer(Hooked, lr=0.1))
    fold(step, init(step, model), make_batches(3))
    assert len(called) == 3


def test_a_window_in_which_no_item_counts_is_skipped_and_told() -> None:
    def counted(output: Tensor, target: Tensor) -> int:
        return int((target != -100).sum())

    model = make_model("mlp")
    forward = Forward(model, supervised(nn.functional.cross_entropy, weight=counted))
    step = make_step(model, 1).replace("Forward", forward)
    state = init(step, model)
    before = state.copy()
    x, y = make_batches(1)[0]
    run = fold(step, state, [(x, torch.full_like(y, -100))])
    assert (run.state.progress.updates, run.state.progress.skipped) == (0, 1)
    assert_records_equal(run.state.params, before.params)
    assert fold(step, run.state, [(x, y)]).state.progress.updates == 1


class TestMasters:
    """Narrow parameters stepped through float32 masters."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("settings", [{}, {"fused": False}])
    @pytest.mark.parametrize("donate", [True, False])
    def test_they_equal_a_float32_run_rounded(self, dtype: torch.dtype, settings: dict[str, Any], donate: bool) -> None:
        given = torch.linspace(-1, 1, 8)
        grads = [torch.randn(8, generator=torch.Generator().manual_seed(i)) * 1e-2 for i in range(50)]
        narrow = frame({"w": given.to(dtype).requires_grad_()}).state
        wide = frame({"w": given.to(dtype).float().requires_grad_()}).state
        ends = []
        for state, masters in ((narrow, True), (wide, False)):
            rule = MaybeStep(Optimizer(torch.optim.AdamW, lr=1e-4, masters=masters, **settings))
            now = state.owned() if donate else state
            for grad in grads:
                window = frame(sums={"w": grad.clone()}).state.window
                now = attrs.evolve(now, window=window)
                now = rule(Frame(now).having(ready=True)).state
            ends.append(now)
        assert_records_equal(ends[0].optimizer.of("w")["master"].detach(), ends[1].params["w"].detach())
        assert_records_equal(ends[0].params["w"].detach(), ends[1].params["w"].detach().to(dtype))
        assert ends[0].params["w"].dtype == dtype

    def test_small_updates_add_up_where_they_round_away_without(self) -> None:
        moved = []
        for masters in (True, False):
            rule = MaybeStep(Optimizer(torch.optim.SGD, lr=1e-3, masters=masters))
            state = frame({"w": torch.ones(1, dtype=torch.bfloat16, requires_grad=True)}).state
            for _ in range(100):
                window = frame(sums={"w": [1.0]}).state.window
                state = rule(Frame(attrs.evolve(state, window=window)).having(ready=True)).state
            moved.append(float(state.params["w"].detach()))
        assert moved == [pytest.approx(0.9, abs=0.004), 1.0]

    def test_they_go_on_from_a_copy_of_the_state(self) -> None:
        model = make_model("mlp", dtype=torch.bfloat16)
        batches = [(x.bfloat16(), y) for x, y in make_batches(8)]
        step = make_step(model, 1, Optimizer(torch.optim.AdamW, lr=1e-3, masters=True))
        state = init(step, model)
        straight = fold(step, state.copy(), batches).state
        middle = fold(step, state.copy(), batches[:3]).state.copy()
        rest = fold(step, middle, batches[3:]).state
        assert_records_equal(rest.params, straight.params)
        assert_records_equal(rest.optimizer, straight.optimizer)
        bound = fold(step, state, batches).state
        assert_records_equal(bound.params, straight.params)

    def test_they_are_in_the_group_of_the_parameter_that_they_step(self) -> None:
        narrow = Group(lambda _, tensor: tensor.dtype == torch.bfloat16, lr=0.0, name="narrow")
        rule = MaybeStep(Optimizer(torch.optim.SGD, lr=1.0, masters=True, groups=[narrow]))
        state = frame({"a": torch.ones(1, dtype=torch.bfloat16, requires_grad=True), "b": [1.0]}).state
        for _ in range(2):  # the second goes on from masters that another run has made
            window = frame(sums={"a": [1.0], "b": [1.0]}).state.window
            state = rule(Frame(attrs.evolve(state.copy(), window=window)).having(ready=True)).state
        assert [float(param.detach()) for param in state.params.flat] == [1.0, -1.0]

    @pytest.mark.parametrize("donate", [True, False])
    def test_what_was_set_elsewhere_stays_until_the_parameter_is_updated_and_is_what_it_goes_on_from(
        self, donate: bool
    ) -> None:
        rule = MaybeStep(Optimizer(torch.optim.SGD, lr=2.0**-10, masters=True))
        given = {name: torch.ones(2, dtype=torch.bfloat16, requires_grad=True) for name in "ab"}
        state = frame(given).state.owned() if donate else frame(given).state

        def updated(state: TrainState, **sums: list[float]) -> TrainState:
            window = frame(sums=sums).state.window
            return rule(Frame(attrs.evolve(state, window=window)).having(ready=True)).state

        def masters(state: TrainState) -> dict[str, list[float]]:
            return {name: state.optimizer.of(name)["master"].tolist() for name in "ab"}

        state = updated(state, a=[1.0, 1.0], b=[1.0, 1.0])
        small = 1 - 2**-10  # what bfloat16 rounds to 1
        assert masters(state) == {"a": [small, small], "b": [small, small]}
        with torch.no_grad():
            state.params["b"][0] = 3.0
        state = updated(state, a=[1.0, 1.0])
        assert state.params["b"].tolist() == [3.0, 1.0]
        assert masters(state)["b"] == [small, small]
        state = updated(state, a=[1.0, 1.0], b=[1.0, 1.0])
        assert masters(state) == {"a": [1 - 3 * 2**-10] * 2, "b": [3 - 2**-10, 1 - 2 * 2**-10]}
        assert state.params["b"].tolist() == [3.0, 1.0]

    def test_two_optimizers_in_turn_do_not_undo_each_other(self) -> None:
        model = make_model("mlp", dtype=torch.bfloat16)
        rule = Optimizer(torch.optim.AdamW, lr=0.01, masters=True)
        step = make_step(model, 1, rule).insert_before("Forward", turn)
        state = init(step, model)
        own = [OptimizerState(), OptimizerState()]
        for n, (x, y) in enumerate(make_batches(6)):
            before = {name: p.detach().clone() for name, p in state.params.items()}
            state = fold(step, attrs.evolve(state, optimizer=own[n % 2]), [(x.bfloat16(), y)]).state
            own[n % 2] = state.optimizer
            for name, p in state.params.items():
                assert torch.equal(p, before[name]) == (name.startswith("0") == bool(n % 2)), (n, name)


def turn(given: Frame) -> Frame:
    """The first layer in even updates, the rest in odd ones."""
    for name, p in given.state.params.items():
        p.requires_grad_(name.startswith("0") != bool(given.began.updates % 2))
    return given


def test_no_decay_and_layer_decay_are_groups() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    rule = Optimizer(torch.optim.AdamW, lr=1.0, weight_decay=0.5, groups=[no_decay("0.*")])
    optimizer, _ = rule.build(init(lambda f: f, model).params)
    assert [(g["name"], len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups] == [
        ("default", 2, 0.5), ("no decay", 5, 0.0)
    ]  # fmt: skip
    groups = layer_decay(["0.*", "1.*", "2.*", "3.*"], lr=lambda n: 1.0 / (n + 1), decay=0.5)
    assert Optimizer(torch.optim.SGD, lr=9.0, groups=groups).rates(1) == {
        "default": 9.0, "0.*": 0.0625, "1.*": 0.125, "2.*": 0.25, "3.*": 0.5
    }  # fmt: skip
    with pytest.raises(SettingError):
        layer_decay(["a"], lr=1.0, decay=0.0)
    with pytest.raises(SettingError, match="above 0 and at most 1"):
        layer_decay(["a"], lr=1.0, decay="half")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

"""UpdateInBackward against the chain of ScaledBackward, Accumulate and MaybeStep whose place it takes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    ClipByGlobalNorm,
    EmitEvents,
    Forward,
    Frame,
    Group,
    Loss,
    LossScale,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    Tensors,
    TrainState,
    UpdateInBackward,
    chain,
    fold,
    init,
    repeat,
    run_of,
    scan,
    schedules,
    supervised,
)
from pipeline.errors import FrameError, MissingFieldError, NoGraphError, OrderError, SettingError, StaleStateError
from pipeline.events import Event, UpdateDone, UpdateSkipped
from pipeline.records import OptimizerState, Scalar
from pipeline.testing import assert_records_equal, frame
from pipeline.transform import Chain
from pipeline.transforms import UpdateRule, global_norm
from tests.laws.cases import MODELS, make_batch, make_batches, make_model

RULES = {
    "SGD": Optimizer(torch.optim.SGD, lr=0.1),
    "SGD with momentum": Optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD fused": Optimizer(torch.optim.SGD, lr=0.1, fused=True),
    "Adam": Optimizer(torch.optim.Adam, lr=0.01, fused=False),
    "AdamW fused": Optimizer(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "Adafactor": Optimizer(torch.optim.Adafactor, lr=0.01),
    "AdamW foreach": Optimizer(torch.optim.AdamW, lr=0.01, foreach=True),
}
ADAM = RULES["AdamW fused"]

LOSS = supervised(F.cross_entropy)


def usual(model: nn.Module, rule: UpdateRule = ADAM, loss: Any = LOSS) -> Chain:
    return chain(Forward(model, loss), ScaledBackward(), Accumulate(), MaybeStep(rule), EmitEvents(micro_batches=True))


def in_backward(model: nn.Module, rule: UpdateRule = ADAM, loss: Any = LOSS) -> Chain:
    return chain(Forward(model, loss), UpdateInBackward(rule), EmitEvents(micro_batches=True))


Make = Callable[..., Chain]
both_ways = pytest.mark.parametrize("donate", [True, False], ids=["donated", "copied"])
both_places = pytest.mark.parametrize("bound", [True, False], ids=["bound", "functional"])


def end_of(
    step: Chain, state: TrainState, batches: Iterable[Any], *, donate: bool = True
) -> tuple[TrainState, list[Event]]:
    """The last state, and all events."""
    items = list(scan(step, state, batches, donate=donate, clock=lambda: 0.0))
    return items[-1][0], [event for _, events in items for event in events]


def compare(
    model_name: str,
    rule: UpdateRule,
    *,
    bound: bool = True,
    donate: bool = True,
    loss: Any = LOSS,
    batches: list[Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> TrainState:
    """Raise unless both ways end in the same state, to the bit, and tell the same; the state that they end in."""
    ends: list[tuple[TrainState, list[Event]]] = []
    for make in (usual, in_backward):
        model = make_model(model_name, dtype=dtype)
        step = make(model, rule, loss)
        state = init(step, model, seed=1)
        given = make_batches(7) if batches is None else batches
        ends.append(end_of(step, state if bound else state.copy(), given, donate=donate))
    assert_records_equal(ends[1], ends[0])
    return ends[1][0]


class TestTheSameBits:
    @both_ways
    @both_places
    @pytest.mark.parametrize("model_name", MODELS)
    def test_whatever_the_model(self, model_name: str, bound: bool, donate: bool) -> None:
        assert compare(model_name, ADAM, bound=bound, donate=donate).progress.updates == 7

    @both_ways
    @pytest.mark.parametrize("model_name", ["batchnorm", "unused"])
    @pytest.mark.parametrize("name", RULES)
    def test_whatever_the_optimizer(self, name: str, model_name: str, donate: bool) -> None:
        compare(model_name, RULES[name], donate=donate)

    @both_ways
    def test_whatever_the_rule(self, donate: bool) -> None:
        compare("mlp", SignDescent(), donate=donate)

    def test_with_groups_and_schedules_of_their_own(self) -> None:
        rule = Optimizer(
            torch.optim.AdamW,
            lr=schedules.warmup_cosine(peak=0.1, warmup=2, total=7),
            groups=[Group("*.bias", lr=schedules.linear(0.1, 0.0, 7), weight_decay=0.0)],
        )
        compare("mlp", rule)

    def test_with_two_updates_in_one_pass(self) -> None:
        rule = Optimizer(torch.optim.SGD, lr=schedules.linear(0.1, 0.0, 8))
        model = make_model("mlp")
        twice = repeat(2, chain(Forward(model, LOSS), UpdateInBackward(rule)))
        other = make_model("mlp")
        step = usual(other, rule)
        batches = make_batches(3)
        state = fold(chain(twice, EmitEvents()), init(twice, model), batches).state
        expected = fold(step, init(step, other), [batch for batch in batches for _ in range(2)]).state
        assert_records_equal(state, expected)

    @pytest.mark.parametrize("masters", [True, False])
    @both_ways
    def test_with_narrow_parameters(self, masters: bool, donate: bool) -> None:
        batches = [(x.bfloat16(), y) for x, y in make_batches(5)]
        rule = Optimizer(torch.optim.AdamW, lr=0.01, masters=masters)
        state = compare("mlp", rule, donate=donate, batches=batches, dtype=torch.bfloat16)
        assert ("0.weight/master" in state.optimizer.tensors) == masters

    def test_with_sparse_gradients(self) -> None:
        torch.manual_seed(0)
        ends = []
        for make in (usual, in_backward):
            model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
            nn.init.ones_(model[0].weight)
            nn.init.eye_(model[2].weight)
            nn.init.zeros_(model[2].bias)
            step = make(model, Optimizer(torch.optim.SGD, lr=0.1))
            batches = [(torch.tensor([[1, 1], [i, 3]]), torch.tensor([0, 2])) for i in range(4)]
            ends.append(end_of(step, init(step, model), batches))
        assert_records_equal(ends[1], ends[0])

    @pytest.mark.parametrize("weight", [5, torch.tensor(5.0)], ids=["host", "device"])
    def test_with_weighted_losses_and_measures(self, weight: Any) -> None:
        def loss(model: Any, batch: Any) -> Loss:
            each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
            return Loss.sum(each.sum(), weight, measures={"largest": (each.max(), 1.0)}, tokens=3)

        assert compare("mlp", ADAM, loss=loss).progress.tokens == 21

    @pytest.mark.parametrize("zero", [0, torch.tensor(0.0)], ids=["host", "device"])
    @both_ways
    def test_where_nothing_counts(self, zero: Any, donate: bool) -> None:
        state = compare("batchnorm", ADAM, loss=lambda m, b: Loss.sum(0 * m(b[0]).sum(), zero), donate=donate)
        assert (state.progress.updates, state.progress.skipped) == (0, 7)

    @both_ways
    def test_where_no_parameter_has_a_gradient(self, donate: bool) -> None:
        def loss(model: Any, batch: Any) -> Tensor:
            return batch[0].clone().requires_grad_().sum() + 0 * model(batch[0]).detach().sum()

        assert compare("batchnorm", ADAM, loss=loss, donate=donate).progress.skipped == 7

    def test_with_a_rate_that_a_monitor_has_lowered(self) -> None:
        ends = []
        for make in (usual, in_backward):
            model = make_model("mlp")
            step = make(model)
            state = attrs.evolve(init(step, model), rate_factor=0.25)
            ends.append(end_of(step, state, make_batches(3)))
        assert_records_equal(ends[1], ends[0])

    def test_with_activations_computed_again(self) -> None:
        ends = []
        for recompute in ((), ("0", "2")):
            model = make_model("mlp")
            step = in_backward(model).replace("Forward", Forward(model, LOSS, recompute=recompute))
            ends.append(fold(step, init(step, model), make_batches(5)).state)
        assert_records_equal(ends[1], ends[0])

    def test_of_a_norm_whose_squares_overflow(self) -> None:
        def loss(model: Any, batch: Any) -> Tensor:
            return 1e25 * model(batch[0]).mean()

        compare("mlp", RULES["SGD"], loss=loss, batches=make_batches(1))


class TestOneStateForBothWays:
    @both_ways
    @both_places
    @pytest.mark.parametrize("masters", [False, True])
    def test_either_goes_on_from_the_other(self, bound: bool, donate: bool, masters: bool) -> None:
        dtype = torch.bfloat16 if masters else torch.float32
        rule = Optimizer(torch.optim.AdamW, lr=0.01, masters=masters)
        batches = [(x.to(dtype), y) for x, y in make_batches(8)]
        ends = []
        for ways in ((usual,) * 4, (usual, in_backward, usual, in_backward)):
            model = make_model("tied", dtype=dtype)
            state = init(ways[0](model, rule), model)
            state = state if bound else state.copy()
            for way, two in zip(ways, (batches[:2], batches[2:4], batches[4:6], batches[6:]), strict=True):
                state = fold(way(model, rule), state, two, donate=donate).state
            ends.append(state)
        assert_records_equal(ends[1], ends[0])
        assert ends[1].progress.updates == 8

    def test_its_keys_are_those_of_maybe_step(self) -> None:
        model = make_model("mlp")
        step = in_backward(model)
        state = fold(step, init(step, model), make_batches(1)).state
        assert sorted(state.optimizer.of("0.weight")) == ["exp_avg", "exp_avg_sq", "step"]

    def test_a_copy_of_the_state_goes_on_alike(self) -> None:
        model = make_model("mlp")
        step = in_backward(model)
        state = fold(step, init(step, model), make_batches(3)).state
        copied = state.copy()
        ends = [fold(step, start, make_batches(3, seed=1)).state for start in (state, copied)]
        assert_records_equal(ends[0], ends[1])
        with pytest.raises(StaleStateError):
            state.optimizer.tensors  # noqa: B018

    def test_a_tied_parameter_is_one_entry_updated_once(self) -> None:
        model = make_model("tied")
        step = in_backward(model)
        state = fold(step, init(step, model), make_batches(4)).state
        assert float(state.optimizer.of("first.weight")["step"]) == 4
        assert not state.optimizer.of("second.weight")

    def test_a_parameter_without_a_gradient_has_no_entry(self) -> None:
        model = make_model("frozen")
        step = in_backward(model)
        state = fold(step, init(step, model), make_batches(2)).state
        assert not state.optimizer.of("0.weight")
        assert state.optimizer.of("2.weight")


@attrs.frozen
class SignDescent:
    """An update rule of a user's own, without state."""

    def init(self, state: TrainState) -> TrainState:
        return state

    def rates(self, count: int) -> Mapping[str, float]:
        return {"default": 0.1}

    def update(
        self,
        params: Tensors,
        grads: Tensors,
        state: OptimizerState,
        *,
        rates: Mapping[str, float],
        factor: Scalar,
        count: int,
    ) -> tuple[Tensors, OptimizerState]:
        params = params.writable(count)
        with torch.no_grad():
            for name, grad in grads.items():
                params[name].sub_(rates["default"] * (grad * factor).sign())
        return params, state


def gradients_alive(make: Make) -> list[int]:
    """How many gradients are alive whenever one has just been completed, in the second of two updates."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
    alive: list[weakref.ref[Any]] = []
    counts: list[int] = []

    def look(param: Tensor) -> None:
        assert param.grad is not None
        alive.append(weakref.ref(param.grad.untyped_storage()))
        counts.append(sum(ref() is not None for ref in alive))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    step = make(model)
    fold(step, init(step, model), make_batches(2))
    return counts[len(counts) // 2 :]


class TestMemory:
    def test_one_gradient_is_alive_at_a_time(self) -> None:
        assert gradients_alive(in_backward) == [1] * 10

    def test_the_probe_sees_them_all_under_maybe_step(self) -> None:
        assert gradients_alive(usual) == list(range(1, 11))

    @pytest.mark.parametrize("rule", [ADAM, SignDescent()], ids=["Optimizer", "own rule"])
    def test_no_gradient_and_no_hook_is_left_behind(self, rule: Any) -> None:
        model = make_model("mlp")
        step = in_backward(model, rule)
        for _ in scan(step, init(step, model), make_batches(3)):
            assert all(p.grad is None for p in model.parameters())
            assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())

    def test_a_gradient_of_before_is_not_counted(self) -> None:
        ends = []
        for left in (False, True):
            model = make_model("mlp")
            step = in_backward(model)
            if left:
                F.cross_entropy(model(make_batch(9)[0]), make_batch(9)[1]).backward()
            ends.append(fold(step, init(step, model), make_batches(1)).state)
        assert_records_equal(ends[1], ends[0])

    def test_the_buffers_of_before_are_let_go_of_with_the_window(self) -> None:
        model = make_model("batchnorm")
        step = in_backward(model)
        closed = step(Frame(init(step, model), make_batch(0))).closed
        assert closed is not None
        assert closed.buffers is None
        assert closed.micro_batches == 1

    def test_nothing_is_kept_from_update_to_update(self) -> None:
        model = make_model("batchnorm")
        step = in_backward(model)
        graphs: list[weakref.ref[Any]] = []

        def loss(module: Any, batch: Any) -> Tensor:
            assert not any(ref() is not None for ref in graphs)
            value = LOSS(module, batch).value
            graphs.append(weakref.ref(value))
            return value

        step = step.replace("Forward", Forward(model, loss))
        fold(step, init(step, model), make_batches(5))
        assert len(graphs) == 5


def bad(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0] * math.inf, batch[1]


def flat(model: Any, batch: Any) -> Tensor:
    """A finite loss whose gradient is not: the slope of a root at 0."""
    return (0 * model(batch[0])).abs().sqrt().mean()


class TestWhatIsNotFinite:
    @both_ways
    def test_a_loss_that_is_not_skips_the_update(self, donate: bool) -> None:
        model = make_model("batchnorm")
        step = in_backward(model)
        state, _ = end_of(step, init(step, model), make_batches(2))
        kept = state.copy()
        after, events = end_of(step, state, [bad(make_batch(5))], donate=donate)
        for place in ("params", "buffers", "optimizer", "window"):
            assert_records_equal(getattr(after, place), getattr(kept, place), what=place)
        (skipped,) = (event for event in events if isinstance(event, UpdateSkipped))
        assert (skipped.reason, skipped.micro_batch, skipped.parameter) == ("non-finite loss", 0, None)
        assert (skipped.skipped, skipped.in_row, skipped.update) == (1, 1, 2)
        assert math.isnan(skipped.grad_norm)
        more, _ = end_of(step, after, make_batches(1), donate=donate)
        assert (more.progress.updates, more.progress.skips_in_row) == (3, 0)

    @both_ways
    def test_a_gradient_that_is_not_is_told_and_goes_in(self, donate: bool) -> None:
        model = make_model("mlp")
        step = in_backward(model, loss=flat)
        state, events = end_of(step, init(step, model), make_batches(1), donate=donate)
        (done,) = (event for event in events if isinstance(event, UpdateDone))
        assert not math.isfinite(done.grad_norm)
        assert state.params["0.weight"].isnan().any()

    def test_a_loss_without_a_graph_is_refused_before_anything_changes(self) -> None:
        model = make_model("mlp")
        step = in_backward(model, loss=lambda m, b: m(b[0]).detach().mean())
        state = init(step, model)
        kept = state.copy()
        with pytest.raises(NoGraphError):
            end_of(step, state, make_batches(1), donate=False)
        assert_records_equal(state, kept)


class Within(torch.autograd.Function):
    """Runs a layer, and in its backward pass a backward pass of its own: as a reversible block does."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.layer(x), grads)
        return None, x.grad


class Reversible(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.first, self.layer, self.head, self.times = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3), times

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = Within.apply(self.layer, x)
        return self.head(x)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise ArithmeticError("on the way back")


class FailsHalfway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fails = nn.Linear(6, 6), nn.Linear(6, 3), False

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x)
        return self.second(Failing.apply(inner) if self.fails else inner)


class TestErrors:
    def test_an_error_on_the_way_back_leaves_no_hook_and_a_run_that_can_be_read(self) -> None:
        model = FailsHalfway()
        step = in_backward(model)
        state = fold(step, init(step, model), make_batches(2)).state
        kept = state.copy()
        model.fails = True
        with pytest.raises(ArithmeticError) as caught:
            fold(step, state, make_batches(1))
        after = run_of(caught.value).state
        assert after.progress.updates == 2
        assert not torch.equal(after.params["second.weight"], kept.params["second.weight"])
        assert torch.equal(after.params["first.weight"], kept.params["first.weight"])
        assert float(after.optimizer.of("second.weight")["step"]) == 3
        assert all(p.grad is None for p in model.parameters())
        assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())
        model.fails = False
        assert fold(step, after, make_batches(1)).state.progress.updates == 3

    def test_a_gradient_in_two_pieces_is_refused(self) -> None:
        once, twice = Reversible(1), Reversible(2)
        step = in_backward(once)
        assert fold(step, init(step, once), make_batches(1)).state.optimizer.of("layer.weight")
        step = in_backward(twice)
        with pytest.raises(FrameError, match=r"layer\.\w+ in two pieces"):
            fold(step, init(step, twice), make_batches(1))

    def test_a_loss_scale_is_refused(self) -> None:
        model = make_model("mlp")
        step = in_backward(model)
        with pytest.raises(SettingError, match="The loss scale under UpdateInBackward must be None, got LossScale"):
            init(step, model, loss_scale=LossScale())
        state = init(usual(model), model, loss_scale=LossScale())
        with pytest.raises(SettingError, match="bfloat16"):
            fold(step, state, make_batches(1))

    @pytest.mark.parametrize("wrong", [torch.optim.AdamW, torch.optim.SGD([nn.Parameter(torch.zeros(1))]), None])
    def test_a_torch_optimizer_is_refused(self, wrong: Any) -> None:
        with pytest.raises(SettingError, match=r"UpdateInBackward\.optimizer must be an Optimizer"):
            UpdateInBackward(wrong)

    def test_what_the_optimizer_refuses_is_refused_at_init(self) -> None:
        model = make_model("mlp")
        with pytest.raises(SettingError, match="Group 'embedding'"):
            init(in_backward(model, Optimizer(torch.optim.SGD, lr=0.1, groups=[Group("embedding")])), model)

    def test_a_transform_on_the_windows_gradients_is_refused(self) -> None:
        model = make_model("mlp")
        with pytest.raises(OrderError, match=r"ClipByGlobalNorm reads window\.grads"):
            in_backward(model).insert_after("UpdateInBackward", ClipByGlobalNorm(1.0))

    def test_it_is_refused_behind_those_whose_place_it_takes(self) -> None:
        model = make_model("mlp")
        for others in ([ScaledBackward()], [ScaledBackward(), Accumulate(2)]):
            step = in_backward(model).insert_before("UpdateInBackward", *others)
            with pytest.raises(MissingFieldError, match="in place of ScaledBackward, Accumulate and MaybeStep"):
                fold(step, init(step, model), make_batches(1))

    def test_an_open_window_is_refused(self) -> None:
        model = make_model("mlp")
        step = in_backward(model)
        with pytest.raises(MissingFieldError, match="an empty window"):
            step["UpdateInBackward"](frame({"w": [1.0]}, sums={"w": [1.0]}, loss=1.0))

    def test_a_frame_without_a_loss_is_refused(self) -> None:
        with pytest.raises(MissingFieldError, match="put it after Forward"):
            UpdateInBackward(ADAM)(frame({"w": [1.0]}))


class Counting(torch.optim.Optimizer):
    """Counts its steps by group, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["k"])


def test_an_optimizer_that_counts_by_group_is_refused() -> None:
    rule = Optimizer(Counting, lr=0.1)
    model = make_model("mlp")
    step = in_backward(model, rule)
    with pytest.raises(SettingError, match="one that keeps its state by parameter, got 'group default/k'"):
        fold(step, init(step, model), make_batches(1))
    other = make_model("mlp")
    state = fold(usual(other, rule), init(usual(other, rule), other), make_batches(1)).state
    kept = state.copy()
    with pytest.raises(SettingError, match="by parameter") as caught:
        fold(in_backward(other, rule), state, make_batches(1))
    after = run_of(caught.value).state
    assert_records_equal((after.params, after.optimizer), (kept.params, kept.optimizer))
    assert not any("have seen an update" in note for note in caught.value.__notes__)


def test_a_frame_by_hand_is_left_as_it_was() -> None:
    given = frame({"w": [3.0, 4.0], "unused": [1.0]})
    loss = (given.state.params["w"] ** 2).sum() / 2
    after: Frame = UpdateInBackward(Optimizer(torch.optim.SGD, lr=0.1))(given.having(loss=loss))
    assert_records_equal(given, frame({"w": [3.0, 4.0], "unused": [1.0]}))
    assert given.state.params["w"].grad is None
    assert_records_equal(dict(after.state.params), dict(frame({"w": [2.7, 3.6], "unused": [1.0]}).state.params))
    assert float(after.facts["grad_norm"]) == 5.0
    assert (after.applied, after.rates, after.ready) == (True, {"default": 0.1}, False)
    assert after.state.progress.updates == 1
    assert after.closed is not None
    assert (after.closed.micro_batches, float(after.closed.loss)) == (1, 12.5)


def test_it_prints_as_it_was_written() -> None:
    update = UpdateInBackward(Optimizer(torch.optim.SGD, lr=0.1))
    assert repr(update) == "UpdateInBackward(optimizer=Optimizer(SGD, lr=0.1))"
    assert update == UpdateInBackward(Optimizer(torch.optim.SGD, lr=0.1))


def test_the_norm_is_the_global_norm_of_the_gradient() -> None:
    model = make_model("batchnorm")
    twin = make_model("batchnorm")
    F.cross_entropy(twin(make_batch(0)[0]), make_batch(0)[1]).backward()
    expected = global_norm([p.grad for p in twin.parameters()])
    step = in_backward(model)
    _, events = end_of(step, init(step, model), [make_batch(0)])
    (done,) = (event for event in events if isinstance(event, UpdateDone))
    assert torch.equal(done.grad_norm, expected)

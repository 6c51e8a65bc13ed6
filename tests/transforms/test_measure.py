"""What the measuring transforms tell, against plain PyTorch by hand; and that they change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
    MeasureGradients,
    MeasureNoise,
    MeasureUpdates,
    Optimizer,
    ScaledBackward,
    TrainState,
    UpdateInBackward,
    chain,
    every,
    fold,
    init,
    scan,
    supervised,
)
from pipeline.errors import MissingFieldError, NotATransformError, OrderError, SettingError
from pipeline.events import UpdateDone, UpdateSkipped
from pipeline.testing import assert_records_equal, frame
from pipeline.transform import Chain, Transform
from pipeline.transforms import DropNonFinite
from tests.cases.probe import of
from tests.laws.cases import MODELS, make_batch, make_batches, make_model, make_step

both_ways = pytest.mark.parametrize("donate", [True, False], ids=["donated", "copied"])
SGD = Optimizer(torch.optim.SGD, lr=0.1)


class Deep(nn.Module):
    """Names of every shape: in nested modules, and a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6)) for _ in range(2))
        self.head, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.scale * self.head(x)


LAYERS: dict[int | None, Callable[[str], str]] = {
    None: lambda name: name,
    1: lambda name: name.split(".")[0],
    2: lambda name: name if name == "scale" else "head" if name.startswith("head") else name[: len("blocks.0")],
}


def deep() -> nn.Module:
    torch.manual_seed(0)
    return Deep()


def by_hand(kind: str, values: Mapping[str, Tensor], depth: int | None) -> dict[str, float]:
    """The norm of each layer, as if its tensors were one."""
    layers: dict[str, list[Tensor]] = {}
    for name, value in values.items():
        layers.setdefault(LAYERS[depth](name), []).append(value.detach().double().reshape(-1))
    return {f"{kind}/{layer}": float(torch.cat(parts).norm()) for layer, parts in layers.items()}


def of_kind(kind: str, facts: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in facts.items() if name.startswith(f"{kind}/")}


def gradients(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    names, params = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(F.cross_entropy(model(batch[0]), batch[1]), params)
    return dict(zip(names, found, strict=True))


def joined(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def updates(step: Chain, state: TrainState, batches: list[Any], donate: bool = True) -> list[UpdateDone]:
    return [e for _, events in scan(step, state, batches, donate=donate) for e in of(UpdateDone, events)]


def with_measures(model: nn.Module, window: int = 2) -> Chain:
    """The whole step with everything measured in it."""
    step = make_step(model, window, None, 0.5, MeasureNoise())
    step = step.insert_before("ClipByGlobalNorm", MeasureGradients())
    return step.replace("MaybeStep", MeasureUpdates(step["MaybeStep"]))


@both_ways
@pytest.mark.parametrize("name", MODELS)
def test_the_training_is_the_same_to_the_bit(name: str, donate: bool) -> None:
    ends: list[TrainState] = []
    for make in (make_step, with_measures):
        model = make_model(name)
        step = make(model, 2)
        ends.append(fold(step, init(step, model), make_batches(7), donate=donate).state)
    assert_records_equal(ends[1], ends[0])


def test_no_host_read_is_added_to_the_step() -> None:
    reads: list[int] = []
    for make in (make_step, with_measures):
        model = make_model("mlp")
        step = make(model, 2)
        state = init(step, model, loss_scale=LossScale(scale=8.0))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert len(list(scan(step, state, make_batches(8)))) == 10
        reads.append(sum(e.count for e in profile.key_averages() if e.key == "aten::_local_scalar_dense"))
    assert reads[1] == reads[0]


def no_host_read(transform: Transform, given: Frame) -> bool:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        transform(given)
    return not [e for e in profile.key_averages() if e.key in ("aten::_local_scalar_dense", "aten::item")]


class TestGradients:
    @pytest.mark.parametrize("depth", LAYERS)
    @pytest.mark.parametrize("scale", [None, 1024.0], ids=["unscaled", "scaled"])
    def test_they_are_the_norms_of_the_mean_gradient(self, scale: float | None, depth: int | None) -> None:
        model, batches = deep(), [make_batch(i, size) for i, size in enumerate((4, 1, 7))]
        step = make_step(model, 3, SGD, None).insert_after("Accumulate", MeasureGradients(depth=depth))
        expected = by_hand("grad_norm", gradients(model, joined(batches)), depth)
        state = init(step, model, loss_scale=None if scale is None else LossScale(scale=scale))
        (done,) = updates(step, state, batches)
        assert of_kind("grad_norm", done.facts) == pytest.approx(expected, rel=1e-5)
        assert math.hypot(*expected.values()) == pytest.approx(float(done.grad_norm), rel=1e-5)

    def test_behind_a_clip_they_are_what_it_leaves(self) -> None:
        for place, factor in (("Accumulate", 1.0), ("ClipByGlobalNorm", None)):
            model = deep()
            step = make_step(model, 2, SGD, 0.01).insert_after(place, MeasureGradients())
            expected = by_hand("grad_norm", gradients(model, joined(make_batches(2))), None)
            (done,) = updates(step, init(step, model), make_batches(2))
            assert float(done.clip_factor) < 1
            left = float(done.clip_factor) if factor is None else factor
            expected = {name: norm * left for name, norm in expected.items()}
            assert of_kind("grad_norm", done.facts) == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
    def test_of_every_kind_of_gradient(self, factor: Any) -> None:
        sparse = torch.sparse_coo_tensor(
            [[2, 0, 2]], torch.tensor([[3.0], [5.0], [9.0]]), (3, 1), check_invariants=True
        )
        sums = {
            "sparse": sparse,
            "complex": torch.tensor([3 + 4j, 0j]),
            "0-d": torch.tensor(-8.0),
            "empty": torch.zeros(0, 2),
            "large": torch.tensor([3e25, 4e25]),
            "double": torch.tensor([6.0, 8.0], dtype=torch.float64),
        }
        given = frame({**{name: [0.0] for name in sums}, "missing": [0.0]}, sums=sums, ready=True, update_factor=factor)
        norms = {"sparse": 13.0, "complex": 5.0, "0-d": 8.0, "empty": 0.0, "large": 5e25, "double": 10.0}
        expected = {f"grad_norm/{name}": norm / 4 for name, norm in norms.items()}
        facts = MeasureGradients()(given).facts
        assert of_kind("grad_norm", facts) == pytest.approx(expected, rel=1e-6)
        assert all(isinstance(value, Tensor) and value.ndim == 0 for value in facts.values())
        together = MeasureGradients(depth=1)(given).facts
        assert together.keys() == facts.keys()  # none of them belongs to a module

    def test_a_parameter_without_a_gradient_counts_for_nothing_in_its_layer(self) -> None:
        given = frame({"a.w": [0.0], "a.b": [0.0], "b.w": [0.0]}, sums={"a.w": [-3.0]}, ready=True)
        assert of_kind("grad_norm", MeasureGradients(depth=1)(given).facts) == {"grad_norm/a": 3.0}

    def test_in_every_nth_window_skipped_ones_counted(self) -> None:
        model = deep()
        step = make_step(model, 2, SGD, None).insert_after("Accumulate", MeasureGradients(every=3))
        batches = make_batches(12)
        batches[0] = (batches[0][0] * math.nan, batches[0][1])
        done = updates(step, init(step, model), batches)
        assert [bool(of_kind("grad_norm", e.facts)) for e in done] == [False, True, False, False, True]

    def test_other_frames_pass_as_they_are(self) -> None:
        values = {"w": [1.0, 2.0]}
        for given in (
            frame(values, sums=values),
            frame(values, ready=True, micro_batches=1),
            frame(values, sums=values, ready=True, update_factor=0.0, window_weight=0.0),
        ):
            assert MeasureGradients()(given) is given
        with pytest.raises(MissingFieldError, match=r"MeasureGradients reads window\.grads"):
            MeasureGradients()(frame(values, ready=True))

    @pytest.mark.parametrize("depth", [None, 1])
    def test_nothing_waits_for_the_device(self, depth: int | None) -> None:
        values = {"a.w": [1.0, 2.0], "a.b": [3.0]}
        given = frame(values, sums=values, ready=True, update_factor=torch.tensor(0.5))
        assert no_host_read(MeasureGradients(depth=depth), given)


def changes(step: Chain, state: TrainState, batches: list[Any], donate: bool) -> Iterator[tuple[Any, Any, UpdateDone]]:
    """The parameters before and after each update, and what was told of it."""
    before = {name: p.detach().clone() for name, p in state.params.items()}
    for now, events in scan(step, state, batches, donate=donate):
        for done in of(UpdateDone, events):
            after = {name: p.detach().clone() for name, p in now.params.items()}
            yield before, after, done
            before = after


class TestUpdates:
    @both_ways
    @pytest.mark.parametrize("bound", [True, False], ids=["bound", "functional"])
    @pytest.mark.parametrize("depth", LAYERS)
    def test_they_are_the_norms_of_the_change_and_of_what_came_of_it(
        self, depth: int | None, bound: bool, donate: bool
    ) -> None:
        model = deep()
        step = make_step(model, 2)
        step = step.replace("MaybeStep", MeasureUpdates(step["MaybeStep"], depth=depth))
        state = init(step, model)
        seen = 0
        for before, after, done in changes(step, state if bound else state.copy(), make_batches(6), donate):
            moved = {name: after[name] - before[name] for name in after}
            assert of_kind("param_norm", done.facts) == pytest.approx(by_hand("param_norm", after, depth), rel=1e-6)
            assert of_kind("update_norm", done.facts) == pytest.approx(by_hand("update_norm", moved, depth), rel=1e-6)
            seen += 1
        assert seen == 3

    @both_ways
    def test_in_every_nth_window(self, donate: bool) -> None:
        model = make_model("mlp")
        step = make_step(model, 2)
        step = step.replace("MaybeStep", MeasureUpdates(step["MaybeStep"], every=2))
        done = updates(step, init(step, model), make_batches(10), donate)
        assert [bool(of_kind("update_norm", e.facts)) for e in done] == [False, True, False, True, False]
        assert [bool(of_kind("param_norm", e.facts)) for e in done] == [False, True, False, True, False]

    def test_frozen_parameters_are_left_out(self) -> None:
        model = make_model("frozen")
        step = make_step(model, 1, SGD)
        step = step.replace("MaybeStep", MeasureUpdates(step["MaybeStep"]))
        (done,) = updates(step, init(step, model), make_batches(1))
        names = {"0.bias", "2.weight", "2.bias"}
        assert of_kind("update_norm", done.facts).keys() == {f"update_norm/{name}" for name in names}
        assert of_kind("param_norm", done.facts).keys() == {f"param_norm/{name}" for name in names}

    def test_a_parameter_that_the_loss_does_not_use_did_not_move(self) -> None:
        model = make_model("unused")
        step = make_step(model, 1, SGD)
        step = step.replace("MaybeStep", MeasureUpdates(step["MaybeStep"], depth=1))
        (done,) = updates(step, init(step, model), make_batches(1))
        moved = of_kind("update_norm", done.facts)
        assert moved["update_norm/never"] == 0 < moved["update_norm/linear"]

    @both_ways
    def test_narrow_parameters_are_measured_in_float32(self, donate: bool) -> None:
        model = make_model("mlp", dtype=torch.bfloat16)
        step = make_step(model, 1, Optimizer(torch.optim.SGD, lr=0.1))
        step = step.replace("MaybeStep", MeasureUpdates(step["MaybeStep"]))
        batches = [(x.bfloat16(), y) for x, y in make_batches(3)]
        for before, after, done in changes(step, init(step, model), batches, donate):
            moved = {name: after[name].double() - before[name].double() for name in after}
            assert of_kind("param_norm", done.facts) == pytest.approx(by_hand("param_norm", after, None), rel=1e-6)
            assert of_kind("update_norm", done.facts) == pytest.approx(by_hand("update_norm", moved, None), rel=1e-6)
            assert {value.dtype for name, value in done.facts.items() if "_norm/" in name} == {torch.float32}

    def test_a_skipped_window_is_not_measured(self) -> None:
        given = frame({"w": [1.0]}, sums={"w": [math.inf]}, ready=True)
        after = MeasureUpdates(MaybeStep(SGD))(given)
        assert after.applied is False
        assert set(after.facts) == {"grad_norm"}

    def test_an_open_window_passes_as_it_is(self) -> None:
        given = frame({"w": [1.0]}, sums={"w": [1.0]})
        assert MeasureUpdates(MaybeStep(SGD))(given) is given

    @both_ways
    def test_of_an_update_inside_the_backward_pass(self, donate: bool) -> None:
        model = make_model("mlp")
        forward = Forward(model, supervised(F.cross_entropy))
        step = chain(forward, MeasureUpdates(UpdateInBackward(SGD), every=2), EmitEvents())
        seen: list[bool] = []
        for before, after, done in changes(step, init(step, model), make_batches(4), donate):
            moved = {name: after[name] - before[name] for name in after}
            expected = by_hand("update_norm", moved, None) if done.update % 2 == 0 else {}
            assert of_kind("update_norm", done.facts) == pytest.approx(expected, rel=1e-6)
            seen.append(bool(expected))
        assert seen == [False, True, False, True]

    @both_ways
    def test_of_the_short_window_at_the_end_of_the_stream(self, donate: bool) -> None:
        model = make_model("mlp")
        forward = Forward(model, supervised(F.cross_entropy))
        inner = chain(Accumulate(4), ClipByGlobalNorm(0.1), MaybeStep(SGD))
        step = chain(forward, ScaledBackward(), MeasureUpdates(inner), EmitEvents())
        found = list(changes(step, init(step, model), make_batches(6), donate))
        assert [done.micro_batches for _, _, done in found] == [4, 2]
        for before, after, done in found:
            moved = {name: after[name] - before[name] for name in after}
            assert of_kind("update_norm", done.facts) == pytest.approx(by_hand("update_norm", moved, None), rel=1e-6)

    def test_what_the_inner_one_declares_passes_through(self) -> None:
        inner, measured = MaybeStep(SGD), MeasureUpdates(MaybeStep(SGD))
        assert (measured.reads, measured.writes, measured.uses_up) == (inner.reads, inner.writes, inner.uses_up)
        assert not hasattr(measured, "finish")
        step = make_step(make_model("mlp"), 1, None, None)
        with pytest.raises(OrderError, match=r"MaybeStep reads window\.grads"):
            step.replace("MaybeStep", MeasureUpdates(inner)).without("Accumulate")

    def test_a_function_that_declares_nothing_may_do_anything(self) -> None:
        def train(given: Frame) -> Frame:
            return given.having(applied=True, facts={"mine": 1.0})

        measured = MeasureUpdates(train)
        assert not any(hasattr(measured, name) for name in ("reads", "writes", "uses_up", "init", "finish"))
        assert repr(measured).startswith("MeasureUpdates(inner=TestUpdates.test_a_function_")
        after = chain(measured, EmitEvents())(frame({"w": [3.0, 4.0]}))
        assert {name: float(value) for name, value in after.facts.items()} == {
            "mine": 1.0,
            "param_norm/w": 5.0,
            "update_norm/w": 0.0,
        }

    def test_the_inner_one_is_initialised_and_found_by_its_name(self) -> None:
        model = make_model("mlp")
        rule = Optimizer(torch.optim.SGD, lr=0.1, groups=[Group("nothing.*")])
        step = make_step(model, 1).replace("MaybeStep", MeasureUpdates(MaybeStep(rule)))
        with pytest.raises(SettingError, match="nothing"):
            init(step, model)
        assert step["MaybeStep"] == MeasureUpdates(MaybeStep(rule))

    def test_nothing_waits_for_the_device_but_the_step(self) -> None:
        def update(given: Frame) -> Frame:
            return given.having(applied=True)

        assert no_host_read(MeasureUpdates(update, depth=1), frame({"a.w": [1.0], "a.b": [2.0]}))


class TestNoise:
    @pytest.mark.parametrize("scale", [None, 1024.0], ids=["unscaled", "scaled"])
    @both_ways
    def test_it_is_the_squared_norm_of_each_micro_batchs_own_mean_gradient(
        self, donate: bool, scale: float | None
    ) -> None:
        model, batches = deep(), [make_batch(i, size) for i, size in enumerate((4, 1, 7, 3))]
        step = make_step(model, 2, Optimizer(torch.optim.SGD, lr=0.0), None, MeasureNoise())
        each = [sum(float(g.double().square().sum()) for g in gradients(model, b).values()) for b in batches]
        state = init(step, model, loss_scale=None if scale is None else LossScale(scale=scale))
        pairs = [done.measures["micro_grad_square"] for done in updates(step, state, batches, donate)]
        assert [(float(total), float(count)) for total, count in pairs] == [
            (pytest.approx(each[0] + each[1], rel=1e-5), 2.0),
            (pytest.approx(each[2] + each[3], rel=1e-5), 2.0),
        ]

    @pytest.mark.parametrize("on_device", [False, True], ids=["host weights", "device weights"])
    def test_a_micro_batch_of_weight_0_adds_nothing(self, on_device: bool) -> None:
        model = make_model("mlp")

        def loss(m: Any, batch: Any) -> Loss:
            x, y, weight = batch
            return Loss.sum(weight * F.cross_entropy(m(x), y), weight if on_device else float(weight))

        step = make_step(model, 3, Optimizer(torch.optim.SGD, lr=0.0), None, MeasureNoise())
        step = step.replace("Forward", Forward(model, loss))
        plain = [make_batch(i) for i in range(3)]
        each = [sum(float(g.square().sum()) for g in gradients(model, b).values()) for b in plain]
        for weights in ((0.0, 2.0, 3.0), (2.0, 0.0, 3.0), (2.0, 3.0, 0.0)):
            batches = [(*b, torch.tensor(w)) for b, w in zip(plain, weights, strict=True)]
            (done,) = updates(step, init(step, model), batches)
            total, count = done.measures["micro_grad_square"]
            expected = sum(square for square, weight in zip(each, weights, strict=True) if weight)
            assert (float(total), float(count)) == (pytest.approx(expected, rel=1e-5), 2.0)

    @pytest.mark.parametrize("first", [True, False])
    def test_a_micro_batch_that_is_dropped_adds_nothing(self, first: bool) -> None:
        model = make_model("mlp")
        between = (DropNonFinite(), MeasureNoise()) if first else (MeasureNoise(), DropNonFinite())
        step = make_step(model, 3, Optimizer(torch.optim.SGD, lr=0.0), None, *between)
        batches = make_batches(3)
        expected = sum(float(g.square().sum()) for b in batches[1:] for g in gradients(model, b).values())
        batches[0] = (batches[0][0] * math.nan, batches[0][1])
        (done,) = updates(step, init(step, model), batches)
        total, count = done.measures["micro_grad_square"]
        assert (float(total), float(count)) == (pytest.approx(expected, rel=1e-5), 2.0)

    def test_sparse_narrow_and_complex_gradients(self) -> None:
        grads = {
            "sparse": torch.sparse_coo_tensor([[1, 1]], torch.tensor([1.0, 2.0]), (2,), check_invariants=True),
            "narrow": torch.full((1000,), 0.3, dtype=torch.bfloat16),
            "complex": torch.tensor([3 + 4j]),
        }
        given = frame({name: [0.0] for name in grads}, grads=grads, measures={"accuracy": (1.0, 1.0)})
        measures = MeasureNoise()(given).measures
        narrow = float(torch.tensor(0.3, dtype=torch.bfloat16))
        total, count = measures["micro_grad_square"]
        assert float(total) == pytest.approx(9 + 1000 * narrow**2 + 25, rel=1e-6)
        assert (count, measures["accuracy"]) == (1.0, (1.0, 1.0))

    def test_in_every_nth_window_alone(self) -> None:
        model = make_model("mlp")
        step = make_step(model, 2, None, None, every(2, MeasureNoise()))
        done = updates(step, init(step, model), make_batches(8))
        assert [e.measures.get("micro_grad_square", (0, 0))[1] for e in done] == [0, 2.0, 0, 2.0]

    def test_it_stands_before_accumulate(self) -> None:
        with pytest.raises(MissingFieldError, match="between ScaledBackward and Accumulate"):
            MeasureNoise()(frame({"w": [1.0]}))
        with pytest.raises(OrderError, match="Accumulate has used up"):
            make_step(make_model("mlp")).insert_after("Accumulate", MeasureNoise())

    @pytest.mark.parametrize("weight", [2.0, torch.tensor(2.0)], ids=["host", "device"])
    def test_nothing_waits_for_the_device(self, weight: Any) -> None:
        values = {"w": [1.0, 2.0]}
        given = frame(values, grads=values, sums=values, weight=weight, loss_scale=LossScale(scale=2.0))
        assert no_host_read(MeasureNoise(), given)


def test_a_skipped_window_tells_no_norms() -> None:
    model = make_model("mlp")
    step = with_measures(model, 1)
    x, y = make_batch(0)
    events = [e for _, found in scan(step, init(step, model), [(x * math.nan, y)]) for e in found]
    assert len(of(UpdateSkipped, events)) == 1
    assert not of(UpdateDone, events)


@pytest.mark.parametrize("bad", [{"every": 0}, {"every": True}, {"depth": 0}, {"depth": 1.5}])
def test_settings_are_checked(bad: dict[str, Any]) -> None:
    for make, owner in (
        (MeasureGradients, "MeasureGradients"),
        (lambda **k: MeasureUpdates(EmitEvents(), **k), "MeasureUpdates"),
    ):
        with pytest.raises(SettingError, match=rf"{owner}\.{next(iter(bad))} must be a whole number"):
            make(**bad)
    with pytest.raises(NotATransformError):
        MeasureUpdates(MaybeStep)

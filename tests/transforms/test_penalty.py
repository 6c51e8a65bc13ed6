"""`PenaliseL1` and `PenaliseL2`: against torch's weight decay, and against the penalty as a part of the loss."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from pipeline import (
    ClipByGlobalNorm,
    LossScale,
    MaybeStep,
    Optimizer,
    PenaliseL1,
    PenaliseL2,
    Tensors,
    TrainState,
    chain,
    fold,
    init,
    named,
    supervised,
)
from pipeline.errors import MissingFieldError, SettingError
from pipeline.events import UpdateDone, UpdateSkipped
from pipeline.records import Rng
from pipeline.testing import assert_matches_loop, assert_records_equal, assert_split_invariant, frame
from tests.cases.probe import Recorder, of, step_of
from tests.laws.cases import MODELS, ROW_WISE, make_batch, make_batches, make_model

Penalty = PenaliseL1 | PenaliseL2
UPDATES = 8
FEW_ULPS = 8 * UPDATES * torch.finfo(torch.float32).eps
"""Where roundings differ: a few units in the last place of the largest parameter, an update."""
both = pytest.mark.parametrize("kind", [PenaliseL1, PenaliseL2])


def sgd(**settings: Any) -> Optimizer:
    return Optimizer(torch.optim.SGD, lr=0.05, **settings)


def penalised(model: nn.Module, penalty: Penalty, rule: Optimizer, every: int = 1, loss: Any = None) -> Any:
    step = step_of(model, loss or supervised(F.cross_entropy), rule, every=every)
    return step.insert_after("Accumulate", penalty)


def loop(
    optimizer: Callable[..., torch.optim.Optimizer], every: int, penalty: Callable[[nn.Module], Any] = lambda model: 0
) -> Callable[[nn.Module, list[Any]], None]:
    """What a careful person would write, with the penalty in the loss."""

    def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
        opt = optimizer(model.parameters())
        for i, (x, y) in enumerate(batches):
            torch.default_generator.manual_seed(Rng(0).key(i))
            ((F.cross_entropy(model(x), y) + penalty(model)) / every).backward()
            if (i + 1) % every == 0:
                opt.step()
                opt.zero_grad()

    return train


def magnitudes(model: nn.Module) -> Any:
    return sum(p.abs().sum() for p in model.parameters() if p.requires_grad)


def squares(model: nn.Module) -> Any:
    return sum(p.square().sum() for p in model.parameters() if p.requires_grad) / 2


IN_THE_LOSS = {PenaliseL1: magnitudes, PenaliseL2: squares}


class TestWhatItEquals:
    @pytest.mark.parametrize("every", [1, 4])
    @pytest.mark.parametrize("name", MODELS)
    def test_l2_is_sgds_weight_decay_to_the_bit(self, name: str, every: int) -> None:
        model = make_model(name)
        step = penalised(model, PenaliseL2(0.1), sgd(momentum=0.9), every)

        def torchs(params: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1)

        with torch.random.fork_rng():
            assert_matches_loop(step, model, make_batches(UPDATES * every), loop(torchs, every))

    def test_l2_is_adams_weight_decay(self) -> None:
        model = make_model("mlp")
        step = penalised(model, PenaliseL2(0.1), Optimizer(torch.optim.Adam, lr=0.01))

        def torchs(params: Any) -> torch.optim.Optimizer:
            return torch.optim.Adam(params, lr=0.01, weight_decay=0.1)

        assert_matches_loop(step, model, make_batches(UPDATES), loop(torchs, 1), rtol=FEW_ULPS)

    @both
    @pytest.mark.parametrize("scale", [None, 1024.0], ids=["unscaled", "scaled"])
    @pytest.mark.parametrize("every", [1, 4])
    @pytest.mark.parametrize("name", ["mlp", "tied", "frozen", "0-dim"])
    def test_it_is_the_penalty_in_the_loss(self, name: str, every: int, scale: float | None, kind: Any) -> None:
        model = make_model(name)
        twin = copy.deepcopy(model)
        step = penalised(model, kind(0.02), sgd(), every)
        state = init(step, model, loss_scale=None if scale is None else LossScale(scale=scale))
        batches = make_batches(UPDATES * every)
        fold(step, state, batches)
        loop(lambda params: torch.optim.SGD(params, lr=0.05), every, lambda m: 0.02 * IN_THE_LOSS[kind](m))(
            twin, batches
        )
        assert_records_equal(dict(model.named_parameters()), dict(twin.named_parameters()), rtol=FEW_ULPS)

    @both
    @pytest.mark.parametrize("name", ROW_WISE)
    @given(cut=st.integers(1, 23), seed=st.integers(0, 1000))
    def test_any_split_of_a_batch_is_penalised_once(self, kind: Any, name: str, cut: int, seed: int) -> None:
        model = make_model(name, seed)
        step = penalised(model, kind(0.1), sgd())
        assert_split_invariant(step, init(step, model), make_batch(seed, 24), [cut, 24 - cut])

    @both
    def test_a_short_last_window_is_penalised_in_full(self, kind: Any) -> None:
        ends: list[Tensors] = []
        for every in (1, 4):
            model = make_model("mlp")
            step = penalised(model, kind(0.1), sgd(), every)
            ends.append(fold(step, init(step, model), make_batches(1)).state.params)
        assert_records_equal(ends[0], ends[1])

    @both
    @pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
    def test_complex_weights_are_penalised_by_magnitude_as_autograd_does(self, kind: Any, dtype: torch.dtype) -> None:
        weight = torch.tensor([3 + 4j, -1j, 0j], dtype=dtype, requires_grad=True)
        penalty = weight.abs().sum() if kind is PenaliseL1 else weight.abs().square().sum() / 2
        (slope,) = torch.autograd.grad(penalty, weight)
        after = kind(0.5)(frame({"w": weight}, sums={"w": torch.zeros(3, dtype=dtype)}, ready=True))
        torch.testing.assert_close(after.state.window.grads["w"], 0.5 * slope)


class Recalled(nn.Module):
    """A table of which each batch looks up some rows."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3, sparse=sparse), nn.Linear(3, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids)).square().mean()


class TestSparse:
    @both
    @pytest.mark.parametrize("donate", [True, False], ids=["donated", "copied"])
    def test_every_row_is_penalised_as_in_the_loss(self, kind: Any, donate: bool) -> None:
        ends: list[Tensors] = []
        for sparse in (True, False):
            torch.manual_seed(0)
            model = Recalled(sparse)
            step = penalised(model, kind(0.1), sgd(), 2, loss=lambda m, ids: m(ids))
            batches = [torch.tensor([i, 0, 0]) for i in (1, 2, 3, 1)]
            ends.append(fold(step, init(step, model), batches, donate=donate).state.params)
        assert_records_equal(ends[0], ends[1], rtol=1e-6)

    @both
    def test_one_that_is_not_matched_stays_sparse(self, kind: Any) -> None:
        rows = torch.sparse_coo_tensor(torch.tensor([[2, 0, 2]]), torch.ones(3, 2), (3, 2), check_invariants=True)
        given_ = frame(
            {"table": torch.ones(3, 2), "w": [1.0]}, sums={"table": rows, "w": [4.0]}, ready=True, update_factor=0.5
        )
        after = kind(0.1, match="w")(given_).state.window.grads
        assert after["table"].layout is torch.sparse_coo
        assert torch.equal(after["table"].to_dense(), 0.5 * rows.to_dense())


class TestOneWindow:
    @pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
    def test_it_is_added_to_the_normalised_gradient(self, factor: Any) -> None:
        window = frame({"w": [2.0, -3.0, 0.0]}, sums={"w": [8.0, 8.0, 8.0]}, ready=True, update_factor=factor)
        l1, l2 = PenaliseL1(0.5)(window), PenaliseL2(0.5)(window)
        assert l1.state.window.grads["w"].tolist() == [2.5, 1.5, 2.0]
        assert l2.state.window.grads["w"].tolist() == [3.0, 0.5, 2.0]
        assert float(l1.update_factor) == float(l2.update_factor) == 1.0
        assert (float(l1.facts["l1_penalty"]), float(l2.facts["l2_penalty"])) == (2.5, 3.25)

    @both
    def test_nothing_counted_is_no_penalty(self, kind: Any) -> None:
        nothing = frame({"w": [2.0]}, sums={"w": [0.0]}, ready=True, update_factor=0.0)
        assert kind(0.5)(nothing) is nothing
        on_device = nothing.having(update_factor=torch.tensor(0.0))
        after = chain(kind(0.5), named("again", kind(0.5)))(on_device)
        assert float(after.state.window.grads["w"] * after.update_factor) == 0.0

    @both
    def test_an_open_window_passes_unchanged(self, kind: Any) -> None:
        open_ = frame({"w": [2.0]}, sums={"w": [1.0]}, micro_batches=3)
        assert kind(0.5)(open_) is open_

    @both
    def test_a_full_window_of_nothing_is_an_error_with_a_cure(self, kind: Any) -> None:
        with pytest.raises(MissingFieldError, match=f"{kind.__name__} reads window.grads"):
            kind(0.5)(frame({"w": [1.0]}, ready=True))

    @both
    def test_a_parameter_without_a_gradient_is_not_penalised(self, kind: Any) -> None:
        after = kind(0.5)(frame({"w": [2.0], "unused": [2.0]}, sums={"w": [1.0]}, ready=True))
        assert list(after.state.window.grads) == ["w"]
        assert float(after.facts[kind.fact]) == 1.0

    @both
    def test_a_window_in_which_nothing_matches_passes_unchanged(self, kind: Any) -> None:
        window = frame({"w": [2.0], "unused": [2.0]}, sums={"w": [1.0]}, ready=True)
        assert kind(0.5, match="unused")(window) is window

    @both
    @pytest.mark.parametrize("match", ["*.weight", lambda name, tensor: tensor.ndim == 2], ids=["pattern", "function"])
    def test_only_what_matches_is_penalised(self, kind: Any, match: Any) -> None:
        params = {"a.weight": torch.ones(2, 2), "a.bias": torch.ones(2)}
        sums = {name: torch.zeros_like(value) for name, value in params.items()}
        grads = kind(0.5, match)(frame(params, sums=sums, ready=True)).state.window.grads
        assert torch.equal(grads["a.weight"], torch.full((2, 2), 0.5))
        assert torch.equal(grads["a.bias"], torch.zeros(2))

    @both
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_narrow_weights_are_summed_in_float32(self, kind: Any, dtype: torch.dtype) -> None:
        weight = torch.full((1000,), 1.5, dtype=dtype)
        after = kind(0.125)(frame({"w": weight}, sums={"w": torch.ones(1000)}, ready=True))
        grad, penalty = after.state.window.grads["w"], after.facts[kind.fact]
        assert (grad.dtype, penalty.dtype) == (torch.float32, torch.float32)
        assert torch.equal(grad, torch.full((1000,), 1.125 if kind is PenaliseL1 else 1.1875))
        assert float(penalty) == pytest.approx(187.5 if kind is PenaliseL1 else 140.625, rel=1e-6)

    def test_two_penalties_of_a_kind_make_one_fact(self) -> None:
        two = chain(PenaliseL1(0.5, "a"), named("on b", PenaliseL1(0.25, "b")))
        after = two(frame({"a": [2.0], "b": [-4.0]}, sums={"a": [0.0], "b": [0.0]}, ready=True))
        assert {name: float(grad) for name, grad in after.state.window.grads.items()} == {"a": 0.5, "b": -0.25}
        assert float(after.facts["l1_penalty"]) == 2.0

    @both
    def test_a_record_that_owns_its_sums_is_written_in_place(self, kind: Any) -> None:
        window = frame({"w": [2.0], "s": 1.0}, sums={"w": [1.0], "s": 3.0}, ready=True, update_factor=0.5)
        owned = window.having(state=window.state.owned())
        sums = owned.state.window.grads
        places = [grad.data_ptr() for grad in sums.flat]
        after = kind(0.5)(owned).state.window.grads
        assert [grad.data_ptr() for grad in after.flat] == places
        assert after.is_owned
        assert sums.is_stale

    @both
    @pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
    def test_nothing_waits_for_the_device(self, kind: Any, factor: Any) -> None:
        window = frame({"w": [2.0]}, sums={"w": [1.0]}, ready=True, update_factor=factor)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            kind(0.5)(window)
        assert not [e for e in profile.key_averages() if e.key in ("aten::_local_scalar_dense", "aten::item")]

    @both
    def test_a_traced_penalty_depends_on_no_value_of_the_trace(self, kind: Any) -> None:
        def after(weight: Tensor, grad: Tensor) -> tuple[Any, Any]:
            done = kind(0.5)(frame({"w": weight}, sums={"w": grad}, ready=True, update_factor=0.25))
            return done.state.window.grads["w"], done.facts[kind.fact]

        traced = make_fx(after)(torch.ones(3), torch.ones(3))
        weight, grad = torch.tensor([1.0, -2.0, 0.0]), torch.tensor([4.0, 4.0, -4.0])
        assert_records_equal(traced(weight, grad), after(weight, grad), rtol=1e-6)


class TestWithAClip:
    def test_a_clip_behind_it_sees_the_penalty(self) -> None:
        window = frame({"w": [6.0, 0.0]}, sums={"w": [0.0, 4.0]}, ready=True)
        after = chain(PenaliseL2(0.5), ClipByGlobalNorm(1.0))(window)
        assert float(after.facts["grad_norm"]) == 5.0
        torch.testing.assert_close(after.state.window.grads["w"] * after.update_factor, torch.tensor([0.6, 0.8]))

    def test_behind_a_clip_it_is_not_clipped_and_the_norm_measured_stays_that_of_the_data(self) -> None:
        window = frame({"w": [6.0, 0.0]}, sums={"w": [0.0, 4.0]}, ready=True)
        after = chain(ClipByGlobalNorm(1.0), PenaliseL2(0.5))(window)
        torch.testing.assert_close(after.state.window.grads["w"] * after.update_factor, torch.tensor([3.0, 1.0]))
        stepped = MaybeStep(sgd())(after)
        assert float(stepped.facts["grad_norm"]) == 4.0

    @pytest.mark.parametrize("order", ["before", "behind"])
    def test_a_second_clip_measures_what_is_there_then(self, order: str) -> None:
        window = frame({"w": [6.0, 0.0]}, sums={"w": [0.0, 4.0]}, ready=True)
        first = [PenaliseL2(0.5)] if order == "before" else [ClipByGlobalNorm(4.0), PenaliseL2(0.5)]
        after = chain(*first, named("last", ClipByGlobalNorm(1.0)))(window)
        torch.testing.assert_close(after.state.window.grads["w"] * after.update_factor, torch.tensor([0.6, 0.8]))

    @both
    @pytest.mark.parametrize("bad", [math.inf, math.nan, 3e30])
    @pytest.mark.parametrize("order", ["before", "behind"])
    def test_a_norm_that_is_not_finite_still_skips_the_update(self, kind: Any, order: str, bad: float) -> None:
        window = frame({"w": [6.0, 1.0]}, sums={"w": [bad, 4.0]}, ready=True)
        parts = [kind(0.5), ClipByGlobalNorm(1.0)]
        after = chain(*(parts if order == "before" else parts[::-1]), MaybeStep(sgd()))(window)
        assert after.applied is False
        assert after.state.params["w"].tolist() == [6.0, 1.0]


class TestInARun:
    @both
    def test_the_events_tell_the_loss_of_the_data_and_the_penalty_apart(self, kind: Any) -> None:
        ran: list[list[UpdateDone]] = []
        size = float(0.5 * IN_THE_LOSS[kind](make_model("mlp")).detach())
        for strength in (0.5, 0.0):
            model, recorder = make_model("mlp"), Recorder()
            step = penalised(model, kind(strength), sgd(), 2)
            fold(step, init(step, model), make_batches(4), sinks=[recorder])
            ran.append(of(UpdateDone, recorder.events))
        with_it, without = ran
        assert float(with_it[0].facts[kind.fact]) == pytest.approx(size, rel=1e-6)
        assert float(with_it[0].loss) == float(without[0].loss)
        assert float(with_it[1].loss) != float(without[1].loss)

    @both
    def test_strength_0_gives_the_bits_of_no_penalty(self, kind: Any) -> None:
        ends: list[Tensors] = []
        for with_it in (True, False):
            model = make_model("mlp")
            step = penalised(model, kind(0.0), sgd(), 4)
            step = step if with_it else step.without(kind.__name__)
            ends.append(fold(step, init(step, model), make_batches(8)).state.params)
        assert_records_equal(ends[0], ends[1])

    @both
    @pytest.mark.parametrize("name", MODELS)
    def test_in_place_and_copying_give_the_same_bits(self, kind: Any, name: str) -> None:
        ends: list[TrainState] = []
        for donate in (True, False):
            model = make_model(name)
            step = penalised(model, kind(0.1), Optimizer(torch.optim.AdamW, lr=0.01), 3)
            ends.append(fold(step, init(step, model), make_batches(8), donate=donate).state)
        assert_records_equal(ends[0], ends[1])

    @both
    def test_a_window_that_is_skipped_leaves_the_weights_alone(self, kind: Any) -> None:
        model, recorder = make_model("mlp"), Recorder()
        before = copy.deepcopy(dict(model.named_parameters()))
        step = penalised(model, kind(0.1), sgd())
        x, y = make_batch(0)
        fold(step, init(step, model), [(x * math.nan, y)], sinks=[recorder])
        assert [e.reason for e in of(UpdateSkipped, recorder.events)] == ["non-finite gradients"]
        assert_records_equal(dict(model.named_parameters()), before)


class TestSettings:
    @both
    @pytest.mark.parametrize("bad", [-1.0, math.inf, math.nan, "1", None, torch.ones(())])
    def test_any_other_strength_is_refused(self, kind: Any, bad: Any) -> None:
        with pytest.raises(SettingError, match=rf"{kind.__name__}\.strength must be 0 or more and finite"):
            kind(bad)

    @both
    @pytest.mark.parametrize("bad", [1, None, ["*"], torch.ones(())])
    def test_any_other_match_is_refused(self, kind: Any, bad: Any) -> None:
        with pytest.raises(SettingError, match=rf"{kind.__name__}\.match must be a pattern on names or a function"):
            kind(0.1, bad)

    @both
    @pytest.mark.parametrize("match", ["head.*", lambda name, tensor: False], ids=["pattern", "function"])
    def test_a_match_that_no_parameter_fits_is_an_error_when_the_state_is_made(self, kind: Any, match: Any) -> None:
        state = TrainState(Tensors({"a.weight": torch.ones(2)}))
        with pytest.raises(SettingError, match=rf"{kind.__name__}\.match must be one that some .*a\.weight"):
            kind(0.1, match).init(state)
        assert kind(0.1, "a.*").init(state) is state

    @both
    def test_it_belongs_between_accumulate_and_the_step(self, kind: Any) -> None:
        model = make_model("mlp")
        step = step_of(model, supervised(F.cross_entropy), sgd())
        with pytest.raises(ValueError, match=f"{kind.__name__} reads window.grads"):
            step.insert_before("ScaledBackward", kind(0.1))
        with pytest.raises(ValueError, match=f"{kind.__name__} reads window.grads, which MaybeStep has used up"):
            step.insert_after("MaybeStep", kind(0.1))

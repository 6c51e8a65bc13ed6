"""Averaged weights and sharpness-aware gradients, each against a plain reference."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import (
    AverageWeights,
    Evaluation,
    Forward,
    MaybeStep,
    Optimizer,
    SharpnessAware,
    averaged,
    chain,
    fold,
    init,
    scan,
    supervised,
)
from pipeline.errors import MissingFieldError, SettingError
from pipeline.testing import assert_matches_loop, assert_records_equal, assert_split_invariant
from tests.laws.cases import MODELS, make_batch, make_batches, make_model, make_step


def with_average(model: nn.Module, **settings: Any) -> Any:
    return make_step(model, 2).insert_after("MaybeStep", AverageWeights(**settings))


class TestAverage:
    @pytest.mark.parametrize("donate", [True, False])
    @pytest.mark.parametrize("bound", [True, False])
    def test_it_is_the_exponential_average_of_the_weights_after_each_update(self, donate: bool, bound: bool) -> None:
        model = make_model("mlp")
        step = with_average(model, decay=0.7)
        state = init(step, model)
        expected = {k: p.detach().clone() for k, p in model.named_parameters()}
        state = state if bound else state.copy()
        updates = 0
        for now, _ in scan(step, state, make_batches(9), donate=donate):
            if now.progress.updates > updates:
                updates = now.progress.updates
                for name, param in now.params.items():
                    expected[name].lerp_(param.detach(), 1 - 0.7)
            assert_records_equal({k: v.detach() for k, v in now.slots["average"].items()}, expected)
        assert updates == 5

    def test_it_is_torchs_ema_and_swa(self) -> None:
        for decay, function in (
            (0.9, torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)),
            (None, torch.optim.swa_utils.get_swa_multi_avg_fn()),
        ):
            model = make_model("mlp")
            twin = torch.optim.swa_utils.AveragedModel(copy.deepcopy(model), multi_avg_fn=function)
            twin.n_averaged += 1 if decay else 0  # torch copies at the first call; ours begins at init
            step = with_average(model, decay=decay)
            updates, last = 0, init(step, model)
            for now, _ in scan(step, last, make_batches(12)):
                if now.progress.updates > updates:
                    updates = now.progress.updates
                    twin.update_parameters(model)
                    last = now
            average = {k: v.detach() for k, v in last.slots["average"].items()}
            assert_records_equal(average, {k: p.detach() for k, p in twin.module.named_parameters()}, rtol=1e-6)

    def test_start_and_every_choose_the_updates_that_count(self) -> None:
        model = make_model("mlp")
        step = with_average(model, decay=None, start=2, every=2)
        seen: dict[int, dict[str, Tensor]] = {}
        last = None
        for last, _ in scan(step, init(step, model), make_batches(16)):
            seen[last.progress.updates] = {k: p.detach().clone() for k, p in last.params.items()}
        assert last is not None
        assert last.slots["average count"] == 3
        mean = {k: (seen[4][k] + seen[6][k] + seen[8][k]) / 3 for k in seen[4]}
        assert_records_equal({k: v.detach() for k, v in last.slots["average"].items()}, mean, rtol=1e-6)

    def test_a_skipped_window_is_not_taken_in(self) -> None:
        model = make_model("mlp")
        step = with_average(model, decay=0.5)
        x, y = make_batch(0)
        state = fold(step, init(step, model), [(x * float("nan"), y)] * 4).state
        assert state.slots["average count"] == 0

    def test_evaluation_on_the_averaged_weights_leaves_the_model_alone(self) -> None:
        model = make_model("batchnorm")
        step = with_average(model, decay=0.9)
        state = fold(step, init(step, model), make_batches(8)).state
        forward = Forward(model, supervised(F.cross_entropy))
        weights = {k: v.clone() for k, v in model.state_dict().items()}
        there = Evaluation(forward, make_batches(3, 5), average="average").run(state).values["val_loss"]
        here = Evaluation(forward, make_batches(3, 5)).run(state).values["val_loss"]
        assert there != here
        assert_records_equal(dict(model.state_dict()), weights)
        averaged(state).load_into(model)
        loaded = Evaluation(forward, make_batches(3, 5)).run(init(forward, model)).values["val_loss"]
        assert loaded == there

    def test_narrow_parameters_have_a_wide_average(self) -> None:
        model = make_model("mlp", dtype=torch.bfloat16)
        step = with_average(model, decay=0.99)
        batches = [(x.bfloat16(), y) for x, y in make_batches(6)]
        state = fold(step, init(step, model), batches).state
        assert {t.dtype for t in state.slots["average"].values()} == {torch.float32}
        assert {t.dtype for t in averaged(state).params.values()} == {torch.bfloat16}

    def test_what_is_wrong_is_said(self) -> None:
        for bad in ({"decay": 1.0}, {"decay": -0.1}, {"decay": "0.9"}, {"every": 0}, {"start": -1}):
            with pytest.raises(SettingError):
                AverageWeights(**bad)
        model = make_model("mlp")
        with pytest.raises(MissingFieldError, match="put AverageWeights into the step"):
            averaged(init(make_step(model), model))


def plain_sam(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    """SAM as its paper's algorithm 1, by hand."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    params = list(model.parameters())
    for x, y in batches:
        F.cross_entropy(model(x), y).backward()
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in params if p.grad is not None]))
        moves = [None if p.grad is None else p.grad * (0.05 / (norm + 1e-12)) for p in params]
        with torch.no_grad():
            for p, move in zip(params, moves, strict=True):
                if move is not None:
                    p.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, move in zip(params, moves, strict=True):
                if move is not None:
                    p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


def sam_step(model: nn.Module, window: int = 1) -> Any:
    rule = MaybeStep(Optimizer(torch.optim.SGD, lr=0.1))
    step = make_step(model, window, None, None).replace("MaybeStep", rule)
    return chain(SharpnessAware(Forward(model, supervised(F.cross_entropy))), *step.transforms[2:])


class TestSharpness:
    @pytest.mark.parametrize("name", ["mlp", "tied", "0-dim"])
    def test_it_equals_the_paper_by_hand(self, name: str) -> None:
        model = make_model(name)
        assert_matches_loop(sam_step(model), model, make_batches(8), plain_sam, rtol=1e-6)

    @pytest.mark.parametrize("name", MODELS)
    def test_in_place_and_copying_give_the_same_bits(self, name: str) -> None:
        ends = []
        for donate in (True, False):
            model = make_model(name)
            step = sam_step(model, 2)
            ends.append(fold(step, init(step, model), make_batches(5), donate=donate).state)
        assert_records_equal(ends[0], ends[1])

    def test_batchnorm_sees_each_batch_once(self) -> None:
        model = make_model("batchnorm")
        step = sam_step(model)
        state = fold(step, init(step, model), make_batches(5)).state
        assert int(state.buffers["1.num_batches_tracked"]) == 5

    def test_it_moves_against_the_plain_gradient(self) -> None:
        model = make_model("mlp")
        sharp, plain = sam_step(model), make_step(model, 1, Optimizer(torch.optim.SGD, lr=0.1), None)
        state = init(sharp, model)
        ends = [fold(s, state.copy(), make_batches(1)).state.params["0.weight"] for s in (sharp, plain)]
        assert not torch.equal(ends[0], ends[1])

    def test_what_is_wrong_is_said(self) -> None:
        model = make_model("mlp")
        forward = Forward(model, supervised(F.cross_entropy))
        for bad in ({"forward": model}, {"forward": forward, "rho": 0.0}):
            with pytest.raises(SettingError):
                SharpnessAware(**bad)


def test_a_gradient_penalty_in_the_loss_leaves_nothing_behind() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, batch[1]) + 10 * (slope.norm(dim=1) - 1).pow(2).mean()

    gone = []
    gc.disable()
    try:
        for _ in range(3):
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
            step = make_step(model, 2).replace("Forward", Forward(model, loss))
            fold(step, init(step, model), make_batches(20))
            gone.append(weakref.ref(model[0].weight))
            del model, step
        gc.collect()
        assert [ref() for ref in gone] == [None] * 3
    finally:
        gc.enable()


def test_a_split_batch_gives_the_same_average() -> None:
    model = make_model("mlp")
    step = make_step(model, 1, Optimizer(torch.optim.SGD, lr=0.1), None).insert_after("MaybeStep", AverageWeights())
    assert_split_invariant(step, init(step, model), make_batch(0, 24), [1, 23])
    assert attrs.fields(AverageWeights).decay.default == 0.999

"""Law 1: a transform leaves its input as it was, and gives the same output twice."""

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pipeline import Forward, Frame, apply, fold, init, supervised
from pipeline.errors import LawError
from pipeline.testing import assert_pure, assert_records_equal, frame
from tests.laws.cases import CASES, MODELS, Case, make_batch, make_batches, make_model, make_step


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@given(seed=st.integers(0, 2**16))
def test_a_transform_leaves_its_input_as_it_was(case: Case, seed: int) -> None:
    assert_pure(*case.make(seed))


@pytest.mark.parametrize("name", MODELS)
def test_apply_leaves_state_module_and_generators_as_they_were(name: str) -> None:
    model = make_model(name)
    step = make_step(model)
    state = init(step, model)
    before, weights = state.copy(), {k: v.clone() for k, v in model.state_dict().items()}
    generator = torch.get_rng_state()
    first, _ = apply(step, state, make_batch(1))
    again, _ = apply(step, state, make_batch(1))
    second, events = apply(step, first, make_batch(2))
    assert_records_equal(again, first)
    assert_records_equal(state, before)
    assert second.progress.updates == 1
    assert events
    assert_records_equal(dict(model.state_dict()), weights)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_without_donation_every_state_of_a_fold_stays_as_it_was(name: str) -> None:
    model = make_model(name)
    step = make_step(model)
    state = init(step, model)
    kept = state.copy()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    run = fold(step, state, make_batches(5), donate=False)
    assert_records_equal(state, kept)
    assert_records_equal(dict(model.state_dict()), weights)
    run.state.load_into(model)
    assert_records_equal(dict(model.named_parameters()), dict(run.state.params))


class TestTheAssertionItself:
    def test_it_finds_a_transform_that_writes_to_its_input(self) -> None:
        def bad(f: Frame) -> Frame:
            f.state.window.grads["w"].mul_(2)
            return f

        with pytest.raises(LawError, match=r"window.grads\['w'\]"):
            assert_pure(bad, frame({"w": [1.0]}, sums={"w": [1.0]}))

    def test_it_finds_a_transform_that_remembers(self) -> None:
        seen: list[int] = []

        def bad(f: Frame) -> Frame:
            seen.append(1)
            return f.having(update_factor=float(len(seen)))

        with pytest.raises(LawError, match="second output"):
            assert_pure(bad, frame({"w": [1.0]}))

    def test_it_finds_a_gradient_left_behind(self) -> None:
        def bad(f: Frame) -> Frame:
            f.state.params["w"].grad = torch.ones(1)
            return f

        with pytest.raises(LawError, match=r"\.grad"):
            assert_pure(bad, frame({"w": [1.0]}))


def test_a_forward_on_a_lent_state_leaves_batchnorm_buffers_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    forward = Forward(model, supervised(F.cross_entropy))
    state = init(forward, model)
    given_buffers = {k: v.clone() for k, v in state.buffers.items()}
    after = forward(Frame(state, make_batch(0))).state
    assert_records_equal(dict(state.buffers), given_buffers)
    assert int(after.buffers["0.num_batches_tracked"]) == 1
    assert attrs.fields(type(after)).buffers.name == "buffers"

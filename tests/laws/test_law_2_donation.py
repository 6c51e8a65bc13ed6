"""Law 2: in place and copying give the same bits, and what was handed over is stale or as it was."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Frame, fold, init, scan
from pipeline.errors import LawError, StaleStateError
from pipeline.testing import assert_donation_safe, assert_records_equal, frame
from tests.laws.cases import CASES, MODELS, Case, make_batches, make_model, make_step


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@given(seed=st.integers(0, 2**16))
def test_in_place_and_copying_give_the_same_bits(case: Case, seed: int) -> None:
    assert_donation_safe(*case.make(seed))


@pytest.mark.parametrize("fused", [True, False], ids=["one", "apart"])
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "functional"])
@pytest.mark.parametrize("name", MODELS)
def test_a_whole_fold_gives_the_same_bits_in_place_and_copying(name: str, bound: bool, fused: bool) -> None:
    ends = []
    for donate in (True, False):
        model = make_model(name)
        step = make_step(model, 3, None, 0.5, *(() if fused else (lambda f: f,)))
        state = init(step, model, seed=3)
        run = fold(step, state if bound else state.copy(), make_batches(8), donate=donate)
        ends.append(run.state)
    assert_records_equal(ends[0], ends[1])
    assert ends[0].progress.updates == 3


def test_bound_and_functional_give_the_same_bits() -> None:
    for name in MODELS:
        model = make_model(name)
        step = make_step(model)
        state = init(step, model)
        functional = fold(step, state.copy(), make_batches(7)).state
        bound = fold(step, state, make_batches(7)).state
        assert_records_equal(bound, functional, what=name)


def test_a_state_that_was_handed_over_is_stale_and_says_the_cure() -> None:
    model = make_model("batchnorm")
    step = make_step(model)
    state = init(step, model)
    copied = state.copy()
    run = fold(step, state, make_batches(4))
    for read in (lambda: state.params.flat, lambda: state.params["0.weight"], lambda: state.buffers.flat):
        with pytest.raises(StaleStateError, match=r"state\.copy\(\)") as caught:
            read()
    assert caught.value.update is not None
    with pytest.raises(StaleStateError):
        fold(step, state, make_batches(4))
    with pytest.raises(StaleStateError):
        state.copy()
    assert "stale" in repr(state.params)
    assert run.state.params["0.weight"] is model[0].weight
    again = fold(step, copied, make_batches(4))
    assert_records_equal(again.state, run.state)


def test_each_state_that_scan_gave_is_stale_once_the_next_one_is_there() -> None:
    model = make_model("mlp")
    step = make_step(model, window=2)
    states = [state for state, _ in scan(step, init(step, model), make_batches(4))]
    for before, after in pairwise(states[:4]):
        changed = before.progress.updates != after.progress.updates
        assert before.params.is_stale or not changed
        assert before.window.grads.is_stale or not before.window.micro_batches


def test_two_states_bound_to_one_module_cannot_change_behind_each_others_back() -> None:
    model = make_model("mlp")
    step = make_step(model)
    first, second = init(step, model), init(step, model)
    fold(step, first, make_batches(2))
    with pytest.raises(StaleStateError):
        second.params.flat  # noqa: B018


def test_the_state_that_a_fold_returns_can_be_kept_and_gone_on_from_twice() -> None:
    model = make_model("mlp")
    step = make_step(model)
    run = fold(step, init(step, model), make_batches(3))
    kept = run.state.copy()
    ends = [fold(step, kept.copy(), make_batches(5, seed=1)).state for _ in range(2)]
    assert_records_equal(ends[0], ends[1])
    assert_records_equal(run.state, kept)


def test_there_is_no_second_set_of_gradients_while_a_window_is_open() -> None:
    model = make_model("mlp")
    step = make_step(model, window=4)
    homes = set()
    for state, _ in scan(step, init(step, model), make_batches(4)):
        for name, param in model.named_parameters():
            if state.window.micro_batches:
                assert state.window.grads[name] is param.grad
                homes.add((name, param.grad.data_ptr()))
            else:
                assert param.grad is None
    assert len(homes) == len(list(model.parameters()))


def test_loading_into_a_module_makes_what_was_bound_to_it_stale() -> None:
    model, other = make_model("mlp"), make_model("mlp", seed=1)
    step = make_step(model)
    state, foreign = init(step, model), init(make_step(other), other)
    loaded = foreign.load_into(model)
    assert state.params.is_stale
    assert torch.equal(loaded.params["0.weight"], other[0].weight)
    assert loaded.params["0.weight"] is model[0].weight


class TestTheAssertionItself:
    def test_it_finds_a_transform_that_writes_in_place_without_saying_so(self) -> None:
        def bad(f: Frame) -> Frame:
            if f.state.window.grads.is_owned:
                f.state.window.grads["w"].mul_(2)
            return f

        with pytest.raises(LawError):
            assert_donation_safe(bad, frame({"w": [1.0]}, sums={"w": [1.0]}))

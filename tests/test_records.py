"""Records: immutable, short in print, pytrees, copied and loaded by value."""

import copy
import itertools
import pickle
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

from pipeline import Frame, LossScale, Progress, Tensors, TrainState, Window, fold, init
from pipeline.errors import LawError, SettingError, StateMismatchError
from pipeline.records import Loss, OptimizerState, Rng
from pipeline.testing import assert_records_equal, frame
from tests.laws.cases import MODELS, Tied, make_batches, make_model, make_step


class TestTensors:
    def test_it_is_an_immutable_mapping(self) -> None:
        w = torch.ones(2, 3)
        tensors = Tensors({"w": w, "b": torch.zeros(())})
        assert list(tensors) == ["w", "b"]
        assert tensors["w"] is w
        assert (len(tensors), "w" in tensors, "x" in tensors) == (2, True, False)
        assert dict(tensors)["w"] is w
        with pytest.raises(KeyError):
            tensors["x"]
        with pytest.raises(TypeError):
            tensors["w"] = w  # type: ignore[index]
        with pytest.raises(AttributeError, match="immutable"):
            tensors._values = ()  # type: ignore[misc]
        assert tensors != Tensors({"w": w})
        assert tensors.get("x") is None

    def test_its_repr_is_short(self) -> None:
        assert repr(Tensors()) == "Tensors()"
        assert repr(Tensors({"w": torch.ones(2, 3), "s": torch.ones(())})) == "Tensors(w: 2×3, s: 0-d; float32)"
        many = Tensors({f"layer{i}.weight": torch.ones(1000, 1000) for i in range(5)})
        assert repr(many) == "Tensors(5 tensors, 5,000,000 elements, float32)"

    def test_what_is_owned_is_written_in_place_and_what_is_not_is_copied(self) -> None:
        lent = Tensors({"w": torch.ones(2)})
        assert lent.writable()["w"] is not lent["w"]
        assert not lent.writable().is_owned
        given_away = Tensors({"w": torch.ones(2)})
        mine = given_away.owned()
        assert given_away.is_stale
        assert mine.writable()["w"] is mine._values[0]
        assert mine.is_stale

    def test_a_copy_and_a_pickle_own_nothing_and_share_nothing(self) -> None:
        w = nn.Parameter(torch.ones(2))
        for again in (copy.deepcopy(Tensors({"w": w})), pickle.loads(pickle.dumps(Tensors({"w": w})))):
            assert again["w"] is not w
            assert again["w"].requires_grad
            assert torch.equal(again["w"], w)


class TestPytrees:
    def test_every_record_goes_through_a_tree_map_and_back(self) -> None:
        model = make_model("batchnorm")
        step = make_step(model, 4)
        state = fold(step, init(step, model, loss_scale=LossScale(scale=8.0)), make_batches(6)).state
        given_frame = frame({"w": [1.0]}, sums={"w": [2.0]}, grads={"w": [3.0]}, loss=1.0, slots={"ema": torch.ones(2)})
        for record in (state, state.window, state.progress, LossScale(), Rng(3, 1), given_frame, state.optimizer):
            doubled = pytree.tree_map_only(torch.Tensor, lambda t: t.detach() * 1, record)
            assert type(doubled) is type(record)
            mapped = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), record)
            assert_records_equal(doubled, mapped)
        leaves = pytree.tree_leaves(state)
        assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves) > len(state.params)

    def test_counts_are_leaves(self) -> None:
        assert pytree.tree_leaves(Progress(1, 2, 3, 4, 5, 6, 0)) == [1, 2, 3, 4, 5, 6, 0]


class TestTrainState:
    def test_everything_prints_shortly(self) -> None:
        model = make_model("mlp")
        step = make_step(model)
        state = init(step, model)
        assert repr(state).startswith("TrainState(update 0, micro-step 0, epoch 0, params=Tensors(4 tensors")
        run = fold(step, state, make_batches(2))
        for record in (run.state, run.state.optimizer, run.state.window, Frame(run.state, (1, 2))):
            assert len(repr(record)) < 250
        assert "stale" in repr(state)

    @pytest.mark.parametrize("name", MODELS)
    def test_a_copy_is_loaded_into_another_model_and_trains_it_the_same(self, name: str) -> None:
        model, other = make_model(name), make_model(name, seed=7)
        step = make_step(model, 2)
        run = fold(step, init(step, model), make_batches(3))
        kept = run.state.copy()
        bound = kept.load_into(other)
        assert_records_equal(dict(other.state_dict()), dict(model.state_dict()))
        assert bound.params[next(iter(bound.params))] is next(other.parameters())
        there = make_step(other, 2)
        end = fold(there, bound, make_batches(4, seed=2))
        assert_records_equal(end.state, fold(step, run.state, make_batches(4, seed=2)).state)
        assert_records_equal(dict(other.named_parameters()), dict(end.state.params))

    def test_a_state_loaded_into_a_second_model_stays_good_for_the_first(self) -> None:
        model, other = make_model("mlp"), make_model("mlp", seed=7)
        step, there = make_step(model, 2), make_step(other, 2)
        state = fold(step, init(step, model), make_batches(4)).state
        fold(there, state.load_into(other), make_batches(4))
        assert fold(step, state.copy(), make_batches(2)).state.progress.updates == 3

    def test_names_match_whatever_their_order(self) -> None:
        state = TrainState(Tensors({"bias": torch.ones(1), "weight": torch.full((1, 1), 2.0)}))
        model = nn.Linear(1, 1)
        state.load_into(model)
        assert (model.weight.item(), model.bias.item()) == (2.0, 1.0)

    def test_tied_weights_are_one_entry_and_two_values_for_it_are_refused(self) -> None:
        model = Tied()
        state = init(make_step(model), model)
        assert "second.weight" not in state.params
        both = {**state.copy().params, "second.weight": state.params["first.weight"].detach() + 1}
        with pytest.raises(StateMismatchError, match=r"tied to first\.weight"):
            TrainState(Tensors(both)).load_into(model)
        equal = {**both, "second.weight": both["first.weight"].detach().clone()}
        assert "second.weight" not in TrainState(Tensors(equal)).load_into(model).params
        assert model.second.weight is model.first.weight

    def test_the_optimizer_state_reads_by_parameter(self) -> None:
        model = make_model("mlp")
        step = make_step(model, 1)
        run = fold(step, init(step, model), make_batches(3))
        assert set(run.state.optimizer.of("0.weight")) == {"step", "exp_avg", "exp_avg_sq"}
        assert float(run.state.optimizer.tensors["0.weight/step"]) == 3
        assert run.state.optimizer.of("nothing") == {}
        assert isinstance(run.state.optimizer.copy(), OptimizerState)
        again = pickle.loads(pickle.dumps(run.state))
        assert_records_equal(again, run.state)


class TestLossScale:
    def test_it_backs_off_and_grows_within_its_bounds(self) -> None:
        scale = LossScale(scale=4.0, interval=2, floor=1.0, ceiling=8.0)
        assert [scale.after(False).scale, scale.after(False).after(False).after(False).scale] == [2.0, 1.0]
        assert scale.after(True).scale == 4.0
        assert scale.after(True).after(True).scale == 8.0
        assert scale.after(True).after(True).after(True).after(True).scale == 8.0
        assert scale.after(True).after(False).finite_windows == 0

    @given(st.lists(st.booleans(), max_size=60))
    def test_it_moves_as_torchs_scaler_does(self, finite: list[bool]) -> None:
        torchs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        ours = LossScale(scale=8.0, interval=3)
        param = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([param], lr=0.0)
        for good in finite[:12]:
            param.grad = torchs.scale(torch.ones(1)) * (1.0 if good else float("inf"))
            torchs.step(optimizer)
            torchs.update()
            ours = ours.after(good)
            assert (ours.scale, ours.finite_windows) == (torchs.get_scale(), torchs._get_growth_tracker())

    @pytest.mark.parametrize(
        ("setting", "bad"),
        [
            ("scale", 0.0),
            ("scale", "1"),
            ("scale", 2.0**30),
            ("growth", 1.0),
            ("growth", float("inf")),
            ("backoff", 1.0),
            ("interval", 0),
            ("interval", 2.5),
            ("floor", -1.0),
            ("ceiling", float("nan")),
        ],
    )
    def test_its_settings_are_checked(self, setting: str, bad: Any) -> None:
        with pytest.raises(SettingError, match=f"LossScale.{setting}"):
            LossScale(**{setting: bad})


def test_loss_means_and_sums_carry_their_weights() -> None:
    value = torch.tensor(6.0)
    total = Loss.sum(value, 3, measures={"hits": torch.tensor(2.0), "other": (torch.tensor(1.0), 5)})
    assert float(total.value) == 2.0
    assert [(float(s), w) for s, w in total.measures.values()] == [(2.0, 3), (1.0, 5)]
    mean = Loss.mean(value, 4, measures={"hits": torch.tensor(0.5)})
    assert [(float(s), w) for s, w in mean.measures.values()] == [(2.0, 4)]
    assert float(Loss.sum(torch.tensor(0.0), 0).value) == 0.0


def test_the_seeds_of_steps_are_far_apart_and_fit_a_generator() -> None:
    cases = itertools.product((0, 1, -5), (0, 1), range(50), (0, 1))
    keys = [Rng(seed, rank).key(n, purpose) for seed, rank, n, purpose in cases]
    assert len(set(keys)) == len(keys)
    for key in keys[:20]:
        torch.Generator().manual_seed(key)


class TestCompare:
    def test_it_names_the_place_where_two_records_part(self) -> None:
        a = frame({"w": [1.0, 2.0]}, sums={"w": [1.0, 2.0]})
        b = frame({"w": [1.0, 2.0]}, sums={"w": [1.0, 2.5]})
        with pytest.raises(LawError, match=r"state.window.grads\['w'\]: 1 of 2 elements differ, first at \(1,\): 2.0"):
            assert_records_equal(a, b)
        assert_records_equal(a, b, rtol=0.3)

    @pytest.mark.parametrize(
        "other",
        [
            {"w": torch.ones(3)},
            {"w": torch.ones(2).double()},
            {"v": torch.ones(2)},
            {},
            {"w": torch.tensor([1.0, float("nan")])},
        ],
    )
    def test_it_tells_shapes_dtypes_names_and_nan_apart(self, other: dict[str, torch.Tensor]) -> None:
        with pytest.raises(LawError):
            assert_records_equal({"w": torch.ones(2)}, other)

    def test_a_tolerance_is_a_share_of_what_is_finite(self) -> None:
        big = torch.tensor([1.0, float("inf")])
        with pytest.raises(LawError):
            assert_records_equal(torch.tensor([99.0, float("inf")]), big, rtol=1e-6)
        assert_records_equal(torch.tensor([1.0, float("inf")]), big, rtol=1e-6)
        assert_records_equal(torch.tensor([float("nan")]), torch.tensor([float("nan")]), rtol=1e-6)

    def test_nan_equals_nan(self) -> None:
        assert_records_equal(Window(loss=float("nan")), Window(loss=float("nan")))
        assert_records_equal(torch.tensor([float("nan")]), torch.tensor([float("nan")]))

    def test_records_are_immutable(self) -> None:
        for record in (Progress(), Window(), LossScale(), frame()):
            with pytest.raises(attrs.exceptions.FrozenInstanceError):
                record.epoch = 3  # type: ignore[misc, union-attr]

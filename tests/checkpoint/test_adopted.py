"""A state that was read is taken over by names, or refused with all that does not fit before anything is changed."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from pipeline import AverageWeights, Optimizer, Tensors, TrainState, chain, fold, init, scan
from pipeline.checkpoint import Checkpoint, CheckpointStore
from pipeline.checkpoint._adopted import adopted
from pipeline.errors import StateMismatchError
from pipeline.testing import assert_records_equal
from tests.checkpoint.cases import a_checkpoint, batches, started, training
from tests.laws.cases import Tied, make_batches, make_model, make_step


def read_back(state: TrainState) -> TrainState:
    return Checkpoint.put_together(Checkpoint(state).taken_apart()).state


@pytest.mark.parametrize("owned", [True, False], ids=["in place", "in a copy"])
def test_what_is_adopted_is_what_was_read(owned: bool) -> None:
    loaded = read_back(a_checkpoint().state)
    model, _, template = started(seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = adopted(template.owned() if owned else template.borrowed(), loaded)
    assert_records_equal(state, loaded)
    assert (state.params["0.weight"] is model[0].weight) == owned
    changed = any(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert changed == owned


def test_what_is_adopted_hangs_on_nothing_that_was_read() -> None:
    loaded = read_back(a_checkpoint().state)
    state = adopted(started()[2].owned(), loaded)
    then = state.copy()
    for tensor in (*loaded.params.flat, *loaded.optimizer.tensors.flat, *loaded.window.grads.flat):
        tensor.detach().fill_(7)
    assert_records_equal(state, then)


def test_what_is_frozen_there_is_frozen_here() -> None:
    _, _, frozen = started()
    frozen.params["0.weight"].requires_grad_(False)
    model, _, template = started(seed=1)
    adopted(template.owned(), read_back(frozen))
    assert not model[0].weight.requires_grad
    assert model[4].weight.requires_grad


class Ordered(nn.Module):
    """Two layers of one shape, declared in one order or the other."""

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(6, 6, bias=False))
        self.head = nn.Linear(6, 3)
        for i, name in enumerate(sorted(names)):
            nn.init.constant_(getattr(self, name).weight, 0.01 * (i + 1))
        nn.init.constant_(self.head.weight, 0.1)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(torch.tanh(self.a(x))))


def test_of_a_model_declared_in_another_order_all_goes_to_its_name() -> None:
    given, momentum = make_batches(5), Optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)

    def begun(names: tuple[str, str]) -> tuple[Any, TrainState]:
        model = Ordered(names)
        step = chain(make_step(model, 2, momentum, None), AverageWeights(decay=0.5))
        return step, init(step, model)

    step, state = begun(("a", "b"))
    midway = next(now.copy() for now, _ in scan(step, state, given) if now.progress.micro_steps == 3)
    assert midway.window.micro_batches == 1
    step, state = begun(("a", "b"))
    straight = fold(step, adopted(state.borrowed(), read_back(midway)), given[3:]).state
    step, state = begun(("b", "a"))
    there = adopted(state.borrowed(), read_back(midway))
    assert list(there.window.grads) == list(there.slots["average"]) == list(there.params) == list(state.params)
    swapped = fold(step, there, given[3:]).state
    for ours, theirs in ((swapped.params, straight.params), (swapped.slots["average"], straight.slots["average"])):
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-7)
    momenta = [{name: s.optimizer.of(name)["momentum_buffer"] for name in s.params} for s in (straight, swapped)]
    assert not torch.allclose(momenta[0]["a.weight"], momenta[0]["b.weight"])
    for name, buffer in momenta[0].items():
        torch.testing.assert_close(momenta[1][name], buffer, rtol=1e-5, atol=1e-7)


def test_tied_weights_are_one_in_a_checkpoint_and_stay_one() -> None:
    model = make_model("tied")
    step = make_step(model)
    run = fold(step, init(step, model), make_batches(4))
    written = Checkpoint(run.state).taken_apart()
    assert "params/first.weight" in written.tensors
    assert not any("second.weight" in name for name in written.tensors)
    other = Tied()
    adopted(init(make_step(other), other).owned(), read_back(run.state))
    assert other.second.weight is other.first.weight
    assert torch.equal(other.first.weight, model.first.weight)


def test_what_does_not_fit_is_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    training(tmp_path, updates=2)
    wider = nn.Sequential(
        OrderedDict(
            {
                "0": nn.Linear(4, 7),
                "1": nn.BatchNorm1d(7),
                "3": nn.Identity(),
                "4": nn.Linear(7, 3).double(),
                "5": nn.Linear(3, 3),
            }
        )
    )
    step = make_step(wider)
    state = init(step, wider)
    before = {name: tensor.clone() for name, tensor in wider.state_dict().items()}
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    with pytest.raises(StateMismatchError, match="load_weights") as failure:
        fold(step, state, make_batches(3), store=tmp_path, resume="latest")
    error = failure.value
    assert error.missing == ["5.weight", "5.bias"]
    assert error.unexpected == ["loss scale", "slot average", "slot average count"]
    assert "0.weight (float32 (6, 4), here float32 (7, 4))" in error.differing
    assert "1.running_mean (float32 (6,), here float32 (7,))" in error.differing
    assert "4.bias (float32 (3,), here float64 (3,))" in error.differing
    assert "1.num_batches_tracked" not in str(error.differing)
    for name, tensor in wider.state_dict().items():
        assert torch.equal(before[name], tensor)
    assert not state.params.is_stale  # it was not taken, and can be used
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == kept


def test_an_average_of_other_names_or_another_kind_does_not_fit() -> None:
    state = a_checkpoint().state
    for other in (Tensors({"0.weight": torch.zeros(6, 4)}), {"0.weight": torch.zeros(6, 4)}):
        loaded = read_back(attrs.evolve(state, slots={**state.slots, "average": other}))
        with pytest.raises(StateMismatchError) as failure:
            adopted(started()[2].owned(), loaded)
        assert "slot average/4.bias" in failure.value.missing


def test_a_slot_of_a_transform_of_ones_own_may_have_grown() -> None:
    _, _, template = started()
    history = attrs.evolve(template, slots={**template.slots, "history": torch.zeros(0)})
    grown = attrs.evolve(template.copy(), slots={**template.copy().slots, "history": torch.ones(5)})
    assert torch.equal(adopted(history.owned(), read_back(grown)).slots["history"], torch.ones(5))


def test_a_checkpoint_of_another_dtype_is_refused(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).save(a_checkpoint())
    model, step, _ = started()
    state = init(step, model.double())
    with pytest.raises(StateMismatchError, match="float32"):
        fold(step, state, [], store=tmp_path, resume="latest")


def test_a_loss_scale_that_is_asked_for_or_not_has_to_be_there_or_not(tmp_path: Path) -> None:
    training(tmp_path / "scaled", updates=2)
    model, step, state = started()
    without = attrs.evolve(state, loss_scale=None)
    with pytest.raises(StateMismatchError) as failure:
        fold(step, without, batches(), store=tmp_path / "scaled", resume="latest")
    assert failure.value.unexpected == ["loss scale"]
    fold(step, without, batches(), store=tmp_path / "not scaled")
    with pytest.raises(StateMismatchError) as failure:
        fold(step, init(step, model, loss_scale=state.loss_scale), [], store=tmp_path / "not scaled", resume="latest")
    assert failure.value.missing == ["loss scale"]

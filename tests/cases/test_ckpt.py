"""Snapshots in memory: a kept record is not a live reference. (What is written to disk is not tested here.)"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipeline import LossScale, Optimizer, Run, TrainState, fold, init, scan, supervised
from pipeline.errors import StaleStateError
from pipeline.transform import Chain
from tests.cases.probe import bits, step_of


def setting(optimizer: Optimizer, *, scaled: bool, every: int) -> tuple[nn.Module, Chain, TrainState]:
    """A model with buffers and dropout, its step and its first state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 2))
    step = step_of(model, supervised(nn.functional.cross_entropy), optimizer, every=every, max_norm=1.0)
    # An interval of 2: the scale itself moves while the record is kept.
    state = init(step, model, seed=3, loss_scale=LossScale(scale=256.0, interval=2) if scaled else None)
    return model, step, state


def batches(n: int, first: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(8, 4, generator=generator), torch.randint(2, (8,), generator=generator)) for _ in range(first + n)
    ]
    return made[first:]


OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: Optimizer(torch.optim.SGD, lr=0.1),
    "momentum": lambda: Optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda: Optimizer(torch.optim.Adam, lr=0.1, amsgrad=True),
    "adamw": lambda: Optimizer(torch.optim.AdamW, lr=0.1, foreach=False),
    "adagrad": lambda: Optimizer(torch.optim.Adagrad, lr=0.1),
}

each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
with_and_without_scale = pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaled"])


def kept_at(state: TrainState, step: Chain, micro_steps: int, total: int, *, donate: bool) -> tuple[TrainState, dict]:
    """The record after `micro_steps`, kept while the run went on to `total`, and its bits when it was kept."""
    kept: TrainState | None = None
    then = {}
    for now, _ in scan(step, state, batches(total), donate=donate):
        if now.progress.micro_steps == micro_steps and kept is None:
            kept = now.copy() if donate else now
            then = bits(kept)
    assert kept is not None
    return kept, then


@each_optimizer
@with_and_without_scale
@pytest.mark.parametrize("donate", [True, False], ids=["a copy of a donated state", "the state itself, not donated"])
@pytest.mark.parametrize(("every", "micro_steps"), [(1, 3), (2, 7)], ids=["at an update", "inside a window"])
def test_ckpt_4_a_kept_record_stays_as_it_was(
    optimizer: Callable[[], Optimizer], scaled: bool, donate: bool, every: int, micro_steps: int
) -> None:
    _, step, state = setting(optimizer(), scaled=scaled, every=every)
    kept, then = kept_at(state, step, micro_steps, micro_steps + 5 * every, donate=donate)
    assert kept.progress.updates == 3
    assert kept.window.micro_batches == micro_steps % every
    assert bits(kept) == then
    # Nor is what is kept so poor that it could not have changed.
    assert any(name.startswith("buffer") for name in then)
    assert scaled == (then["loss_scale"] is not None)
    assert any(name.startswith("sum") for name in then) == (every == 2)


@each_optimizer
@with_and_without_scale
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("donate", [True, False], ids=["donated", "copied"])
def test_ckpt_4_two_folds_from_one_kept_record_are_equal_and_equal_to_going_on(
    optimizer: Callable[[], Optimizer], scaled: bool, every: int, donate: bool
) -> None:
    _, step, state = setting(optimizer(), scaled=scaled, every=every)
    whole = fold(step, state, batches(12)).state
    _, step, state = setting(optimizer(), scaled=scaled, every=every)
    kept, then = kept_at(state, step, 7, 12, donate=True)

    def go_on() -> Run:
        return fold(step, kept.copy() if donate else kept, batches(5, first=7), donate=donate)

    first, second = go_on(), go_on()
    assert bits(kept) == then
    assert bits(first.state) == bits(second.state)
    # The whole run has the same numbers, and the same count of epochs: each fold here ends one.
    assert bits(first.state) == bits(whole)


def test_ckpt_4_a_donated_state_kept_without_a_copy_is_refused_and_not_silently_new() -> None:
    _, step, state = setting(OPTIMIZERS["adam"](), scaled=False, every=1)
    seen = [now for now, _ in scan(step, state, batches(8))]
    kept = seen[2]
    with pytest.raises(StaleStateError, match=r"state\.copy\(\)"):
        kept.params["0.weight"]
    with pytest.raises(StaleStateError):
        kept.buffers["1.running_mean"]
    with pytest.raises(StaleStateError):
        _ = kept.optimizer.tensors
    with pytest.raises(StaleStateError):
        fold(step, kept, batches(1))


def test_ckpt_4_the_best_weights_kept_are_those_that_the_module_gets_back() -> None:
    model, step, state = setting(OPTIMIZERS["momentum"](), scaled=False, every=1)
    kept, then = kept_at(state, step, 3, 8, donate=True)
    last = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    assert not torch.equal(last["0.weight"], kept.params["0.weight"])
    kept.load_into(model)
    for name, tensor in {**kept.params, **kept.buffers}.items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert bits(kept) == then


def test_ckpt_4_what_is_done_to_the_module_by_hand_does_not_reach_a_copy() -> None:
    model, _, state = setting(OPTIMIZERS["sgd"](), scaled=False, every=1)
    kept = state.copy()
    then = bits(kept)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7)
    assert bits(kept) == then

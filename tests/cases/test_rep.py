"""Reproducibility: watching a run does not change it, and a run leaves the random state of its surroundings alone."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pipeline import (
    Epochs,
    Evaluation,
    EveryEpoch,
    EveryUpdates,
    Forward,
    Frame,
    apply,
    chain,
    fold,
    init,
    scan,
    stream,
    supervised,
    tap,
)
from pipeline.errors import SettingError
from pipeline.events import Event
from pipeline.monitor import Monitor
from pipeline.optim import Optimizer
from pipeline.transform import Chain
from tests.cases.probe import Recorder, all_monitors, bits, step_of
from tests.stream.cases import Counted
from tests.stream.work import Numbers, tokens

both_ways = pytest.mark.parametrize("donate", [True, False], ids=["donated", "copied"])

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Items with augmentation drawn from torch's global generator."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i] + 0.1 * torch.randn(3), Y[i]


def setting() -> tuple[nn.Module, Chain, list[Tensor]]:
    """A model with dropout and BatchNorm, its step, and the inputs of the batches that it is trained on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    seen: list[Tensor] = []
    loss = supervised(nn.functional.mse_loss, measures={"error": lambda out, y: (out - y).abs().mean()})

    def watched(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
        if torch.is_grad_enabled():
            seen.append(batch[0].clone())
        return loss(model, batch)

    return model, step_of(model, watched, Optimizer(torch.optim.AdamW, lr=0.01), every=2), seen


def train_loader(augmented: bool = True) -> DataLoader[Any]:
    return DataLoader(Noisy() if augmented else TensorDataset(X, Y), batch_size=6, shuffle=True)


def validation(model: nn.Module, when: EveryEpoch | EveryUpdates | None = None, name: str = "val") -> Evaluation:
    """An evaluation that draws: an unshuffled loader draws a seed, the augmentation draws, and so does its loss."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0] + torch.randn_like(batch[0])), batch[1])

    return Evaluation(Forward(model, loss), DataLoader(Noisy(), batch_size=10), when or EveryEpoch(), name)


def trained(
    *,
    donate: bool = True,
    augmented: bool = True,
    evaluations: Callable[[nn.Module], Iterable[Evaluation]] = lambda model: (),
    watchers: Iterable[Monitor] = (),
    sinks: Iterable[Any] = (),
    publish_every: int = 10,
    trials: int = 0,
) -> tuple[dict[str, Any], list[bytes]]:
    """The final state's bits, and the inputs of every training batch."""
    model, step, seen = setting()
    state = init(step, model, seed=5)
    for _ in range(trials):
        validation(model).run(state)
    run = fold(
        step,
        state,
        train_loader(augmented),
        donate=donate,
        until=Epochs(3),
        evaluations=evaluations(model),
        monitors=watchers,
        sinks=sinks,
        publish_every=publish_every,
    )
    return bits(run.state), [batch.numpy().tobytes() for batch in seen]


def test_rep_1_epochs_are_shuffled_and_the_seed_matters() -> None:
    # Without this the tests below would compare constants.
    model, step, seen = setting()
    fold(step, init(step, model, seed=5), train_loader(augmented=False), until=Epochs(2))
    assert len(seen) == 8
    first, second = torch.cat(seen[:4]), torch.cat(seen[4:])
    assert not torch.equal(first, second)
    assert torch.equal(first.sort(0).values, second.sort(0).values)
    model, step, other = setting()
    fold(step, init(step, model, seed=6), train_loader(augmented=False), until=Epochs(2))
    assert not torch.equal(torch.cat(other[:4]), first)


def test_rep_1_the_surroundings_do_not_matter() -> None:
    first = trained()
    torch.manual_seed(99)
    torch.rand(7)
    assert trained() == first


@both_ways
@pytest.mark.parametrize(
    "evaluations",
    [
        lambda model: [validation(model)],
        lambda model: [validation(model, EveryUpdates(1))],
        lambda model: [validation(model, EveryUpdates(3)), validation(model, EveryEpoch(2), "test")],
    ],
    ids=["every epoch", "every update", "two of them"],
)
def test_rep_1_an_evaluation_does_not_move_the_training(
    evaluations: Callable[[nn.Module], list[Evaluation]], donate: bool
) -> None:
    assert trained(donate=donate, evaluations=evaluations) == trained(donate=donate)


@pytest.mark.parametrize("trials", [0, 1, 2])
def test_rep_1_trial_evaluations_before_the_run_do_not_move_it(trials: int) -> None:
    assert trained(trials=trials, evaluations=lambda model: [validation(model)]) == trained()


@pytest.mark.parametrize("monitor", [*all_monitors(), None], ids=lambda m: "all of them" if m is None else m.name)
def test_rep_1_a_monitor_does_not_move_the_training(monitor: Monitor | None) -> None:
    watchers = all_monitors() if monitor is None else [monitor]
    watched = trained(watchers=watchers, evaluations=lambda model: [validation(model)])
    assert watched == trained(evaluations=lambda model: [validation(model)])


@pytest.mark.parametrize("publish_every", [1, 3, 1000])
def test_rep_1_how_often_events_are_published_does_not_matter(publish_every: int) -> None:
    assert trained(sinks=[Recorder()], publish_every=publish_every) == trained()


class Drawing:
    """A sink that draws from the global generator, as one that samples pictures to show does."""

    def write(self, event: Event) -> None:
        torch.rand(3)

    def close(self) -> None: ...


def test_rep_1_a_sink_that_draws_does_not_move_the_training() -> None:
    assert trained(sinks=[Drawing()], publish_every=1) == trained(publish_every=1)


def test_rep_1_nor_does_a_look_at_the_end_of_the_step_that_draws() -> None:
    # It comes after the last draw of its own step, and before the stream draws for the next batch.
    def scanned(*looks: Callable[[Frame], object]) -> list[bytes]:
        model, step, seen = setting()
        step = chain(step, *map(tap, looks))
        fold(step, init(step, model, seed=5), train_loader(), until=Epochs(2))
        return [batch.numpy().tobytes() for batch in seen]

    def draw(frame: Frame) -> None:
        torch.rand(3)

    assert scanned(draw) == scanned()


def test_rep_1_nor_does_a_second_loader_between_the_items_of_a_scan() -> None:
    def scanned(between: bool) -> tuple[dict[str, Any], list[bytes]]:
        model, step, seen = setting()
        last = init(step, model, seed=5)
        for now, _ in scan(step, last, train_loader(), until=Epochs(2)):
            last = now
            if between:
                list(DataLoader(TensorDataset(X), batch_size=4, shuffle=True))
        return bits(last), [batch.numpy().tobytes() for batch in seen]

    assert scanned(True) == scanned(False)


def test_rep_1_scan_and_fold_draw_the_same() -> None:
    model, step, seen = setting()
    *_, (state, _) = scan(step, init(step, model, seed=5), train_loader(), until=Epochs(3))
    assert (bits(state), [batch.numpy().tobytes() for batch in seen]) == trained()


# -- the generators of the surroundings ------------------------------------------------------------


def surroundings() -> tuple[Any, ...]:
    """Where every global generator stands."""
    kind, keys, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), kind, bytes(np.asarray(keys)), *rest


def set_surroundings() -> None:
    torch.manual_seed(123)
    random.seed(123)
    np.random.seed(123)
    torch.rand(5)
    random.random()
    np.random.rand()


@both_ways
def test_rep_1_a_fold_leaves_every_global_generator_as_it_was(donate: bool) -> None:
    model, step, _ = setting()
    state = init(step, model)
    set_surroundings()
    before = surroundings()
    fold(
        step,
        state,
        train_loader(),
        donate=donate,
        until=Epochs(2),
        evaluations=[validation(model)],
        monitors=all_monitors(),
        sinks=[Recorder()],
    )
    assert surroundings() == before


@both_ways
def test_rep_1_a_scan_leaves_them_so_between_its_items_and_after_the_last(donate: bool) -> None:
    model, step, _ = setting()
    state = init(step, model)
    set_surroundings()
    before = surroundings()
    items = 0
    for _ in scan(step, state, train_loader(), donate=donate, evaluations=[validation(model)]):
        items += 1
        assert surroundings() == before
    assert items >= 4
    assert surroundings() == before


def test_rep_1_a_scan_that_is_abandoned_leaves_them_so() -> None:
    model, step, _ = setting()
    state = init(step, model)
    set_surroundings()
    before = surroundings()
    for _ in scan(step, state, train_loader()):
        break
    assert surroundings() == before


def test_rep_1_apply_leaves_them_so_and_draws_the_same_each_time() -> None:
    model, step, _ = setting()
    state = init(step, model)
    set_surroundings()
    before = surroundings()
    first, _ = apply(step, state, (X[:6], Y[:6]))
    assert surroundings() == before
    torch.rand(3)
    second, _ = apply(step, state, (X[:6], Y[:6]))
    assert bits(first) == bits(second)


def test_rep_1_an_evaluation_by_hand_leaves_them_so() -> None:
    model, step, _ = setting()
    state = init(step, model)
    set_surroundings()
    before = surroundings()
    first = validation(model).run(state)
    assert surroundings() == before
    assert validation(model).run(state).values == first.values


@both_ways
def test_rep_1_a_fold_that_fails_leaves_them_so(donate: bool) -> None:
    model, step, _ = setting()
    state = init(step, model)
    set_surroundings()
    before = surroundings()
    with pytest.raises(ValueError, match="not enough values"):
        fold(step, state, [(X[:6], Y[:6]), (X[:6],)], donate=donate)
    assert surroundings() == before


# -- streams ---------------------------------------------------------------------------------------


def test_rep_1_reading_a_stream_draws_from_no_global_generator() -> None:
    set_surroundings()
    before = surroundings()
    train, held_out = (stream.batches(Noisy(), 6, shuffle=True, seed=seed) for seed in (1, 2))
    first = [batch[0] for batch in train]
    assert surroundings() == before
    train.begin()
    again = []
    for batch in train:
        again.append(batch[0])
        next(held_out, None)
        torch.rand(3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_rep_1_a_fold_over_a_stream_is_moved_by_no_evaluation() -> None:
    def trained(*evaluations: Evaluation) -> dict[str, Any]:
        model, step, _ = setting()
        batches = stream.batches(Noisy(), 6, shuffle=True, seed=1)
        return bits(fold(step, init(step, model, seed=5), batches, evaluations=evaluations).state)

    model, _, _ = setting()
    assert trained(validation(model, EveryUpdates(1))) == trained()


def test_rep_2_what_ranks_and_workers_draw_differs_and_is_the_same_in_a_second_run() -> None:
    def draws() -> list[list[int]]:
        ranks = [
            stream.map(stream.shard(range(12), rank, 2), tokens, seed=40, workers=stream.Threads(2)) for rank in (0, 1)
        ]
        found = [[number for _, number in node] for node in ranks]
        for node in ranks:
            node.close()
        return found

    first = draws()
    assert len({number for rank in first for number in rank}) == 12
    assert draws() == first


@pytest.mark.parametrize(
    "workers", [None, stream.Threads(2), stream.Processes(2)], ids=["none", "threads", "processes"]
)
def test_rep_3_three_epochs_are_three_orders_and_the_same_three_in_five_runs(workers: Any) -> None:
    def orders(workers: Any) -> list[list[int]]:
        with stream.batches(Numbers(50), 5, shuffle=True, seed=9, workers=workers, collate=list) as batches:
            return [[item for batch in batches for item in batch] for _ in range(3)]

    expected = orders(None)
    assert len({tuple(order) for order in expected}) == 3
    assert all(sorted(order) == list(range(50)) for order in expected)
    assert all(orders(workers) == expected for _ in range(5 if workers is not None else 1))


def test_rep_3_an_iterable_is_told_its_epoch_by_lasting_workers_too() -> None:
    with stream.map(Counted(3), str, workers=2) as node:
        assert [[*node] for _ in range(2)] == [["(0, 0)", "(0, 1)", None], ["(1, 0)", "(1, 1)", None]]


def test_rep_4_a_set_has_no_order_and_is_refused() -> None:
    for data in ({"b", "a"}, frozenset({"b"}), {"a": 1}.keys()):
        with pytest.raises(SettingError, match=r"an order of its own.*sorted"):
            stream.source(data)

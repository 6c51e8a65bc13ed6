"""Checkpoints: never half of one, the newest and the best never deleted, all of the state in them and no code, and each
tensor under its name. And snapshots in memory: a kept record is not a live reference.
"""

import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline import LossScale, Optimizer, Run, TrainState, Updates, fold, init, monitors, scan, supervised
from pipeline.checkpoint import Checkpoint, CheckpointStore, CheckpointWarning, load_checkpoint
from pipeline.errors import CheckpointError, DamagedCheckpointError, StaleStateError
from pipeline.transform import Chain
from tests.cases.probe import bits, step_of
from tests.checkpoint.cases import at
from tests.checkpoint.test_faults import CUTS, no_file_beyond
from tests.checkpoint.test_hostile import Hostile


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

# -- CKPT-1 ----------------------------------------------------------------------------------------


def saving(folder: Path, until: int) -> Run:
    _, step, state = setting(OPTIMIZERS["adam"](), scaled=True, every=1)
    watch = [monitors.SaveEvery(updates=1)]
    return fold(step, state, batches(9), until=Updates(until), monitors=watch, store=folder, resume="latest")


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_ckpt_1_a_half_written_one_is_reported_passed_over_and_replaced(
    cut: Callable[[int], int], tmp_path: Path
) -> None:
    whole = saving(tmp_path / "whole", 5)
    saving(tmp_path, 4)
    store = CheckpointStore(tmp_path)
    newest = store.list()[-1].path
    for file in newest.iterdir():
        os.truncate(file, cut(file.stat().st_size))
    (store.path / ".0000000005.partial").mkdir()
    (store.path / ".0000000005.partial" / "state.json").write_text("{")
    with pytest.raises(DamagedCheckpointError):
        load_checkpoint(newest)
    with pytest.warns(CheckpointWarning, match=f"passed over: .*{newest.name} is damaged"):
        run = saving(tmp_path, 5)
    assert bits(run.state) == bits(whole.state)
    assert [saved.update for saved in store.list()] == [3, 4, 5]
    assert load_checkpoint(newest).state.progress.updates == 4
    assert list(store.path.glob(".*.partial")) == []


def test_ckpt_1_a_save_that_fails_leaves_nothing_half_written(tmp_path: Path) -> None:
    saving(tmp_path, 2)
    store = CheckpointStore(tmp_path)
    before = sorted(store.path.iterdir())
    with no_file_beyond(200), pytest.raises(CheckpointError):
        saving(tmp_path, 4)
    assert sorted(store.path.iterdir()) == before
    assert store.load().state.progress.updates == 2


# -- CKPT-2 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [3, 1])
def test_ckpt_2_the_last_of_this_run_and_its_best_are_kept_and_what_is_not_its_own(limit: int, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=limit, best="val_loss")
    CheckpointStore(tmp_path / "other").save(at(5000, run="another"))
    store.path.mkdir()
    shutil.copytree(tmp_path / "other" / "checkpoints" / "0000005000", store.path / "0000005000")
    foreign = ["step-7", "0000000009.bak", "notes", "900"]
    for name in foreign:
        (store.path / name).mkdir()
    (store.path / "0000000011").write_text("a file")
    for n, loss in ((900, 0.1), (1000, 0.5), (10_000, 0.4), (10_001, 0.3), (10_002, 0.2)):
        path = store.save(at(n, run="this", measures={"val_loss": loss}))
        for folder in store.path.iterdir():
            os.utime(folder, (0, 0))  # file times tell nothing
        own = [saved.micro_step for saved in store.list() if saved.run == "this"]
        assert path.is_dir()
        assert own[-1] == n
        assert 900 in own
        assert len(own) <= limit + 1
    assert own == [900, *[10_000, 10_001, 10_002][-limit:]]
    assert {*foreign, "0000000011", "0000005000"} < {folder.name for folder in store.path.iterdir()}


def test_ckpt_2_a_run_that_goes_on_leaves_alone_what_another_has_left_there(tmp_path: Path) -> None:
    saving(tmp_path, 3)
    saving(tmp_path / "other", 2)
    store = CheckpointStore(tmp_path)
    shutil.copytree(tmp_path / "other" / "checkpoints" / "0000000001", store.path / "0000000001", dirs_exist_ok=True)
    saving(tmp_path, 6)
    assert [saved.update for saved in store.list()] == [1, 4, 5, 6]


# -- CKPT-3 ----------------------------------------------------------------------------------------


@attrs.frozen
class Drawing:
    """A transform that keeps where generators of its own stand, in plain values."""

    def init(self, state: TrainState) -> TrainState:
        kept = {
            "python": random.Random(5).getstate(),
            "numpy": np.random.default_rng(5).bit_generator.state,
            "numpy, the old way": tuple(
                part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.RandomState(5).get_state()
            ),
            "torch": torch.Generator().manual_seed(5).get_state(),
        }
        return attrs.evolve(state, slots={**state.slots, "generators": kept})

    def __call__(self, frame: Any) -> Any:
        return frame


def streams(kept: Any) -> list[Any]:
    """What the generators draw next."""
    python, new, torchs = random.Random(), np.random.default_rng(), torch.Generator()
    python.setstate(kept["python"])
    new.bit_generator.state = kept["numpy"]
    old = np.random.RandomState()
    old.set_state(kept["numpy, the old way"])
    torchs.set_state(kept["torch"])
    return [python.random(), new.random(), old.rand(), float(torch.rand((), generator=torchs))]


def test_ckpt_3_the_whole_state_is_read_with_no_list_of_what_is_safe(tmp_path: Path) -> None:
    _, step, _ = setting(OPTIMIZERS["adam"](), scaled=True, every=2)
    model, _, _ = setting(OPTIMIZERS["adam"](), scaled=True, every=2)
    state = Drawing().init(init(step, model, loss_scale=LossScale()))
    expected = streams(state.slots["generators"])
    watch = [monitors.MeanLoss(), monitors.Quantiles(), monitors.GradNorm()]
    run = fold(step, state, batches(5), monitors=watch, store=tmp_path)
    found = CheckpointStore(tmp_path).load()
    assert streams(found.state.slots["generators"]) == expected
    assert found.state.loss_scale == run.state.loss_scale
    assert found.accumulators.keys() == run.results.keys()
    assert {path.suffix for path in tmp_path.rglob("*.*") if path.is_file()} == {"", ".json", ".safetensors"}


def test_ckpt_3_an_array_of_numpy_is_refused_with_what_to_keep_instead(tmp_path: Path) -> None:
    with_array = attrs.evolve(at(1).state, slots={"generator": np.random.RandomState(5).get_state()})
    with pytest.raises(CheckpointError, match=r"slots/generator/1 .* ndarray\. Keep numbers"):
        CheckpointStore(tmp_path).save(Checkpoint(with_array))


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "tensors-00000.safetensors"])
def test_ckpt_3_a_hostile_pickle_is_refused_and_does_not_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = CheckpointStore("run").save(at(1))
    (path / name).write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(DamagedCheckpointError):
        load_checkpoint(path)
    assert not Path("it ran").exists()


# -- CKPT-4 ----------------------------------------------------------------------------------------

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


# -- CKPT-5 ----------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two parameters of one shape, declared in one order or the other."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(2)))

    def forward(self, pulls: tuple[float, float]) -> Tensor:
        return pulls[0] * self.p1.sum() + pulls[1] * self.p2.sum()


def test_ckpt_5_momentum_goes_to_the_parameter_of_its_name(tmp_path: Path) -> None:
    def run(*names: str, until: int) -> TrainState:
        model = Two(*names)
        optimizer = Optimizer(torch.optim.SGD, lr=0.0, momentum=0.5)
        step = step_of(model, lambda model, pulls: model(pulls), optimizer)
        pulls = [(1.0, 5.0), (0.0, 0.0)]
        return fold(step, init(step, model), pulls, until=Updates(until), store=tmp_path, resume="latest").state

    first = run("p1", "p2", until=1)
    assert first.optimizer.of("p1")["momentum_buffer"].tolist() == [1.0, 1.0]
    swapped = run("p2", "p1", until=2)
    assert swapped.optimizer.of("p1")["momentum_buffer"].tolist() == [0.5, 0.5]
    assert swapped.optimizer.of("p2")["momentum_buffer"].tolist() == [2.5, 2.5]

"""A store keeps the newest and the best, gives them back, and belongs to one process at a time."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Tensors, TrainState
from pipeline.checkpoint import Checkpoint, CheckpointStore, CheckpointWarning, Saved, load_checkpoint
from pipeline.checkpoint.saved import Keeping
from pipeline.errors import CheckpointError, SettingError, StoreInUseError
from pipeline.events import BatchSkipped, Event
from pipeline.place import Place
from pipeline.testing import assert_records_equal
from tests.checkpoint.cases import a_checkpoint, at


def micro_steps(store: CheckpointStore) -> list[int]:
    return [saved.micro_step for saved in store.list()]


# -- what is saved comes back -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_comes_back_as_it_was_saved(background: bool, tmp_path: Path) -> None:
    given = a_checkpoint()
    with CheckpointStore(tmp_path, background=background) as store:
        path = store.save(given)
    assert path == tmp_path / "checkpoints" / "0000000003"
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "state.json", "tensors-00000.safetensors"]
    for found in (load_checkpoint(path), store.load(), store.load(path)):
        assert_records_equal(found, given)


def test_what_a_list_tells_is_what_was_saved(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(a_checkpoint(measures={"val_loss": math.nan, "val_best": math.inf}))
    (saved,) = store.list()
    assert repr(saved.measures) == "{'val_loss': nan, 'val_best': inf}"
    size = sum(file.stat().st_size for file in path.iterdir() if file.name != "manifest.json")
    told = attrs.evolve(saved, measures={})
    assert told == Saved(path, 3, 1, 0, 12.5, ("a test",), {}, "this", size)


def test_more_tensors_than_one_file_takes_go_into_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.checkpoint._folder._SHARD", 100)
    given = a_checkpoint()
    path = CheckpointStore(tmp_path).save(given)
    assert len(list(path.glob("tensors-*.safetensors"))) > 5
    assert_records_equal(load_checkpoint(path), given)


def test_tensors_that_share_memory_or_are_no_rows_of_their_own_come_back(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    shared = {"whole": base, "view": base[0], "turned": base.t(), "spread": torch.ones(1).expand(3)}
    given = at(1)
    given = attrs.evolve(given, state=attrs.evolve(given.state, slots={"controller": shared}))
    assert_records_equal(load_checkpoint(CheckpointStore(tmp_path).save(given)), given)


FLOATS = ["bfloat16", "float16", "float32", "float64"]
EIGHTHS = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
INTS = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
BYTES = torch.arange(2, dtype=torch.uint8).repeat(8)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHTHS, *INTS, "complex32", "complex64", "complex128"])
def test_tensors_of_any_dtype_come_back(dtype: str, tmp_path: Path) -> None:
    tensor = BYTES.view(getattr(torch, dtype))
    given, kept = at(1), {"a": tensor, "none": tensor[:0], "one": tensor[0], "seen": tensor.conj()}
    store = CheckpointStore(tmp_path)
    store.save(attrs.evolve(given, state=attrs.evolve(given.state, slots=kept)))
    for name, back in store.load().state.slots.items():
        assert (back.dtype, back.shape) == (kept[name].dtype, kept[name].shape)
        assert bits(back) == bits(kept[name])


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()


def holding_itself() -> list[object]:
    it: list[object] = []
    it.append(it)
    return it


@pytest.mark.parametrize(
    "kept",
    [holding_itself(), 10**5000, {"\ud800": torch.ones(1)}, BYTES.view(torch.int4)],
    ids=["itself", "a huge number", "half a letter", "a dtype that nothing copies"],
)
@pytest.mark.parametrize("background", [False, True])
def test_what_cannot_be_written_is_one_error_and_leaves_nothing(kept: Any, background: bool, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, background=background)
    store.save(at(1))
    with pytest.raises(CheckpointError, match=r"could not be saved|nested too deeply"):
        store.save(at(2, accumulators={"mine": kept}))
    assert sorted(path.name for path in store.path.iterdir()) == [".lock", "0000000001"]


NAMES = ["a/b", "../../up", "/root", "\N{PILE OF POO}\n\0", "", ".", "x" * 10_000, "__metadata__", "is"]


def test_names_of_any_kind_come_back(tmp_path: Path) -> None:
    tensors = {name: torch.tensor([float(place)]) for place, name in enumerate(NAMES)}
    given = Checkpoint(TrainState(Tensors(tensors), slots={"mine": tensors}), accumulators=dict.fromkeys(NAMES, 1))
    assert_records_equal(CheckpointStore(tmp_path).load(CheckpointStore(tmp_path).save(given)), given)


def test_saved_in_the_background_it_is_as_it_was_when_it_was_asked_for(tmp_path: Path) -> None:
    given = a_checkpoint()
    then = given.state.copy()
    with CheckpointStore(tmp_path, background=True) as store:
        store.save(given)
        with torch.no_grad():
            for tensor in (*given.state.params.flat, *given.state.optimizer.tensors.flat, *given.state.buffers.flat):
                tensor.fill_(7)
    assert_records_equal(store.load().state, then)


def test_in_the_background_the_next_one_waits_for_the_one_before(tmp_path: Path) -> None:
    before = threading.active_count()
    with CheckpointStore(tmp_path, background=True, keep_last=9) as store:
        for n in range(1, 6):
            store.save(at(n))
            assert threading.active_count() <= before + 3  # the writer, and its pool
        store.wait()
        assert micro_steps(store) == [1, 2, 3, 4, 5]
    assert threading.active_count() == before


def test_one_of_the_same_place_makes_room_for_the_new_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(at(1, told=1))
    store.save(at(1, told=2))
    assert store.load().told == 2
    assert sorted(path.name for path in store.path.iterdir()) == [".lock", "0000000001"]


@attrs.frozen(kw_only=True, slots=False)
class Scribbled(Event):
    """An event of the user's own."""

    text: str


def test_events_of_the_users_own_come_back_and_other_classes_are_no_matter(tmp_path: Path) -> None:
    @attrs.frozen(kw_only=True, slots=False)
    class Unreadable(Event):
        """One whose annotations name what is nowhere."""

        what: "NoSuchClass"  # type: ignore[name-defined]  # noqa: F821, UP037

    again = attrs.make_class("Scribbled", {}, bases=(Event,), kw_only=True)  # as a notebook defines a class twice
    pending = (Scribbled(micro_step=1, update=1, epoch=0, time=0.0, text="hello"),)
    path = CheckpointStore(tmp_path).save(at(1, pending=pending))
    with pytest.raises(CheckpointError, match="text"):
        load_checkpoint(path)  # the newest of the name counts
    again.__name__ = "Scribbled before"
    assert load_checkpoint(path).pending == pending
    assert Unreadable.__name__ == "Unreadable"


def test_an_event_of_a_class_that_is_defined_nowhere_is_one_error(tmp_path: Path) -> None:
    passing = attrs.make_class("Passing", {}, bases=(Event,), kw_only=True)
    path = CheckpointStore(tmp_path).save(at(1, pending=(passing(micro_step=1, update=1, epoch=0, time=0.0),)))
    passing.__name__ = "Gone"
    with pytest.raises(CheckpointError, match="Passing"):
        load_checkpoint(path)


def test_what_has_no_form_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="monitor 'mine' has no form"):
        store.save(at(1, accumulators={"mine": object()}))
    assert not store.path.exists()


def test_whoever_may_read_a_new_file_may_read_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "new").touch()
    path = CheckpointStore(tmp_path).save(at(1))
    assert {file.stat().st_mode for file in path.iterdir()} == {(tmp_path / "new").stat().st_mode}


# -- what is kept -----------------------------------------------------------------------------------------------------


def saved(n: int, measure: float | None = None) -> Saved:
    measures = {} if measure is None else {"val_loss": measure}
    return Saved(Path(f"{n}"), n, n, 0, 0.0, (), measures, "", 0)


@pytest.mark.parametrize(
    ("keeping", "left"),
    [
        (Keeping(1), [8]),
        (Keeping(3), [6, 7, 8]),
        (Keeping(99), [1, 2, 3, 4, 5, 6, 7, 8]),
        (Keeping(1, "val_loss"), [3, 8]),
        (Keeping(1, "val_loss", 2), [2, 3, 8]),
        (Keeping(1, "val_loss", 3, "max"), [1, 2, 5, 8]),
        (Keeping(1, "val_accuracy"), [8]),
        (Keeping(1, every_updates=3), [3, 6, 8]),
        (Keeping(2, "val_loss", every_updates=4), [3, 4, 7, 8]),
    ],
    ids=repr,
)
def test_the_last_the_best_and_every_nth_are_kept(keeping: Keeping, left: list[int]) -> None:
    measures = [0.9, 0.5, 0.4, math.nan, 0.9, 0.5, None, 0.5]
    found = [saved(n, measure) for n, measure in enumerate(measures, 1)]
    # 0.9 comes twice, and 0.5 three times: of equal ones the earliest is the better.
    assert [one.update for one in keeping.kept(found)] == left


@given(
    st.lists(st.none() | st.floats(), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(["min", "max"]),
)
def test_the_newest_and_the_best_are_never_among_those_that_go(
    measures: list[float | None], last: int, best: int, mode: Any
) -> None:
    found = [saved(n, measure) for n, measure in enumerate(measures)]
    keeping = Keeping(last, "val_loss", best, mode)
    kept = keeping.kept(found)
    assert found[-last:] == [one for one in found[-last:] if one in kept]
    assert all(one in kept for one in keeping.ranked(found)[:best])
    assert len(kept) <= last + best
    numbers = [m for m in measures if m is not None and not math.isnan(m)]
    if numbers:
        assert keeping.ranked(found)[0].measures["val_loss"] == (min(numbers) if mode == "min" else max(numbers))


def test_best_is_the_best_that_is_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=9, best="val_loss")
    for n, measure in enumerate([0.5, 0.2, 0.3], 1):
        store.save(at(n, measures={"val_loss": measure}))
    store.save(at(4))
    assert store.find("best")[0].name == "0000000002"
    (store.path / "0000000002" / "state.json").write_text("")
    with pytest.warns(CheckpointWarning, match="0000000002 is damaged"):
        assert store.find("best")[0].name == "0000000003"


def test_best_of_nothing_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not know what is best"):
        CheckpointStore(tmp_path).load("best")
    store = CheckpointStore(tmp_path, best="val_loss")
    store.save(at(1))
    with pytest.raises(CheckpointError, match="no best checkpoint"):
        store.load("best")


def test_the_order_is_that_of_the_run_and_not_of_the_names(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=9)
    places = [Place(in_epoch=True, read=2), Place(), Place(in_epoch=True)]
    for place in places:  # within an epoch, when it had ended, when the next had started
        store.save(at(9_999_999_999, place=place))
    store.save(at(10_000_000_000))
    found = [path.path.name for path in store.list()]
    assert found == ["9999999999", "9999999999e", "9999999999s", "10000000000"]
    latest = store.latest()
    assert latest is not None
    assert latest.name == "10000000000"
    assert store.is_newest(latest)
    assert not store.is_newest(store.path / found[2])


def test_one_of_another_folder_is_not_the_newest_unless_there_is_none_here(tmp_path: Path) -> None:
    elsewhere = CheckpointStore(tmp_path / "other").save(at(5))
    store = CheckpointStore(tmp_path)
    assert store.is_newest(elsewhere)
    here = store.save(at(1))
    assert not store.is_newest(elsewhere)
    assert store.is_newest(Path(os.path.relpath(here)))  # however its path is written


def test_where_there_is_nothing_there_is_no_latest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "nowhere")
    assert store.latest() is None
    assert store.folders() == []
    assert store.list() == []
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        store.load()
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "nowhere")


# -- one at a time ----------------------------------------------------------------------------------------------------


def test_two_runs_on_one_folder_are_refused_in_this_process_and_in_another(tmp_path: Path) -> None:
    code = """
import sys
from pipeline.checkpoint import CheckpointStore
from pipeline.errors import StoreInUseError
from tests.checkpoint.cases import at
try:
    CheckpointStore(sys.argv[1]).save(at(1))
except StoreInUseError as error:
    print(error)
"""
    with CheckpointStore(tmp_path) as store:
        with pytest.raises(StoreInUseError, match="Another run is saving"):
            CheckpointStore(tmp_path).save(at(1))
        there = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
        assert "Another run is saving" in there.stdout
        store.save(at(2))  # and this one still holds it
    CheckpointStore(tmp_path).save(at(3))
    assert micro_steps(store) == [2, 3]


def test_a_store_that_is_held_already_is_held_by_the_same_once_more(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        with store:
            store.save(at(1))
        with pytest.raises(StoreInUseError):
            CheckpointStore(tmp_path).save(at(1))
    with CheckpointStore(tmp_path):
        pass


def test_interrupted_while_it_waits_the_store_is_held_until_the_writer_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, may_go_on, flush = threading.Event(), threading.Event(), os.fsync

    def slow(handle: int) -> None:
        writing.set()
        assert may_go_on.wait(60)
        flush(handle)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", slow)
    handler = signal.signal(signal.SIGALRM, interrupt)
    store = CheckpointStore(tmp_path, background=True)

    def save() -> None:
        with store:
            store.save(at(1))
            assert writing.wait(60)
            signal.setitimer(signal.ITIMER_REAL, 0.05)  # while the block waits for the writer

    try:
        with pytest.raises(KeyboardInterrupt):
            save()
        with pytest.raises(StoreInUseError):
            CheckpointStore(tmp_path).save(at(2))
    finally:
        signal.signal(signal.SIGALRM, handler)
        may_go_on.set()
    store.wait()
    CheckpointStore(tmp_path).save(at(2))
    assert micro_steps(store) == [1, 2]


def _linger(running: Any, ended: Any) -> None:
    running.set()
    ended.wait(60)


def test_a_worker_that_was_forked_does_not_keep_the_store(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("fork")
    running, ended = processes.Event(), processes.Event()
    with CheckpointStore(tmp_path):
        worker = processes.Process(target=_linger, args=(running, ended))
        worker.start()
        assert running.wait(60)
    CheckpointStore(tmp_path).save(at(1))
    ended.set()
    worker.join()
    assert worker.exitcode == 0


@pytest.mark.parametrize(
    "setting",
    [{"keep_last": 0}, {"keep_last": True}, {"keep_best": -1}, {"keep_every": 0}, {"keep_every": 1.5}, {"mode": "low"}],
    ids=str,
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=f"CheckpointStore.{next(iter(setting))} must be"):
        CheckpointStore(tmp_path, **setting)


def test_a_store_prints_as_it_was_written() -> None:
    assert repr(CheckpointStore("runs/a")) == "CheckpointStore('runs/a')"


def test_a_pending_event_that_is_the_librarys_own_needs_no_class_given(tmp_path: Path) -> None:
    pending = (BatchSkipped(micro_step=1, update=1, epoch=0, time=0.0),)
    path = CheckpointStore(tmp_path).save(at(1, pending=pending))
    assert load_checkpoint(path).pending == pending


def test_a_checkpoint_can_be_taken_apart_and_put_together_without_a_disk() -> None:
    given = a_checkpoint()
    assert_records_equal(Checkpoint.put_together(given.taken_apart()), given)

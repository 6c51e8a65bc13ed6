"""Disks fail, and files are damaged: a checkpoint is whole, or reported and passed over, and never half of one."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pipeline import run_of
from pipeline.checkpoint import Checkpoint, CheckpointStore, CheckpointWarning, load_checkpoint
from pipeline.checkpoint._manifest import MANIFEST, STATE
from pipeline.errors import CheckpointError, DamagedCheckpointError
from pipeline.monitors import SaveEvery
from pipeline.testing import assert_records_equal
from tests.checkpoint.cases import a_checkpoint, at, training


@contextmanager
def no_file_beyond(size: int) -> Generator[None]:
    """The disk is full once a file has that many bytes."""
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.path.iterdir())


def largest(path: Path) -> int:
    return max(file.stat().st_size for file in path.iterdir())


CUTS: dict[str, Callable[[int], int]] = {
    "0": lambda size: 0,
    "10": lambda size: 10,
    "half": lambda size: size // 2,
    "all but one byte": lambda size: size - 1,
}
each_cut = pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
in_both_ways = pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])


@each_cut
@in_both_ways
def test_a_full_disk_is_one_error_and_leaves_the_earlier_ones_and_nothing_else(
    cut: Callable[[int], int], background: bool, tmp_path: Path
) -> None:
    store, first = CheckpointStore(tmp_path, background=background), a_checkpoint(2)
    size = largest(store.save(first))
    with no_file_beyond(cut(size)), pytest.raises(CheckpointError, match=r"could not be saved: .*File too large"):
        store.save(a_checkpoint(3))
    assert names(store) == [".lock", "0000000002"]
    assert_records_equal(store.load().state, first.state)
    store.save(a_checkpoint(3))
    assert names(store) == [".lock", "0000000002", "0000000003"]


@in_both_ways
def test_a_run_whose_disk_is_full_ends_with_that_error_and_goes_on_once_there_is_room(
    background: bool, tmp_path: Path
) -> None:
    whole = training(tmp_path / "whole", store=None, resume=None)
    store = CheckpointStore(tmp_path, background=background)
    monitors = [SaveEvery(updates=1)]
    training(tmp_path, updates=2, store=store, monitors=monitors)
    with no_file_beyond(10), pytest.raises(CheckpointError) as failure:
        training(tmp_path, store=store, monitors=monitors)
    assert 3 <= run_of(failure.value).state.progress.updates <= 4
    assert names(store)[-1] == "0000000004"
    assert_records_equal(training(tmp_path, store=store, monitors=monitors).state, whole.state)


@pytest.mark.parametrize("where", ["runs", "runs/checkpoints", "runs/checkpoints/0000000001"])
def test_a_file_in_the_place_of_a_folder_is_that_error_and_stays(where: str, tmp_path: Path) -> None:
    (tmp_path / where).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / where).write_text("mine")
    with pytest.raises(CheckpointError, match="saved"):
        CheckpointStore(tmp_path / "runs").save(at(1))
    assert (tmp_path / where).read_text() == "mine"


def test_a_folder_that_may_only_be_read_is_that_error(tmp_path: Path) -> None:
    # In a process that is not root, for whom nothing is read-only; what it stands in it need not be able to reach.
    code = """
import os
from pipeline.checkpoint import CheckpointStore
from pipeline.errors import CheckpointError
from tests.checkpoint.cases import at

os.chdir(os.environ["PLACE"])
if not os.getuid():
    os.setuid(65534)
for folder in ("read-only", "saved"):
    try:
        CheckpointStore(folder).save(at(2))
    except CheckpointError as error:
        print(error)
print([saved.path.name for saved in CheckpointStore("saved").list()])
"""
    CheckpointStore(tmp_path / "saved").save(at(1))
    (tmp_path / "read-only").mkdir()
    for folder in (".", "read-only", "saved", "saved/checkpoints"):
        (tmp_path / folder).chmod(0o555)
    root = Path(__file__).parents[2]
    env = {**os.environ, "PLACE": str(tmp_path), "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=False)
    for folder in (".", "saved", "saved/checkpoints", "read-only"):
        (tmp_path / folder).chmod(0o755)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert "read-only/checkpoints cannot be saved to" in first
    assert "saved/checkpoints cannot be saved to" in second
    assert third == "['0000000001']"


def test_an_old_checkpoint_that_cannot_be_deleted_is_that_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(at(1))
    (store.path / ".0000000001.deleted").mkdir()
    (store.path / ".0000000001.deleted" / "in the way").touch()
    with store:  # what a killed process has left is cleared away here
        (store.path / ".0000000001.deleted").mkdir()
        (store.path / ".0000000001.deleted" / "in the way").touch()
        with pytest.raises(CheckpointError, match="could not be deleted"):
            store.save(at(2))
    assert [saved.micro_step for saved in store.list()] == [1, 2]


def two(folder: Path) -> tuple[CheckpointStore, Checkpoint, Path]:
    """A store with two checkpoints: the earlier one, and where the later one lies."""
    store, first = CheckpointStore(folder), a_checkpoint(2)
    store.save(first)
    return store, first, store.save(a_checkpoint(3))


def assert_passed_over(store: CheckpointStore, first: Checkpoint, damaged: Path) -> None:
    """The damaged one is one documented error by itself, and passed over and reported by the store."""
    with pytest.raises(DamagedCheckpointError, match=f"{damaged.name} is damaged"):
        load_checkpoint(damaged)
    with pytest.warns(CheckpointWarning, match=f"passed over: .*{damaged.name} is damaged"):
        assert store.latest() == store.path / "0000000002"
    with pytest.warns(CheckpointWarning, match=f"passed over: .*{damaged.name} is damaged"):
        found = store.load()
    assert_records_equal(found.state, first.state)


FILES = [MANIFEST, STATE, "tensors-00000.safetensors"]
each_file = pytest.mark.parametrize("name", FILES)


@each_file
@each_cut
def test_a_file_that_was_cut_off_is_passed_over(cut: Callable[[int], int], name: str, tmp_path: Path) -> None:
    store, first, second = two(tmp_path)
    os.truncate(second / name, cut((second / name).stat().st_size))
    assert_passed_over(store, first, second)


@each_file
@pytest.mark.parametrize("instead", ["nothing", "a folder", "a pipe", "more"])
def test_a_file_that_is_missing_or_none_is_passed_over(instead: str, name: str, tmp_path: Path) -> None:
    store, first, second = two(tmp_path)
    if instead == "more":
        with (second / name).open("ab") as file:
            file.write(b"}")
    else:
        (second / name).unlink()
        if instead == "a folder":
            (second / name).mkdir()
        elif instead == "a pipe":  # whoever opens it waits for ever
            os.mkfifo(second / name)
    assert_passed_over(store, first, second)


def test_an_empty_folder_is_passed_over(tmp_path: Path) -> None:
    store, first, second = two(tmp_path)
    shutil.rmtree(second)
    second.mkdir()
    assert_passed_over(store, first, second)


@each_file
def test_a_flipped_bit_anywhere_is_found_unless_it_changes_nothing(name: str, tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(a_checkpoint())
    whole, kept = load_checkpoint(path), (path / name).read_bytes()
    places = random.Random(0).sample(range(8 * len(kept)), min(150, 8 * len(kept)))
    if name == MANIFEST:  # one for each of its bytes, too
        places += [8 * byte + byte % 8 for byte in range(len(kept))]
    unseen = 0
    for place in places:
        bad = bytearray(kept)
        bad[place // 8] ^= 1 << place % 8
        (path / name).write_bytes(bad)
        try:
            found = load_checkpoint(path)
        except DamagedCheckpointError:
            continue
        unseen += 1  # such as a letter of an escape in JSON, which may be large or small
        assert json.loads(bad) == json.loads(kept)
        assert_records_equal(found.state, whole.state)
    assert unseen <= (len(places) // 50 if name == MANIFEST else 0)


def test_a_run_goes_on_from_before_a_damaged_checkpoint_and_replaces_it(tmp_path: Path) -> None:
    whole = training(tmp_path / "whole", store=None, resume=None)
    store = CheckpointStore(tmp_path, keep_last=1)
    training(tmp_path, updates=2, store=store, monitors=[SaveEvery(updates=2)])
    kept = shutil.copytree(store.path / "0000000004", tmp_path / "kept")
    training(tmp_path, updates=4, store=store, monitors=[SaveEvery(updates=2)])
    shutil.copytree(kept, store.path / "0000000004")
    damaged = store.path / "0000000008"
    os.truncate(damaged / "tensors-00000.safetensors", 10)
    with pytest.warns(CheckpointWarning, match="0000000008 is damaged"):
        training(tmp_path, updates=3, store=store, monitors=[SaveEvery(updates=3)])
    # The damaged one is newer than what was saved since, and did not push that out.
    assert [saved.micro_step for saved in store.list()] == [6, 8]
    with pytest.warns(CheckpointWarning, match="0000000008 is damaged"):
        run = training(tmp_path, store=store, monitors=[SaveEvery(updates=2)])
    assert_records_equal(run.state, whole.state)
    assert store.latest() == store.path / "0000000012"


def test_where_all_are_damaged_a_run_does_not_begin_anew_in_silence(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    training(tmp_path, updates=2, store=store)
    for saved in store.list():
        (saved.path / STATE).unlink()
    with pytest.warns(CheckpointWarning, match="passed over"), pytest.raises(CheckpointError, match="no whole"):
        training(tmp_path, store=store)


def test_what_a_killed_process_left_is_cleared_away_and_nothing_else(tmp_path: Path) -> None:
    store, outside = CheckpointStore(tmp_path), tmp_path / "outside"
    store.save(at(1))
    outside.mkdir()
    (outside / "kept").touch()
    (store.path / ".0000000002.partial").mkdir()
    (store.path / ".0000000003e.deleted").mkdir()
    (store.path / ".0000000004.partial").symlink_to(outside)
    (store.path / ".0000000005.partial").touch()
    (store.path / ".notes.partial").mkdir()
    with store:
        pass
    assert names(store) == [".lock", ".notes.partial", "0000000001"]
    assert (outside / "kept").exists()


@pytest.mark.parametrize("moment", range(4))
def test_killed_while_one_replaces_another_of_its_place_one_of_them_is_there(moment: int, tmp_path: Path) -> None:
    # Killed before the first, second or third of the renames and deletions, or after all of them.
    code = """
import os, shutil, signal, sys
from pathlib import Path
from pipeline.checkpoint import CheckpointStore
from tests.checkpoint.cases import at

moments = 0

def killing(work):
    def maybe_last(*given, **settings):
        global moments
        if work is rename or given[0].name.endswith(".replaced"):
            if moments == int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGKILL)
            moments += 1
        return work(*given, **settings)
    return maybe_last

store = CheckpointStore(sys.argv[1], keep_last=1)
store.save(at(1, told=1))
rename = Path.rename
Path.rename, shutil.rmtree = killing(rename), killing(shutil.rmtree)
store.save(at(1, told=2))
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", code, str(tmp_path), str(moment)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -signal.SIGKILL
    with CheckpointStore(tmp_path) as store:
        assert names(store) == [".lock", "0000000001"]
        assert store.load().told == (1 if moment < 2 else 2)


def test_where_one_cannot_take_the_place_of_another_that_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, rename = CheckpointStore(tmp_path), Path.rename
    store.save(at(1, told=1))

    def refused(path: Path, to: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError("no room for a name")
        return rename(path, to)

    with monkeypatch.context() as failing:
        failing.setattr(Path, "rename", refused)
        with pytest.raises(CheckpointError, match="no room for a name"):
            store.save(at(1, told=2))
    assert names(store) == [".lock", "0000000001"]
    assert store.load().told == 1


def test_a_background_save_that_fails_hides_no_error_of_the_run(tmp_path: Path) -> None:
    def run() -> None:
        with CheckpointStore(tmp_path, background=True) as store, no_file_beyond(10):
            store.save(at(1))
            assert store._at_work is not None
            assert isinstance(store._at_work.wait(), CheckpointError)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as failure:
        run()
    assert "could not be saved" in failure.value.__notes__[0]


def test_a_tensor_that_is_read_can_be_written_to_and_the_file_stays(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(at(1))
    with torch.no_grad():
        load_checkpoint(path).state.params["w"].fill_(7.0)
    assert torch.equal(load_checkpoint(path).state.params["w"], torch.ones(3))

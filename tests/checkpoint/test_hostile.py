"""A folder that somebody else made, its digests right: nothing outside it is read, and nothing in it is run."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline.__main__ import main
from pipeline.checkpoint import CheckpointStore, CheckpointWarning, load_checkpoint, load_weights
from pipeline.checkpoint._disk import sha256
from pipeline.checkpoint._manifest import MANIFEST, STATE
from pipeline.errors import CheckpointError, CheckpointFormatError, DamagedCheckpointError
from tests.checkpoint.cases import a_checkpoint, started

TENSORS = "tensors-00000.safetensors"
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return CheckpointStore(tmp_path).save(a_checkpoint())


def seal(folder: Path, edit: Edit = lambda manifest: None) -> None:
    """Make the manifest one that agrees with the files, but for what `edit` does to it."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name, sealed in manifest["files"].items():
        sealed["size"], sealed["sha256"] = (folder / name).stat().st_size, sha256(folder / name)
    edit(manifest)
    manifest.pop("sha256", None)
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({**manifest, "sha256": digest}))


def rewrite(folder: Path, edit: Edit) -> None:
    """Change state.json, and let the manifest agree."""
    form = json.loads((folder / STATE).read_text())
    edit(form)
    (folder / STATE).write_text(json.dumps(form))
    seal(folder)


def test_what_is_sealed_anew_without_a_change_is_read(folder: Path) -> None:
    rewrite(folder, lambda form: None)
    assert load_checkpoint(folder).told == 3


def outside(folder: Path) -> Path:
    """A file of tensors that is not the folder's."""
    other = folder.parent / "elsewhere.safetensors"
    other.write_bytes((folder / TENSORS).read_bytes())
    return other


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "{absolute}", "a/../../elsewhere.safetensors", ".", ""])
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str, folder: Path) -> None:
    other = outside(folder)
    name = name.format(absolute=other)
    entry = {"size": other.stat().st_size, "sha256": sha256(other)}
    seal(folder, lambda manifest: manifest["files"].update({name: entry}))
    with pytest.raises(DamagedCheckpointError, match="lists"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", [MANIFEST, STATE, TENSORS])
def test_a_link_in_the_place_of_a_file_is_not_followed(name: str, folder: Path) -> None:
    other = folder.parent / "elsewhere"
    (folder / name).rename(other)
    (folder / name).symlink_to(other)
    with pytest.raises(DamagedCheckpointError, match=r"no regular file"):
        load_checkpoint(folder)


def test_a_link_in_the_place_of_a_checkpoint_is_none_of_the_store(folder: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "other")
    store.path.mkdir(parents=True)
    (store.path / folder.name).symlink_to(folder)
    assert store.list() == []
    assert store.latest() is None
    assert load_checkpoint(store.path / folder.name).told == 3  # named by the user, it is


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


MANIFESTS: dict[str, Edit] = {
    "a huge size": lambda m: m["files"][TENSORS].update(size=1 << 62),
    "a size that is none": lambda m: m["files"][TENSORS].update(size="all"),
    "an infinite size": lambda m: m["files"][TENSORS].update(size=float("inf")),
    "no digest": lambda m: m["files"][TENSORS].pop("sha256"),
    "no state": lambda m: m["files"].pop(STATE),
    "no files": lambda m: m.pop("files"),
    "files in a list": lambda m: m.update(files=[STATE, TENSORS]),
    "no head": lambda m: m.update(head=None),
    "a count that is none": lambda m: m["head"].update(update="two"),
    "a measure that is none": lambda m: m["head"]["measures"].update(val_loss=[]),
}


@pytest.mark.parametrize("edit", MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_that_none_was_written_as_is_damaged_and_in_no_list(
    edit: Edit, folder: Path, tmp_path: Path
) -> None:
    seal(folder, edit)
    with pytest.raises(DamagedCheckpointError):
        load_checkpoint(folder)
    with pytest.warns(CheckpointWarning):
        assert CheckpointStore(tmp_path).latest() is None


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", "1", '"a"', deep(100_000), "\xff", '{"format": 1, "sha256": 1}']
)
def test_a_manifest_that_is_no_object_is_damaged(text: str, folder: Path) -> None:
    (folder / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(DamagedCheckpointError):
        load_checkpoint(folder)


@pytest.mark.parametrize("version", [2, 10**30, 0, "1", None, [1]])
def test_another_format_is_said_and_not_passed_over(version: object, folder: Path, tmp_path: Path) -> None:
    seal(folder, lambda manifest: (manifest.clear(), manifest.update(format=version, contents="of another kind")))
    with pytest.raises(CheckpointFormatError, match="is in format"):
        load_checkpoint(folder)
    with pytest.raises(CheckpointFormatError, match="Read it with a newer one"):
        CheckpointStore(tmp_path).load()


@pytest.mark.parametrize("text", ["", "{", deep(100_000), "\xff"])
def test_a_state_that_is_no_json_is_damaged(text: str, folder: Path) -> None:
    (folder / STATE).write_bytes(text.encode("latin-1"))
    seal(folder)
    with pytest.raises(DamagedCheckpointError):
        load_checkpoint(folder)


def at_place(*path: str, value: object) -> Edit:
    def edit(form: Any) -> None:
        for key in path[:-1]:
            form = form[key]
        form[path[-1]] = value

    return edit


def nested(levels: int) -> Any:
    form: Any = []
    for _ in range(levels):
        form = [form]
    return form


STATES: dict[str, Edit] = {
    "a class by name": at_place(
        "state", "items", "slots", value={"is": "subprocess.Popen", "items": {"args": ["true"]}}
    ),
    "a dunder": at_place("state", "items", "slots", value={"is": "__import__", "items": {"name": "os"}}),
    "a reduced object": at_place("stream", value={"py/reduce": [{"py/function": "os.system"}, ["true"]]}),
    "another class for the state": at_place("state", value={"is": "Progress", "items": {}}),
    "a list for the state": at_place("state", value=[]),
    "text for parameters": at_place("state", "items", "params", value="w"),
    "a number for a count": at_place("state", "items", "progress", "items", "updates", value=None),
    "a tensor that is not there": at_place("stream", value={"is": "tensor", "name": "../../elsewhere"}),
    "a huge sparse shape": at_place(
        "stream",
        value={"is": "sparse", "indices": [[0]], "values": [1], "shape": [1 << 60, 1 << 60], "coalesced": True},
    ),
    "half a complex number": at_place(
        "stream", value={"is": "complex", "parts": {"is": "tensor", "name": "stream/drawn"}}
    ),
    "an event of no class": at_place("pending", value=['{"event": "os.system", "command": "true"}']),
    "an event that is none": at_place("pending", value=["system"]),
    "no place": at_place("place", value=None),
    "a place that is none": at_place("place", "began", value=7),
    "text for a count": at_place("told", value="three"),
    "too deep": at_place("stream", value=nested(900)),
}


@pytest.mark.parametrize("edit", STATES.values(), ids=STATES)
def test_a_state_that_none_was_written_as_is_one_error_with_its_folder(edit: Edit, folder: Path) -> None:
    rewrite(folder, edit)
    with pytest.raises(CheckpointError) as failure:
        load_checkpoint(folder)
    assert str(folder) in f"{failure.value} {getattr(failure.value, '__notes__', '')}"


@pytest.mark.parametrize("edit", [*STATES.values(), dict.clear], ids=[*STATES, "nothing"])
def test_a_state_that_none_was_written_as_is_shown_and_compared_or_one_error(
    edit: Edit, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(folder, edit)
    for arguments in ([folder], [folder, "--against", folder]):
        with suppress(SystemExit):
            main(["checkpoints", *map(str, arguments)])
        told = capsys.readouterr().err
        assert not told or str(folder) in told


def header(entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


SAFETENSORS: dict[str, bytes] = {
    "nothing": b"",
    "a header beyond the file": struct.pack("<Q", 1 << 62) + b"{}",
    "a tensor beyond the file": header({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}),
    "a negative offset": header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-8, -4]}}) + b"0000",
    "no dtype of this world": header({"a": {"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 4]}}) + b"0000",
    "a pickle": pickle.dumps({"a": 1}),
}


@pytest.mark.parametrize("content", SAFETENSORS.values(), ids=SAFETENSORS)
def test_tensors_that_are_none_are_one_error(content: bytes, folder: Path) -> None:
    (folder / TENSORS).write_bytes(content)
    seal(folder)
    with pytest.raises(DamagedCheckpointError, match="cannot be read"):
        load_checkpoint(folder)
    _, _, state = started()
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load_weights(folder / TENSORS, state)


class Hostile:
    """What runs a command where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("it ran",)


def test_a_hostile_pickle_in_the_place_of_any_file_does_not_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (MANIFEST, STATE, TENSORS):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(pickle.dumps(Hostile()))
        if name != MANIFEST:
            seal(folder)
        with pytest.raises(CheckpointError):
            load_checkpoint(folder)
        (folder / name).write_bytes(kept)
        seal(folder)
    assert not Path("it ran").exists()
    pickle.loads(pickle.dumps(Hostile()))
    assert Path("it ran").exists()  # as it would have


def test_nothing_here_knows_how_to_read_or_write_a_pickle() -> None:
    root = Path(__file__).parents[2] / "pipeline"
    for path in (*root.glob("checkpoint/*.py"), root / "_keeper.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {
            name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in [n.name for n in node.names]
        }
        imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not imported & {"pickle", "dill", "cloudpickle", "marshal", "shelve"}, path
        calls = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch"
        }
        assert not calls & {"load", "save"}, path

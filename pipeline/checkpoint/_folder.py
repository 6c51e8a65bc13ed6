"""A checkpoint's folder: safetensors, one JSON file, and a manifest of both that is written last.

    manifest.json            format, sizes and SHA-256 of the others, what a list shows of it, and a digest of all this
    state.json               everything that is no tensor
    tensors-00000.safetensors …

A folder under its own name is whole: it is written under another, flushed to the disk, and renamed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.checkpoint._disk import check_regular, flush, partial, put_in_place, remove, sha256
from pipeline.checkpoint._manifest import (
    MANIFEST,
    STATE,
    Head,
    Manifest,
    Sealed,
    is_tensors,
    read_manifest,
    tensors_name,
)
from pipeline.errors import CheckpointError, DamagedCheckpointError

__all__ = ["Written", "read", "snapshot", "verify", "write", "write_tensors"]

_SHARD = 1 << 26  # bytes of tensors in one file: some are hashed while the next is written
_HASHERS = 4  # files hashed at once


@attrs.frozen(eq=False)
class Written:
    """What lies in a folder: tensors by name, the rest as plain JSON, and what a list shows of it."""

    tensors: Mapping[str, Tensor]
    state: Any
    head: Head


def write(folder: Path, written: Written) -> None:
    """Write the folder, whole or not at all; one that is there already makes room for it.

    Raises: CheckpointError when the disk is full, cannot be written to, or fails, or there is something in it that has
            no form there; nothing is left behind then.
    """
    unfinished = partial(folder)
    try:
        remove(unfinished)
        unfinished.mkdir(parents=True)
        _fill(unfinished, written)
        put_in_place(unfinished, folder)
    except Exception as error:  # of the disk, or of a value or name that JSON or safetensors cannot write
        remove(unfinished)
        raise _not_saved(folder, error) from error
    except BaseException:
        remove(unfinished)
        raise


def _not_saved(folder: Path, error: Exception) -> CheckpointError:
    what = f"{type(error).__name__}: {error}"
    return CheckpointError(f"the checkpoint {folder} could not be saved: {what}. Earlier ones are as they were.")


def snapshot(folder: Path, written: Written) -> Written:
    """What can be written to the folder later: with copies on the host, which leave an accelerator's memory alone.

    Raises: CheckpointError where there is no room for them.
    """
    try:
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in written.tensors.items()}
    except Exception as error:
        raise _not_saved(folder, error) from error
    return attrs.evolve(written, tensors=copies)


def _fill(folder: Path, written: Written) -> None:
    with ThreadPoolExecutor(_HASHERS, thread_name_prefix="checkpoint") as pool:
        sealed: dict[str, Future[Sealed]] = {}
        for number, shard in enumerate(_shards(written.tensors)):
            path = folder / tensors_name(number)
            write_tensors(path, shard)
            sealed[path.name] = pool.submit(_sealed, path)
        (folder / STATE).write_text(json.dumps(written.state, allow_nan=False), encoding="utf-8")
        sealed[STATE] = pool.submit(_sealed, folder / STATE)
        manifest = Manifest({name: future.result() for name, future in sealed.items()}, written.head)
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    flush(folder / MANIFEST)
    flush(folder)


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > _SHARD:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a file of safetensors, which those may read who may read any new file here."""
    path.touch()
    mode = path.stat().st_mode
    save_file(_apart(tensors), path, metadata)
    path.chmod(mode)  # safetensors lets its owner alone read it


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in memory of their own, row by row: safetensors refuses those that share it."""
    seen: set[tuple[str, int]] = set()
    own: dict[str, Tensor] = {}
    for name, given in tensors.items():
        tensor = given.contiguous()
        place = str(tensor.device), tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return own


def _sealed(path: Path) -> Sealed:
    """Size and SHA-256 of a file that now lies on the disk."""
    flush(path)
    return Sealed(path.stat().st_size, sha256(path))


def verify(folder: Path) -> Manifest:
    """The manifest, once every file is found to be as it was written.

    Raises: as `read_manifest`.
    """
    manifest = read_manifest(folder)
    with ThreadPoolExecutor(_HASHERS, thread_name_prefix="checkpoint") as pool:
        problems = pool.map(_problem, [folder / name for name in manifest.files], manifest.files.values())
        for name, problem in zip(manifest.files, problems, strict=True):
            if problem:
                raise DamagedCheckpointError(str(folder), f"{name} {problem}")
    return manifest


def _problem(path: Path, sealed: Sealed) -> str:
    try:
        check_regular(path)
        size = path.stat().st_size
        if size != sealed.size:
            return f"has {size} bytes instead of {sealed.size}"
        return "" if sha256(path) == sealed.sha256 else "is not as it was written"
    except OSError as error:
        return f"cannot be read ({error})"


def read(folder: Path) -> Written:
    """All that lies in the folder, verified. The tensors are the files themselves, mapped into memory.

    Raises: as `read_manifest`.
    """
    manifest = verify(folder)
    tensors: dict[str, Tensor] = {}
    try:
        for name in filter(is_tensors, manifest.files):
            tensors |= load_file(folder / name)
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(str(folder), f"it cannot be read ({error!r})") from error
    return Written(tensors, state, manifest.head)

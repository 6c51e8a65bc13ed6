"""Bytes on the disk: flushed, hashed, put in the place of others, and out of the way when they are removed."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

__all__ = ["check_regular", "clear_away", "discard", "flush", "partial", "put_in_place", "remove", "sha256"]

_LEFT_OVER = re.compile(r"\.(.+)\.(partial|replaced|deleted)")


def partial(path: Path) -> Path:
    """Where what is to lie at `path` is written before it is whole."""
    return path.with_name(f".{path.name}.partial")


def flush(path: Path) -> None:
    """Return when the bytes of a file, or the names in a folder, lie on the disk."""
    if path.is_dir() and os.name != "posix":
        return  # Windows keeps names by itself
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """The digest of a file's bytes, in hexadecimal."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_regular(path: Path) -> None:
    """Raise OSError unless there is a file at `path`, and no link to one."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(f"{path.name} is no regular file")


def put_in_place(new: Path, path: Path) -> None:
    """Let the folder `new` lie at `path`. What lay there is deleted once that is so on the disk."""
    before = path.with_name(f".{path.name}.replaced")
    if path.is_dir():
        path.rename(before)
    try:
        new.rename(path)
    except BaseException:
        if before.is_dir():
            before.rename(path)
        raise
    flush(path.parent)
    remove(before)


def discard(folder: Path) -> None:
    """Delete a folder; under its own name it is there whole, or not at all."""
    gone = folder.with_name(f".{folder.name}.deleted")
    folder.rename(gone)
    remove(gone)


def clear_away(folder: Path, is_ours: Callable[[str], bool]) -> None:
    """Delete what a process that was killed has left of what is ours; what it had not replaced yet comes back."""
    for path in folder.iterdir():
        left = _LEFT_OVER.fullmatch(path.name)
        if left is None or not is_ours(left[1]):
            continue
        if left[2] == "replaced" and not path.with_name(left[1]).exists():
            path.rename(path.with_name(left[1]))
        else:
            remove(path)


def remove(path: Path) -> None:
    """Delete a file or a folder, as far as that goes; what a link leads to is left alone."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)

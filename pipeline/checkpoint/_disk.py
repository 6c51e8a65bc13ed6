"""Bytes on the disk: flushed, hashed, and out of the way when they are removed."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path

__all__ = ["check_regular", "deleted", "discard", "flush", "partial", "remove", "sha256"]


def partial(path: Path) -> Path:
    """Where what is to lie at `path` is written before it is whole."""
    return path.with_name(f".{path.name}.partial")


def deleted(path: Path) -> Path:
    """Where what lay at `path` is while it is being deleted."""
    return path.with_name(f".{path.name}.deleted")


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


def discard(folder: Path) -> None:
    """Delete a folder; under its own name it is there whole, or not at all."""
    gone = deleted(folder)
    folder.rename(gone)
    remove(gone)


def remove(path: Path) -> None:
    """Delete a file or a folder, as far as that goes; what a link leads to is left alone."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)

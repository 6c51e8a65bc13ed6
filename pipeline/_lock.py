"""A lock on a file that ends with the process that holds it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows: no lock there
    fcntl = None

__all__ = ["let_go_in_children", "lock"]


def lock(path: Path) -> IO[Any] | None:
    """The file, locked until it is closed; None where another process, or another part of this one, holds it."""
    file = path.open("a")
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError:  # a file system without locks
            pass
    return file


def let_go_in_children(let_go: Callable[[], object]) -> None:
    """Call this method in processes that are forked from here: one that lives on would keep the lock as long."""
    if hasattr(os, "register_at_fork"):
        method = weakref.WeakMethod(let_go)
        os.register_at_fork(after_in_child=lambda: None if (mine := method()) is None else mine())

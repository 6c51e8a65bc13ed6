"""A lock on a file that ends with the process that holds it."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows: no lock there
    fcntl = None

__all__ = ["lock"]


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

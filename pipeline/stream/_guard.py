"""Code of the user's that fails on an item: told with the item's place, or skipped and counted."""

from __future__ import annotations

import threading
from typing import Any, Literal

from pipeline.errors import SettingError

Errors = Literal["raise", "skip"]


class Guard:
    """What is to become of an error, and how many were skipped."""

    def __init__(self, who: str, errors: Errors) -> None:
        if errors not in ("raise", "skip"):
            raise SettingError(f"{who.partition('(')[0]}(errors)", "'raise' or 'skip'", errors)
        self.who, self.errors, self.skipped = who, errors, 0
        self._lock = threading.Lock()

    def take(self, error: Exception, where: str) -> None:
        """Count the error, or raise it with a note that says where.

        A StopIteration would pass for the end of the epoch, and is raised as something else.
        """
        if self.errors == "skip":
            with self._lock:
                self.skipped += 1
            return
        if isinstance(error, StopIteration):
            raise RuntimeError(f"{self.who} raised StopIteration, at {where}") from error
        error.add_note(f"in {self.who}, at {where}")
        raise error

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

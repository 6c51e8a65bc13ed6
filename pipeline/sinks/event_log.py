"""Events to a file, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import attrs

from pipeline.events import Event

__all__ = ["EventLog"]


class EventLog:
    """Write every event to `<folder>/events.jsonl`, one JSON object a line, the event's class under "event".

    The first event opens the file: the folder is made where it is missing, and a log that is there is continued. Each
    line is handed to the system as it comes, so that a run that is killed leaves whole lines. NaN and infinities are
    `NaN`, `Infinity` and `-Infinity`, as Python's `json` writes and reads them.

    Raises: TypeError for an event that holds what JSON has no form for.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / "events.jsonl"
        self._encode = json.JSONEncoder(default=_plain).encode
        self._file: TextIO | None = None

    def write(self, event: Event) -> None:
        """Append one line."""
        entry = {"event": type(event).__name__, **_plain(event)}
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8", buffering=1)
        self._file.write(self._encode(entry) + "\n")

    def close(self) -> None:
        """Finish the file; another event would continue it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __repr__(self) -> str:
        return f"EventLog({str(self.path.parent)!r})"


def _plain(value: Any) -> Any:
    """Records, mappings and numbers that `json` does not know, as those that it does."""
    if attrs.has(type(value)):
        return attrs.asdict(value, recurse=False)
    if isinstance(value, Mapping):
        return dict(value)  # pyright: ignore[reportUnknownVariableType]
    if hasattr(value, "tolist"):  # tensors and arrays, those of one number too
        return value.tolist()
    if hasattr(value, "__float__"):
        return float(value)
    raise TypeError(f"EventLog cannot write {value!r}: give events numbers, strings, and lists or mappings of them.")

"""Events to a file, one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from pipeline.events import Event

__all__ = ["EventLog"]


class EventLog:
    """Write every event to `<folder>/events.jsonl`, one JSON object a line, the event's class under "event".

    The folder is made where it is missing; a log that is there is continued.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / "events.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, event: Event) -> None:
        """Append one line."""
        entry: dict[str, Any] = {"event": type(event).__name__, **attrs.asdict(event)}
        self._file.write(json.dumps(entry, default=float) + "\n")

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def __repr__(self) -> str:
        return f"EventLog({str(self.path.parent)!r})"

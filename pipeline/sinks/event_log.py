"""Events to a file, one JSON object a line."""

from __future__ import annotations

import os
import re
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from pipeline._checks import whole
from pipeline._lock import let_go_in_children, lock
from pipeline.errors import DamagedLogError, LogFormatError, LogInUseError, LogTooShortError, UnknownEventError
from pipeline.event_json import EventJson
from pipeline.events import Event
from pipeline.recording import FILE_NAME

__all__ = ["EventLog"]

_BLOCK = 1 << 16  # bytes


class EventLog:
    """Write every event to `<folder>/events.jsonl`, one JSON object a line; `read_events` gives them back.

    Each line is handed to the system at once, so that a reader sees all events so far, and a run that is killed leaves
    at most one torn line, which counts for nothing. A log that is there already is moved to `events.1.jsonl`, or the
    next number, when the first event comes; `resume` goes on with it instead. Used for a second run, the same EventLog
    goes on with its own.

    Args:   folder: of the run; is made where it is missing.
    Raises: on the first event LogInUseError, where another EventLog writes to the folder, in this process or another;
            EventFormError for an event that JSON has no form for.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / FILE_NAME
        self._form = EventJson()
        self._file: IO[Any] | None = None
        self._end = 0  # how many bytes of the file are this log's
        let_go_in_children(self.close)

    def write(self, event: Event) -> None:
        """Append one line."""
        file = self._file or self._open()
        line = self._form.encode(event, first=not self._end).encode() + b"\n"
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
        except OSError:
            os.ftruncate(file.fileno(), self._end)  # the next line shall not follow half of this one
            raise
        self._end += len(line)

    def resume(self, events: int) -> None:
        """Go on with the log that is there: keep exactly its first `events` events, and cut off the others.

        Raises: LogTooShortError where it holds fewer, LogFormatError, LogInUseError. The log is then as it was.
        """
        whole("EventLog.resume(events)", events, least=0)
        if events and not self.path.exists():
            raise LogTooShortError(str(self.path), 0, events)
        file = self._file or _taken(self.path)
        try:
            end = self._end_of(events)
            os.ftruncate(file.fileno(), end)
        except BaseException:
            file.close()
            self._file = None
            raise
        self._file, self._end = file, end

    def sync(self) -> None:
        """Return when all events so far are on the disk, and would outlive a loss of power."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            if os.name == "posix":  # there the name of a new file is its folder's to keep
                folder = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)

    def close(self) -> None:
        """Let go of the file; another event would go on with it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __repr__(self) -> str:
        return f"EventLog({str(self.path.parent)!r})"

    def _open(self) -> IO[Any]:
        file = _taken(self.path)
        size = _size(file)
        if size not in (0, self._end):  # another run's
            with closing(file):  # and so locked until it has moved
                if os.name == "nt":
                    file.close()  # Windows moves no open file
                self.path.rename(_next_free(self.path))
            file, size = _taken(self.path), 0
        self._file, self._end = file, size
        return file

    def _end_of(self, events: int) -> int:
        """Where the first `events` lines end, after a look at the first."""
        held = place = 0
        with self.path.open("rb", buffering=0) as log:
            while held < events and (block := log.read(_BLOCK)):
                *lines, rest = block.split(b"\n", events - held)
                if lines and not place:
                    self._check_format(lines[0])
                held += len(lines)
                place += len(block) - (len(rest) if held == events else 0)
        if held < events:
            raise LogTooShortError(str(self.path), held, events)
        return place

    def _check_format(self, line: bytes) -> None:
        try:
            self._form.decode(line)
        except UnknownEventError:
            pass  # of a class of the user's
        except (DamagedLogError, LogFormatError) as error:
            error.where = f"{self.path}, line 1"
            raise


def _taken(path: Path) -> IO[Any]:
    """The file opened to append, by this log alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while (file := lock(path)) is not None:
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()  # another run moved it away before it was locked
    raise LogInUseError(str(path))


def _size(file: IO[Any]) -> int:
    return os.fstat(file.fileno()).st_size


def _next_free(path: Path) -> Path:
    """`events.1.jsonl`, or the number after the highest that is there."""
    names = (re.fullmatch(rf"{path.stem}\.(\d+){path.suffix}", other.name) for other in path.parent.iterdir())
    return path.with_name(f"{path.stem}.{max((int(name[1]) for name in names if name), default=0) + 1}{path.suffix}")

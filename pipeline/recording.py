"""Events that were kept: read from a file, one JSON object a line, and folded by monitors. No torch here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline._quick_events import quick_reader
from pipeline.errors import DamagedLogError, DuplicateNameError, LogFormatError, UnknownEventError
from pipeline.event_json import EventJson
from pipeline.events import Event
from pipeline.monitor import Monitor

__all__ = ["read_events", "replay"]

FILE_NAME = "events.jsonl"
"""What the log in a run's folder is called."""

_BLOCK = 1 << 15  # bytes: what is made of more of them falls out of the processor's cache
_AT_ONCE = 32  # events for one monitor and then the next: few enough that they stay in the processor's cache


def read_events(
    path: str | os.PathLike[str], types: Iterable[type[Event]] = (), *, skip_unknown: bool = False
) -> Iterator[Event]:
    """The events of a log, from first to last, in constant memory; of a log that is being written, those so far.

    A last line without its end is none: a run that was killed left it, or is at work on it.

    Args:   path: the run's folder, or the file; types: event classes of your own that may be in it; skip_unknown: pass
            over events of all other classes.
    Raises: at once FileNotFoundError, and what `EventJson(types)` raises. On the way, with the number of the line,
            DamagedLogError, UnknownEventError and LogFormatError.
    """
    path, form = Path(path), EventJson(tuple(types))
    if path.is_dir():
        path = path / FILE_NAME
    if not path.exists():
        raise FileNotFoundError(f"there is no event log {path}")
    return _events(path, form, skip_unknown)


def replay(log: Iterable[Event] | str | os.PathLike[str], monitors: Iterable[Monitor]) -> dict[str, Any]:
    """The monitors' results over recorded events: the same as they were live, value for value.

    Args:   log: events, from `read_events` or a list; or the path of a log of the library's own events.
    Raises: DuplicateNameError for two monitors of one name; for a path, what `read_events` raises.
    """
    monitors = tuple(monitors)
    names = [monitor.name for monitor in monitors]
    for name in names:
        if names.count(name) > 1:
            raise DuplicateNameError("monitor", name)
    accumulators = [monitor.init() for monitor in monitors]
    events = iter(read_events(log) if isinstance(log, (str, os.PathLike)) else log)
    while some := tuple(islice(events, _AT_ONCE)):
        for place, monitor in enumerate(monitors):
            accumulators[place] = reduce(monitor.reduce, some, accumulators[place])
    return {m.name: m.result(a) for m, a in zip(monitors, accumulators, strict=True)}


def _events(path: Path, form: EventJson, skip_unknown: bool) -> Iterator[Event]:
    quick, number = quick_reader(), 0
    for lines in _whole_lines(path):
        found = quick(lines)
        if found is not None:
            yield from found
            number += lines.count(b"\n")
            continue
        for line in lines[:-1].split(b"\n"):
            number += 1
            found = quick(line + b"\n")
            try:
                event = form.decode(line) if found is None else next(found)
            except (DamagedLogError, LogFormatError, UnknownEventError) as error:
                if skip_unknown and isinstance(error, UnknownEventError):
                    continue
                error.where = f"{path}, line {number}"
                raise
            yield event


def _whole_lines(path: Path) -> Iterator[bytes]:
    """The file in blocks of many lines, all of them whole."""
    with path.open("rb", buffering=0) as file:
        rest = b""
        while block := file.read(_BLOCK):
            block = rest + block
            end = block.rfind(b"\n") + 1
            rest = block[end:]
            if end:
                yield block[:end]

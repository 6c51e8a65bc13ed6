"""`prefetch`: a stream read ahead of its reader."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import attrs

from pipeline._checks import whole
from pipeline.errors import SettingError
from pipeline.stream._defaults import in_background
from pipeline.stream._indexed import Indexed
from pipeline.stream._parallel import Parallel, Workers, checked
from pipeline.stream._transparent import Ahead
from pipeline.stream.node import Node
from pipeline.stream.sources import source

__all__ = ["prefetch"]

_PATIENCE = 5.0  # seconds for the thread to finish the item that it is reading, before it is left to do so alone


def prefetch(data: Any, ahead: int = 2, *, workers: Workers = None) -> Node:
    """The same stream, read ahead while the reader works on what it has.

    One thread reads up to `ahead` items ahead. With `workers` several make the items at the same time, as far ahead as
    the workers' own setting says; that needs a stream that can make any item from its place (a map-style dataset,
    shuffled, mapped, batched; for the others give the workers to `map`). Items come in the same order. The place of the
    stream is that of the item given out last, and one place does for any number of workers.

    Threads do not touch the default generators of torch, Python and numpy, which they share with the training: what
    draws from them belongs into processes, or takes the generator of `map(seed=…)`.

    An error comes when it is its item's turn, with the item's place and the worker's traceback in its notes; so does
    the death of a worker.

    Args:   data: a stream, or what `source` takes; workers: `Threads(n)`, `Processes(n)`, or a number of processes.
    Raises: SettingError for `ahead` below 1, and for workers on what can only be read in a row.
    """
    whole("prefetch(ahead)", ahead)
    node, crew = source(data), checked("prefetch(workers)", workers)
    if crew is None:
        return _Prefetched(node, ahead)
    if not isinstance(node, Indexed):
        cure = "Give the workers to `map`."
        raise SettingError("prefetch(workers)", "None for a stream that can only be read in a row", workers, cure)
    return Parallel(node, crew)


@attrs.frozen
class _Entry:
    """Something read: an item, the epoch's end, or an error."""

    item: Any
    place: dict[str, Any]
    epoch: int
    is_end: bool = False
    error: BaseException | None = None

    @property
    def is_last(self) -> bool:
        """Whether the thread stops here until it is asked to go on."""
        return self.is_end or self.error is not None


class _Reader:
    """A thread that reads a node into a queue of entries, as many as there is room for."""

    def __init__(self, node: Node, room: int) -> None:
        self._node, self._room = node, room
        self._entries: deque[_Entry] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_over = False

    def first(self) -> _Entry:
        """The first entry, as soon as it is there."""
        with self._changed:
            if not self._entries or not self._entries[-1].is_last:
                self._is_over = False  # a thread that is still about to end goes on: there is never a second one
                if self._thread is None:
                    self._thread = threading.Thread(target=self._read, daemon=True)
                    self._thread.start()
            self._changed.wait_for(lambda: self._entries)
            return self._entries[0]

    def take(self) -> None:
        """Take the first entry away."""
        with self._changed:
            self._entries.popleft()
            self._changed.notify_all()

    def stop(self) -> None:
        """Let the thread end after the item that it is reading."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def halt(self, patience: float | None) -> None:
        """Stop, and wait for the thread."""
        self.stop()
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None, patience)

    def clear(self) -> None:
        """Stop, and forget what was read."""
        self.halt(None)
        self._entries.clear()

    def _read(self) -> None:
        in_background()
        while True:
            entry = self._entry()
            with self._changed:
                self._entries.append(entry)
                self._changed.notify_all()
                if not entry.is_last:
                    self._changed.wait_for(lambda: self._is_over or len(self._entries) < self._room)
                if self._is_over or entry.is_last:
                    self._thread = None
                    self._changed.notify_all()
                    return

    def _entry(self) -> _Entry:
        try:
            item = self._node.next()
        except StopIteration:
            return _Entry(None, self._node.state_dict(), self._node.epoch, is_end=True)
        except BaseException as error:
            return _Entry(None, {}, 0, error=error)
        return _Entry(item, self._node.state_dict(), self._node.epoch)


class _Prefetched(Ahead):
    """A source read by one thread."""

    name = "prefetch"

    def __init__(self, node: Node, ahead: int) -> None:
        super().__init__(node)
        self._ahead = ahead
        self._reader = _Reader(self.source, ahead)
        weakref.finalize(self, self._reader.stop)

    def next(self) -> Any:
        self.found()
        try:
            entry = self._reader.first()
        except BaseException:  # an interruption of the wait
            self.close()
            raise
        if entry.error is not None:
            self.is_astray = True
            self.close()
            raise entry.error
        self.gave(entry.place, entry.epoch)
        self._reader.take()
        if entry.is_end:
            raise StopIteration
        return entry.item

    def halt(self) -> None:
        self._reader.halt(_PATIENCE)

    def drop(self) -> None:
        self._reader.clear()

    def settings(self) -> tuple[str, ...]:
        return (str(self._ahead),)

"""`Parallel`: workers on the items of a stream, in order."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import attrs

from pipeline.errors import SettingError
from pipeline.stream._crew import Crew, crew_of
from pipeline.stream._indexed import Indexed, Pass
from pipeline.stream._transparent import Ahead
from pipeline.stream._worker import Failed, Job, Outcome
from pipeline.stream.node import Node
from pipeline.stream.workers import Processes, Threads

Workers = int | Threads | Processes | None


def checked(setting: str, workers: Workers) -> Threads | Processes | None:
    """Who is to work: a number of processes is that many, and 0 is nobody."""
    if workers is None or workers == 0:
        return None
    if isinstance(workers, (Threads, Processes)):
        return workers
    if isinstance(workers, int) and not isinstance(workers, bool) and workers > 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        return Processes(workers)
    raise SettingError(setting, "a number of processes, Threads(n) or Processes(n)", workers)


@attrs.frozen
class Make:
    """The job of making an item from its place."""

    node: Indexed

    @property
    def skipped(self) -> int:
        """Items skipped so far."""
        return self.node.skipped

    def __call__(self, *payload: Any) -> Any:
        epoch, start, index = payload
        return self.node.make(Pass(epoch, start), index)


@attrs.define(eq=False)
class _Entry:
    """Something read ahead: a job, the epoch's end (no payload), or an error of the source (an outcome at once)."""

    number: int
    payload: tuple[Any, ...] | None
    place: dict[str, Any]
    epoch: int
    outcome: Outcome | None = None

    @property
    def is_last(self) -> bool:
        return self.payload is None


class Parallel(Ahead):
    """What a job makes of a source's payloads, by several workers, given out in order.

    Where the items can be made from their places alone, the payload is the place and the job makes the item; else the
    payload is what the source gives. Reading ahead stops at the end of an epoch, until the next one is asked for.
    """

    name = "prefetch"

    def __init__(self, node: Node, workers: Threads | Processes, job: Job | None = None) -> None:
        super().__init__(node)
        self._job = Make(self.source) if job is None else job  # pyright: ignore[reportArgumentType]
        self._workers, self._room = workers, workers.n * workers.ahead
        self._crew: Crew | None = None
        self._sent_home: weakref.finalize[Any, Any] | None = None
        self._flight: deque[_Entry] = deque()
        self._number = 0
        self._told = 0  # items that processes have skipped

    def next(self) -> Any:
        self.found()
        self._fill()
        try:
            entry = self._flight[0]
            while entry.outcome is None and not entry.is_last:
                number, outcome = self._staff().collect()
                self._flight[number - entry.number].outcome = outcome
        except BaseException:  # an interruption, and a result may be lost on the way: what has none is done again
            self.close()
            raise
        if isinstance(entry.outcome, Failed):
            self.close()
            self.is_astray = True
            entry.outcome.error.add_note(f"in {self!r}{self._where(entry.payload)}")
            raise entry.outcome.error
        self._flight.popleft()
        self.gave(entry.place, entry.epoch)
        if entry.outcome is None:
            raise StopIteration
        self._told += entry.outcome.skipped
        return entry.outcome.value

    def _fill(self) -> None:
        """Read ahead as far as there is room."""
        try:
            while len(self._flight) < self._room and not (self._flight and self._flight[-1].is_last):
                entry = self._entry()
                if entry.payload is not None:
                    self._staff().give(entry.number, entry.payload)
                self._flight.append(entry)
                self._number += 1
        except BaseException:  # an interruption, or a crew that cannot start: the source is one further by now
            self.is_astray = True
            self.close()
            raise

    def _entry(self) -> _Entry:
        payload, outcome = None, None
        try:
            payload = self._payload()
        except StopIteration:
            pass
        except Exception as error:
            outcome = Failed(error)
        return _Entry(self._number, payload, self.source.state_dict(), self.source.epoch, outcome)

    def _where(self, payload: tuple[Any, ...] | None) -> str:
        if payload is None:
            return ""
        epoch, place = payload[-2:]
        if isinstance(self._job, Make):
            epoch, start, index = payload
            epoch, place = self._job.node.locate(Pass(epoch, start), index)
        return f", at item {place} of epoch {epoch}"

    def _payload(self) -> tuple[Any, ...]:
        if isinstance(self._job, Make):
            at, index = self._job.node.next_place()
            return at.epoch, at.start, index
        return self.source.next()

    def _staff(self) -> Crew:
        """The crew; one that starts gets what was in work when the last one ended."""
        if self._crew is None:
            self._crew = crew_of(self._workers, self._job)
            self._sent_home = weakref.finalize(self, self._crew.close)
            for entry in self._flight:
                if entry.payload is not None and entry.outcome is None:
                    self._crew.give(entry.number, entry.payload)
        return self._crew

    def halt(self) -> None:
        if self._sent_home is not None:
            self._sent_home()
        self._crew = self._sent_home = None

    def drop(self) -> None:
        self.halt()
        self._flight.clear()

    @property
    def skipped(self) -> int:
        own = 0 if isinstance(self._job, Make) else self._job.skipped
        return super().skipped + own + self._told

    def settings(self) -> tuple[str, ...]:
        return (f"workers={self._workers!r}",)

"""Who watches a run: monitors with their accumulators carried, and sinks. This module knows no torch.

The same in a fold and in a loop written by hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from pipeline import _watchers as watchers
from pipeline.errors import DuplicateNameError, MeasureError, SettingError
from pipeline.events import Event
from pipeline.monitor import Monitor, Signal

__all__ = ["Audience", "Sink"]


class Sink(Protocol):
    """Where events go: to a console, a file, a service. May hold resources, and is closed when the run ends.

    Optional: `signals() -> iterable of Signal`, what it asks of the run; `sync()`, after which all that was written is
    on the disk; `resume(events)`, called before the first event of a run that goes on from a checkpoint: the sink
    forgets all but the first `events` that it was given.
    """

    def write(self, event: Event, /) -> None: ...

    def close(self) -> None: ...


class Audience:
    """Monitors and sinks, told of the same events in the same order.

    Raises: DuplicateNameError for two monitors of one name; SettingError for what is no monitor or no sink.
    """

    def __init__(self, monitors: Iterable[Monitor], sinks: Iterable[Sink]) -> None:
        self.monitors = tuple(watchers.checked("Each of `monitors`", monitor) for monitor in monitors)
        self.sinks = watchers.checked_sinks(sinks)
        names = [monitor.name for monitor in self.monitors]
        for name in names:
            if names.count(name) > 1:
                raise DuplicateNameError("monitor", name)
        self.accumulators = [monitor.init() for monitor in self.monitors]
        # A queue each, so that one that fails takes nothing from the others.
        self._to_reduce = [deque[Event]() for _ in self.monitors]
        self._to_write = [deque[Event]() for _ in self.sinks]

    def tell(self, events: Sequence[Event]) -> None:
        """Reduce and write them; an error of a monitor or a sink is the caller's."""
        self._queue(events)
        for place in range(len(self.monitors)):
            self._reduce(place)
        for place in range(len(self.sinks)):
            self._write(place)

    def tell_of_failure(self, error: BaseException, events: Sequence[Event]) -> dict[str, Any]:
        """Tell each of them, so that one that fails too hides nothing: it becomes a note on `error`. The results."""
        self._queue(events)
        results: dict[str, Any] = {}
        for place, monitor in enumerate(self.monitors):
            with _noted(error, f"monitor {monitor.name!r}"):
                self._reduce(place)
                results[monitor.name] = monitor.result(self.accumulators[place])
        for place, sink in enumerate(self.sinks):
            with _noted(error, repr(sink)):
                self._write(place)
        return results

    def by_name(self) -> dict[str, Any]:
        """Each monitor's accumulator, by its name."""
        return {m.name: a for m, a in zip(self.monitors, self.accumulators, strict=True)}

    def go_on_from(self, accumulators: Mapping[str, Any], told: int) -> list[str]:
        """Begin where another run stood, after `told` events; the names of monitors that were not there, or are not."""
        mine = [monitor.name for monitor in self.monitors]
        self.accumulators = [
            accumulators.get(m.name, fresh) for m, fresh in zip(self.monitors, self.accumulators, strict=True)
        ]
        for sink in self.sinks:
            if hasattr(sink, "resume"):
                sink.resume(told)  # type: ignore[attr-defined]
        return sorted({*mine} ^ {*accumulators})

    def sync(self) -> None:
        """Let all that was told lie on the disk, where a sink keeps it there."""
        for sink in self.sinks:
            if hasattr(sink, "sync"):
                sink.sync()  # type: ignore[attr-defined]

    def results(self) -> dict[str, Any]:
        """Each monitor's result so far, by its name."""
        return {m.name: m.result(a) for m, a in zip(self.monitors, self.accumulators, strict=True)}

    def signals(self) -> Iterator[tuple[str, Signal]]:
        """What they ask of the run, with the name of who asks."""
        for monitor, accumulator in zip(self.monitors, self.accumulators, strict=True):
            if hasattr(monitor, "signals"):
                yield from _signals(monitor.name, monitor.signals(accumulator))  # type: ignore[attr-defined]
        for sink in self.sinks:
            if hasattr(sink, "signals"):
                yield from _signals(repr(sink), sink.signals())  # type: ignore[attr-defined]

    def check_watched(self, reported: Collection[str]) -> None:
        """Raise MeasureError if a monitor watches a measure that is not among those `reported` by evaluations."""
        for monitor in self.monitors:
            for measure in getattr(monitor, "watches", ()):
                if measure not in reported:
                    raise MeasureError(monitor.name, measure, tuple(reported))

    def _queue(self, events: Sequence[Event]) -> None:
        for queue in (*self._to_reduce, *self._to_write):
            queue.extend(events)

    def _reduce(self, place: int) -> None:
        queue, reduce = self._to_reduce[place], self.monitors[place].reduce
        while queue:
            self.accumulators[place] = reduce(self.accumulators[place], queue.popleft())

    def _write(self, place: int) -> None:
        queue, write = self._to_write[place], self.sinks[place].write
        while queue:
            write(queue.popleft())


def _signals(who: str, asked: Any) -> Iterator[tuple[str, Signal]]:
    for signal in asked if isinstance(asked, Iterable) else (asked,):
        if not isinstance(signal, Signal):
            raise SettingError(f"What {who}.signals gives", "signals in a list, such as [Stop(reason)]", signal)
        yield who, signal


@contextmanager
def _noted(error: BaseException, who: str) -> Generator[None]:
    """A second error becomes a note on the first, which is the one to tell of."""
    try:
        yield
    except Exception as second:
        error.add_note(f"and then, on telling {who} of the end of the run: {second!r}")

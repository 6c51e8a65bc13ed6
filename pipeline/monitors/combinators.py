"""Monitors made of a monitor: other results (`map`), or other events (`filter`, `premap`, `every`).

Each is a monitor itself, called as the one inside unless it is given a name. It can `merge`, and asks of the fold, what
that one does. Two of these words are Python's own too: outside of this module they are read as `monitors.map`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from pipeline._checks import function, whole
from pipeline._watchers import checked
from pipeline.events import Event, UpdateDone
from pipeline.monitor import Monitor
from pipeline.monitors._wrapper import Wrapper

__all__ = ["every", "filter", "map", "premap"]


@attrs.frozen(repr=False)
class _Map(Wrapper):
    word = "map"

    monitor: Monitor
    fn: Callable[[Any], Any]
    name: str

    def result(self, accumulator: Any) -> Any:
        """`fn` of the result, where there is one."""
        result = self.monitor.result(accumulator)
        return None if result is None else self.fn(result)


def map(monitor: Monitor, fn: Callable[[Any], Any], *, name: str | None = None) -> Monitor:
    """`monitor` with `fn(result)` for its result; None stays None.

    Raises: SettingError for what is no monitor, or no function.
    """
    function("map(fn)", fn)
    return _Map(checked("map(monitor)", monitor), fn, name or monitor.name)


@attrs.frozen(repr=False)
class _Filter(Wrapper):
    word = "filter"

    monitor: Monitor
    predicate: Callable[[Any], object]
    name: str

    def reduce(self, accumulator: Any, event: Event) -> Any:
        """The event, to the monitor inside, if it does something there and passes."""
        taken = self.monitor.reduce(accumulator, event)
        return taken if taken is accumulator or self.predicate(event) else accumulator


def filter(monitor: Monitor, predicate: Callable[[Any], object], *, name: str | None = None) -> Monitor:
    """`monitor` over the events for which `predicate(event)` is true.

    Only events that the monitor does not pass over anyway are asked about: over a `MeanLoss`, which reads `UpdateDone`
    alone, `lambda event: event.part == "generator"` will do.

    Raises: SettingError for what is no monitor, or no function.
    """
    function("filter(predicate)", predicate)
    return _Filter(checked("filter(monitor)", monitor), predicate, name or monitor.name)


@attrs.frozen(repr=False)
class _Premap(Wrapper):
    word = "premap"
    passes_on = frozenset({"merge", "signals", "needs_store"})

    monitor: Monitor
    fn: Callable[[Any], Event]
    name: str

    def reduce(self, accumulator: Any, event: Event) -> Any:
        """`fn` of the event, to the monitor inside."""
        return self.monitor.reduce(accumulator, self.fn(event))

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "urgent" and hasattr(self.monitor, "urgent"):
            return self._urgent
        return super().__getattr__(attribute)

    def _urgent(self, event: Event) -> bool:
        inside: Any = self.monitor
        return inside.urgent(self.fn(event))


def premap(monitor: Monitor, fn: Callable[[Any], Event], *, name: str | None = None) -> Monitor:
    """`monitor` over the events `fn(event)`; `fn` gives back as they are those that it does not change.

    It has no `watches`: what is watched may have had another name before.

    Raises: SettingError for what is no monitor, or no function.
    """
    function("premap(fn)", fn)
    return _Premap(checked("premap(monitor)", monitor), fn, name or monitor.name)


@attrs.frozen(repr=False)
class _Every(Wrapper):
    word = "every"

    monitor: Monitor
    n: int
    name: str

    def reduce(self, accumulator: Any, event: Event) -> Any:
        """The event, to the monitor inside, unless it is an update in between."""
        between = isinstance(event, UpdateDone) and event.update % self.n
        return accumulator if between else self.monitor.reduce(accumulator, event)


def every(monitor: Monitor, n: int, *, name: str | None = None) -> Monitor:
    """`monitor` over every n-th update, and over all other events.

    Counted from the start of training, so that resuming changes nothing.

    Raises: SettingError for what is no monitor, and unless n is a whole number of at least 1.
    """
    whole("every(n)", n)
    return _Every(checked("every(monitor)", monitor), n, name or monitor.name)

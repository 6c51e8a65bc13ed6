"""A monitor over stretches of the log: the last few events (`window`), or epoch by epoch (`per_epoch`)."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import attrs

from pipeline._checks import whole
from pipeline._watchers import checked
from pipeline.errors import SettingError
from pipeline.events import EpochEnded, Event
from pipeline.monitor import Monitor, Signal
from pipeline.monitors._wrapper import Wrapper

__all__ = ["per_epoch", "window"]


@attrs.frozen(repr=False)
class _Window(Wrapper):
    word = "window"
    passes_on = frozenset({"watches", "urgent", "needs_store"})

    monitor: Monitor
    n: int
    name: str

    def init(self) -> tuple[Any, ...]:
        """No event."""
        return ()

    def reduce(self, accumulator: tuple[Any, ...], event: Event) -> tuple[Any, ...]:
        """The event by itself after the others, the oldest one left out."""
        start = self.monitor.init()
        alone = self.monitor.reduce(start, event)
        return accumulator if alone == start else self.merge(accumulator, (alone,))

    def result(self, accumulator: tuple[Any, ...]) -> Any:
        """The result over those events."""
        return self.monitor.result(self._whole(accumulator))

    def merge(self, a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
        """The last events of two logs, the second after the first."""
        return (*a, *b)[-self.n :]

    def _whole(self, accumulator: tuple[Any, ...]) -> Any:
        inside: Any = self.monitor
        return functools.reduce(inside.merge, accumulator, inside.init())

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "signals" and hasattr(self.monitor, "signals"):
            return self._signals
        return super().__getattr__(attribute)

    def _signals(self, accumulator: tuple[Any, ...]) -> Iterable[Signal]:
        inside: Any = self.monitor
        return inside.signals(self._whole(accumulator))


def window(monitor: Monitor, n: int, *, name: str | None = None) -> Monitor:
    """`monitor` over the last n events that it does not pass over.

    It remembers each of them as an accumulator and merges these when it is asked, so that the monitor needs `merge`.
    It can `merge` two logs itself, the second after the first, and asks of the fold what the monitor does.

    Raises: SettingError for what is no monitor or has no `merge`, and unless n is a whole number of at least 1.
    """
    whole("window(n)", n)
    if not hasattr(checked("window(monitor)", monitor), "merge"):
        cure = "Its last events cannot be told from those before: `per_epoch` or `every` may do."
        raise SettingError("window(monitor)", "a monitor with `merge`", monitor, cure)
    return _Window(monitor, n, name or monitor.name)


Epochs = tuple[int, tuple[Any, ...], Any]
"""How many ended, the accumulators of the last of them, and that of the one in progress."""


@attrs.frozen(repr=False)
class _PerEpoch(Wrapper):
    word = "per_epoch"
    passes_on = frozenset({"watches"})

    monitor: Monitor
    keep: int | None
    name: str

    def init(self) -> Epochs:
        """No epoch ended, and a new one begun."""
        return 0, (), self.monitor.init()

    def reduce(self, accumulator: Epochs, event: Event) -> Epochs:
        """The event, to the epoch in progress; its end begins another."""
        ended, last, current = accumulator
        reduced = self.monitor.reduce(current, event)
        if isinstance(event, EpochEnded):
            return ended + 1, self._kept((*last, reduced)), self.monitor.init()
        return accumulator if reduced is current else (ended, last, reduced)

    def _kept(self, epochs: tuple[Any, ...]) -> tuple[Any, ...]:
        return epochs if self.keep is None else epochs[-self.keep :]

    def result(self, accumulator: Epochs) -> tuple[Any, ...] | None:
        """The result of each epoch that ended."""
        return tuple(self.monitor.result(epoch) for epoch in accumulator[1]) or None

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "merge" and hasattr(self.monitor, "merge"):
            return self._merge
        return super().__getattr__(attribute)

    def _merge(self, a: Epochs, b: Epochs) -> Epochs:
        inside: Any = self.monitor
        if not b[0]:
            return a[0], a[1], inside.merge(a[2], b[2])
        all_there = b[0] == len(b[1])  # otherwise the epoch that `a` began has been left out since
        last = (inside.merge(a[2], b[1][0]), *b[1][1:]) if all_there else b[1]
        return a[0] + b[0], self._kept((*a[1], *last)), b[2]


def per_epoch(monitor: Monitor, keep: int | None = None, *, name: str | None = None) -> Monitor:
    """`monitor` anew in every epoch; the result is a tuple of those of the epochs that ended, all or the last `keep`.

    The result is None before the first end of an epoch. It can `merge` two logs where the monitor can, the second after
    the first. It has no `signals`: what an epoch asked for would be forgotten with it.

    Raises: SettingError for what is no monitor, and unless `keep` is None or a whole number of at least 1.
    """
    if keep is not None:
        whole("per_epoch(keep)", keep)
    return _PerEpoch(checked("per_epoch(monitor)", monitor), keep, name or monitor.name)

"""Several monitors as one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import attrs

from pipeline._watchers import checked
from pipeline.errors import DuplicateNameError
from pipeline.events import Event
from pipeline.monitor import Monitor, ScaleRate, Signal

__all__ = ["combine"]


@attrs.frozen(repr=False)
class _Combine:
    parts: tuple[tuple[str, Monitor], ...]
    name: str

    @property
    def _monitors(self) -> tuple[Monitor, ...]:
        return tuple(monitor for _, monitor in self.parts)

    def init(self) -> tuple[Any, ...]:
        """Where each begins."""
        return tuple(monitor.init() for monitor in self._monitors)

    def reduce(self, accumulator: tuple[Any, ...], event: Event) -> tuple[Any, ...]:
        """The event, to each."""
        pairs = list(zip(self._monitors, accumulator, strict=True))
        reduced = tuple(monitor.reduce(a, event) for monitor, a in pairs)
        return accumulator if all(x is a for x, a in zip(reduced, accumulator, strict=True)) else reduced

    def result(self, accumulator: tuple[Any, ...]) -> dict[str, Any] | None:
        """All results, by name."""
        results = {name: monitor.result(a) for (name, monitor), a in zip(self.parts, accumulator, strict=True)}
        return None if all(result is None for result in results.values()) else results

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "merge" and len(self._having("merge")) == len(self.parts):
            return self._merge
        if attribute == "signals" and self._having("signals"):
            return self._signals
        if attribute == "urgent" and self._having("urgent"):
            return self._urgent
        if attribute == "needs_store":
            return any(monitor.needs_store for monitor in self._having("needs_store"))
        if attribute == "watches":
            return tuple(measure for monitor in self._having("watches") for measure in monitor.watches)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")

    def _having(self, attribute: str) -> list[Any]:
        return [monitor for monitor in self._monitors if hasattr(monitor, attribute)]

    def _merge(self, a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
        monitors: tuple[Any, ...] = self._monitors
        return tuple(monitor.merge(x, y) for monitor, x, y in zip(monitors, a, b, strict=True))

    def _signals(self, accumulator: tuple[Any, ...]) -> Iterable[Signal]:
        monitors: tuple[Any, ...] = self._monitors
        asked = [s for m, a in zip(monitors, accumulator, strict=True) if hasattr(m, "signals") for s in m.signals(a)]
        factors = [signal.factor for signal in asked if isinstance(signal, ScaleRate)]
        if factors:  # a fold holds one factor for each monitor that it knows
            yield ScaleRate(math.prod(factors))
        yield from (signal for signal in asked if not isinstance(signal, ScaleRate))

    def _urgent(self, event: Event) -> bool:
        return any(monitor.urgent(event) for monitor in self._having("urgent"))

    def __repr__(self) -> str:
        shown = [repr(monitor) if name == monitor.name else f"{name}={monitor!r}" for name, monitor in self.parts]
        named = [] if self.name == "combine" else [f"name={self.name!r}"]
        return f"combine({', '.join([*shown, *named])})"


def combine(*monitors: Monitor, name: str = "combine", **named: Monitor) -> Monitor:
    """Several monitors as one, whose result is a dictionary of theirs: by their names, or by those given as keywords.

    The result is None where all are. It can `merge` where all can, asks of the fold what each does (the factors of
    several `ScaleRate` multiplied), and `watches` what each does.

    Raises: SettingError for what is no monitor; DuplicateNameError for two of one name.
    """
    parts = (*((checked("combine(monitor)", monitor).name, monitor) for monitor in monitors), *named.items())
    for part, monitor in parts:
        checked("combine(monitor)", monitor)
        if [other for other, _ in parts].count(part) > 1:
            raise DuplicateNameError("monitor", part)
    return _Combine(parts, name)

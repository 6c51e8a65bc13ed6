"""Learning rates, as the updates used them."""

from __future__ import annotations

import attrs

from pipeline._checks import text
from pipeline.events import Event, UpdateDone
from pipeline.monitors import _table as table
from pipeline.monitors._written import Written

__all__ = ["LearningRate", "LearningRates"]

Rates = tuple[tuple[str, float], ...]


@attrs.frozen(repr=False)
class LearningRate(Written):
    """The learning rate that the last update used.

    Reads:  `UpdateDone.rates[group]`.
    Result: a float; None before the first update.
    Merge:  two logs, the second after the first.
    """

    group: str = attrs.field(default="default", validator=text)
    name: str = "LearningRate"

    def init(self) -> float | None:
        """None: no update yet."""
        return None

    def reduce(self, accumulator: float | None, event: Event) -> float | None:
        """The rate of the newest update."""
        return event.rates.get(self.group, accumulator) if isinstance(event, UpdateDone) else accumulator

    def result(self, accumulator: float | None) -> float | None:
        """The newest rate."""
        return accumulator

    def merge(self, a: float | None, b: float | None) -> float | None:
        """The second, where it knows one."""
        return a if b is None else b


@attrs.frozen(repr=False)
class LearningRates(Written):
    """The learning rates of all groups, each as the last update of that group used it.

    Reads:  `UpdateDone.rates`, `part`.
    Result: {group: rate}, in a step of several parts {"<part>/<group>": rate}; None before the first update.
    Merge:  two logs, the second after the first.
    """

    name: str = "LearningRates"

    def init(self) -> Rates:
        """No group."""
        return ()

    def reduce(self, accumulator: Rates, event: Event) -> Rates:
        """The newest rates over those before."""
        if not isinstance(event, UpdateDone):
            return accumulator
        prefix = "" if event.part is None else f"{event.part}/"
        return self.merge(accumulator, tuple((f"{prefix}{group}", rate) for group, rate in event.rates.items()))

    def result(self, accumulator: Rates) -> dict[str, float] | None:
        """The newest rate of each group."""
        return dict(accumulator) or None

    def merge(self, a: Rates, b: Rates) -> Rates:
        """The second over the first."""
        return table.joined(a, b, lambda _, newer: newer)

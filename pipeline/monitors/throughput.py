"""How fast a run is."""

from __future__ import annotations

import attrs

from pipeline.events import Event, RunStarted, UpdateDone
from pipeline.monitors._written import Written

__all__ = ["Throughput"]

Mark = tuple[float, int, int, int]
"""Time, samples, tokens, updates."""

Span = tuple[Mark, Mark, float, float]
"""The first update and the last, what the first one waited, and what those after it did."""

Amounts = tuple[float, float, float, float, float]
"""Seconds, samples, tokens, updates, seconds of waiting."""

Spans = tuple[Span | None, Amounts | None, Span | None]
"""What comes before the first start of a run, what lies between starts (None: there was none), what comes after."""

_NOTHING: Amounts = (0.0, 0.0, 0.0, 0.0, 0.0)


def _joined(a: Span | None, b: Span | None) -> Span | None:
    if a is None or b is None:
        return a if b is None else b
    return a[0], b[1], a[2], a[3] + b[2] + b[3]


def _amounts(span: Span | None) -> Amounts:
    if span is None:
        return _NOTHING
    first, last, _, waited = span
    return last[0] - first[0], last[1] - first[1], last[2] - first[2], last[3] - first[3], waited


def _sum(a: Amounts, b: Amounts) -> Amounts:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4]


@attrs.frozen(repr=False)
class Throughput(Written):
    """Samples, tokens and updates a second, from the first update to the last, and the share of waiting for data in it.

    Reads:  `RunStarted`; `UpdateDone.time`, `samples`, `tokens`, `update`, `waited`.
    Result: {"samples", "tokens", "updates"} a second and {"waiting"}, a share of the time, floats; None before the
            second update of a run, for nothing is between.
    Edges:  the time between two runs does not count, nor does that before a run's first update; evaluations do.
    Merge:  two logs, the second after the first.
    """

    name: str = "Throughput"

    def init(self) -> Spans:
        """No update yet."""
        return None, None, None

    def reduce(self, accumulator: Spans, event: Event) -> Spans:
        """Move the end to this update; a start of a run ends what was before."""
        if isinstance(event, RunStarted):
            return self.merge(accumulator, (None, _NOTHING, None))
        if not isinstance(event, UpdateDone):
            return accumulator
        mark = (event.time, event.samples, event.tokens, event.update)
        return self.merge(accumulator, ((mark, mark, event.waited, 0.0), None, None))

    def result(self, accumulator: Spans) -> dict[str, float] | None:
        """Rates over the time so far."""
        before, between, after = accumulator
        total = _sum(_sum(_amounts(before), between or _NOTHING), _amounts(after))
        seconds, samples, tokens, updates, waited = total
        if not seconds > 0:
            return None
        return {
            "samples": samples / seconds,
            "tokens": tokens / seconds,
            "updates": updates / seconds,
            "waiting": waited / seconds,
        }

    def merge(self, a: Spans, b: Spans) -> Spans:
        """Two logs, the second after the first."""
        if a[1] is None:
            return _joined(a[0], b[0]), b[1], b[2]
        if b[1] is None:
            return a[0], a[1], _joined(a[2], b[0])
        return a[0], _sum(_sum(a[1], _amounts(_joined(a[2], b[0]))), b[1]), b[2]

"""`per_member`: what a monitor finds in each member of an ensemble."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from pipeline._watchers import checked
from pipeline.ensembles._members import is_member
from pipeline.events import EvalDone, Event
from pipeline.monitor import Monitor, Signal, Stop

__all__ = ["per_member"]

Found = tuple[Any, Mapping[str, Any]]
"""The accumulator of a member that nothing was told of yet, and that of each other by name."""


@attrs.frozen(repr=False)
class _PerMember:
    monitor: Monitor
    name: str

    def init(self) -> Found:
        """No members yet."""
        return self.monitor.init(), {}

    def reduce(self, accumulator: Found, event: Event) -> Found:
        """The event, to the member that it tells of, or to all."""
        unknown, known = accumulator
        part = getattr(event, "part", None)
        if part is not None:
            if not is_member(part):
                return accumulator
            return unknown, {**known, part: self.monitor.reduce(known.get(part, unknown), event)}
        names = {**known, **dict.fromkeys(_evaluated(event))}
        each = {name: self.monitor.reduce(known.get(name, unknown), _seen_by(name, event)) for name in names}
        return self.monitor.reduce(unknown, event), each

    def result(self, accumulator: Found) -> dict[str, Any] | None:
        """Each member's result, by its name."""
        return {name: self.monitor.result(own) for name, own in accumulator[1].items()} or None

    def __getattr__(self, attribute: str) -> Any:
        if attribute in ("merge", "signals") and hasattr(self.monitor, attribute):
            return getattr(self, f"_{attribute}")
        if attribute == "urgent":
            return getattr(self.monitor, attribute)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")

    def _merge(self, a: Found, b: Found) -> Found:
        join: Any = getattr(self.monitor, "merge")  # noqa: B009 - not every monitor has it
        names = dict.fromkeys([*a[1], *b[1]])
        return join(a[0], b[0]), {name: join(a[1].get(name, a[0]), b[1].get(name, b[0])) for name in names}

    def _signals(self, accumulator: Found) -> Iterable[Signal]:
        inside: Any = self.monitor
        asked = [[s for s in inside.signals(own) if isinstance(s, Stop)] for own in accumulator[1].values()]
        if asked and all(asked):
            yield Stop(f"{self.name}, of every member: {asked[-1][0].reason}")

    def __repr__(self) -> str:
        return (
            f"per_member({self.monitor!r}" + ("" if self.name == self.monitor.name else f", name={self.name!r}") + ")"
        )


def _evaluated(event: Event) -> Iterable[str]:
    """The members that an evaluation tells of, by name."""
    if not isinstance(event, EvalDone):
        return ()
    return [name for value in event.values for _, _, name in [value.rpartition("/")] if is_member(name)]


def _seen_by(name: str, event: Event) -> Event:
    """An evaluation of all members as one of this member alone; anything else as it is."""
    if not isinstance(event, EvalDone):
        return event
    ending = f"/{name}"
    own = {value.removesuffix(ending): number for value, number in event.values.items() if value.endswith(ending)}
    return attrs.evolve(event, values=own) if own else event


def per_member(monitor: Monitor, *, name: str | None = None) -> Monitor:
    """`monitor` for each member of an ensemble: its result is a mapping, "member 3" -> that member's result.

    A member's monitor sees what it would see if the member were trained alone: the events of that member, those of the
    run, and evaluations (`Ensemble.evaluation`) with its own values. `Stop` is asked for once every member's monitor
    asks for it; other signals, which mean the whole run, are not passed on.

    Raises: SettingError for what is no monitor.
    """
    return _PerMember(checked("per_member(monitor)", monitor), name or monitor.name)

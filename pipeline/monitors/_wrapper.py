"""What the combinators share: a monitor around a monitor."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from pipeline._declared import show
from pipeline.events import Event
from pipeline.monitor import Monitor

ASKING = frozenset({"signals", "urgent", "needs_store"})
"""What a monitor has that asks something of the fold."""


class Wrapper:
    """A monitor that does what the one inside does, and differs in something.

    What a monitor may have besides is there where `passes_on` has it and the monitor inside does.
    """

    __slots__ = ()

    word: ClassVar[str]
    passes_on: ClassVar[frozenset[str]] = frozenset({"merge", "watches"}) | ASKING

    monitor: Monitor
    name: str

    def init(self) -> Any:
        """The start of the monitor inside."""
        return self.monitor.init()

    def reduce(self, accumulator: Any, event: Event) -> Any:
        """The event, to the monitor inside."""
        return self.monitor.reduce(accumulator, event)

    def result(self, accumulator: Any) -> Any:
        """The result of the monitor inside."""
        return self.monitor.result(accumulator)

    def __getattr__(self, attribute: str) -> Any:
        if attribute in self.passes_on:
            return getattr(self.monitor, attribute)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")

    def __repr__(self) -> str:
        settings: dict[str, Any] = {field.name: getattr(self, field.name) for field in attrs.fields(type(self))}
        name = settings.pop("name")
        shown = [show(value) for value in settings.values() if value is not None]
        named = [] if name == self.monitor.name else [f"name={name!r}"]
        return f"{self.word}({', '.join([*shown, *named])})"

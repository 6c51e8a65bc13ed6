"""A monitor from plain functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from pipeline import _checks as check
from pipeline._declared import show
from pipeline.monitor import Monitor, Signal

__all__ = ["monitor"]


@attrs.frozen(repr=False)
class _OfFunctions:
    name: str
    init: Callable[[], Any]
    reduce: Callable[[Any, Any], Any]
    result: Callable[[Any], Any]
    optional: tuple[tuple[str, Callable[..., Any]], ...]

    def __getattr__(self, attribute: str) -> Any:
        if attribute in ("merge", "signals"):
            for name, function in self.optional:
                if name == attribute:
                    return function
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")

    def __repr__(self) -> str:
        shown = [repr(self.name), *(show(function) for function in (self.init, self.reduce, self.result))]
        return f"monitor({', '.join([*shown, *(f'{name}={show(function)}' for name, function in self.optional)])})"


def monitor(
    name: str,
    init: Callable[[], Any],
    reduce: Callable[[Any, Any], Any],
    result: Callable[[Any], Any],
    *,
    merge: Callable[[Any, Any], Any] | None = None,
    signals: Callable[[Any], Iterable[Signal]] | None = None,
) -> Monitor:
    """A monitor of these functions: `init()`, `reduce(accumulator, event)`, `result(accumulator)`.

    They keep nothing between calls, and the accumulator is a plain immutable value: a number, a string, None, or a
    tuple of such values.

    Raises: SettingError for what cannot be called.
    """
    given = {"init": init, "reduce": reduce, "result": result, "merge": merge, "signals": signals}
    for part, function in given.items():
        if function is not None or part in ("init", "reduce", "result"):
            check.function(f"monitor({part})", function)
    optional = tuple((part, f) for part, f in (("merge", merge), ("signals", signals)) if f is not None)
    return _OfFunctions(name, init, reduce, result, optional)

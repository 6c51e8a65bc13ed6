"""Monitors and event classes as a person writes them on a command line.

A name is one of `pipeline.monitors`, or `module:Name`; its arguments are literals, or monitors written in the same way.
Nothing is evaluated, and nothing is called but classes of monitors and the library's combinators.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pipeline import monitors
from pipeline.events import Event
from pipeline.monitor import Monitor

__all__ = ["event_class", "monitor"]

# Those besides the classes that can be written with literals: the other combinators take functions.
_COMBINATORS = ("combine", "every", "per_epoch", "window")

_OURS: Mapping[str, Any] = {
    name: getattr(monitors, name)
    for name in monitors.__all__
    if name in _COMBINATORS or isinstance(getattr(monitors, name), type)
}


def monitor(text: str) -> Monitor:
    """The monitor that is written as `MeanLoss`, `EarlyStopping('val_loss', patience=3)` or `module:Name(...)`.

    Raises: argparse.ArgumentTypeError, which says what is wrong with it.
    """
    module, written = _parted(text)
    names = {**_OURS, **_monitors_in(_imported(module))} if module else _OURS
    try:
        made = _value(ast.parse(written, mode="eval").body, names)
    except SyntaxError:
        raise _wrong(text, "write a monitor as in Python, such as EarlyStopping('val_loss', patience=3)") from None
    except (TypeError, ValueError) as error:
        raise _wrong(text, str(error)) from error
    if not isinstance(made, Monitor):
        raise _wrong(text, f"{made!r} is no monitor, which has name, init, reduce and result")
    return made


def event_class(text: str) -> type[Event]:
    """The event class that is written as `module:Name`.

    Raises: argparse.ArgumentTypeError, which says what is wrong with it.
    """
    module, name = _parted(text)
    found = getattr(_imported(module), name, None) if module else None
    if not (isinstance(found, type) and issubclass(found, Event)):
        raise _wrong(text, "give the module and the name of a subclass of Event, as in mymodule:Spike")
    return found


def _parted(text: str) -> tuple[str, str]:
    """The module, or nothing, and what is written after it."""
    parts = re.fullmatch(r"(?:([\w.]+):)?(.*)", text.strip(), re.DOTALL)
    assert parts is not None
    return parts[1] or "", parts[2]


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _wrong(module, f"it cannot be imported: {error}") from error


def _monitors_in(module: Any) -> dict[str, Any]:
    """The classes of monitors in a module, and the monitors that it has made."""
    return {
        name: found
        for name, found in vars(module).items()
        if isinstance(found, Monitor) or (isinstance(found, type) and hasattr(found, "reduce"))
    }


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """What an expression of literals and of these names means."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        make = _named(node.func.id, names)
        return make(
            *[_value(given, names) for given in node.args],
            **{given.arg or "**": _value(given.value, names) for given in node.keywords},
        )
    if isinstance(node, ast.Name):
        found = _named(node.id, names)
        return found() if isinstance(found, type) else found
    return ast.literal_eval(node)


def _named(name: str, names: Mapping[str, Any]) -> Any:
    if name in names:
        return names[name]
    close = get_close_matches(name, names, n=1)
    cure = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(names))}. A text stands in quotes."
    raise ValueError(f"no monitor is called {name}, {cure}")


def _wrong(text: str, problem: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text}: {problem}")

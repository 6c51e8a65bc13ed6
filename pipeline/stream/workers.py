"""`Threads` and `Processes`: who works on the items of a stream."""

from __future__ import annotations

import multiprocessing
from typing import Any

import attrs

from pipeline._checks import whole
from pipeline.errors import SettingError

__all__ = ["Processes", "Threads"]


def _at_least_one(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    whole(f"{type(instance).__name__}.{attribute.name}", value)


def _start_method(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    name = f"{type(instance).__name__}.{attribute.name}"
    known = multiprocessing.get_all_start_methods()
    if value not in known:
        raise SettingError(name, f"one of {', '.join(known)} here", value)


@attrs.frozen
class Threads:
    """`n` threads of this process: for work that waits, or that lets go of the interpreter while it computes.

    They share the default generators of torch, Python and numpy with the rest of the program: what draws should take
    the generator that `map(seed=…)` gives.

    Args:   n: how many; ahead: items in work or ready, for each of them.
    Raises: SettingError for less than 1 of either.
    """

    n: int = attrs.field(validator=_at_least_one)
    ahead: int = attrs.field(default=2, validator=_at_least_one)


@attrs.frozen
class Processes:
    """`n` processes: for work in Python.

    Each gets the dataset and the functions by pickle, once, and then numbers of items. They are started from a process
    that has imported torch and nothing of yours ("forkserver"), where the system has that, or each by itself ("spawn");
    "fork" copies the process as it is, threads' locks too, and may hang. A script needs its
    `if __name__ == "__main__":`. Each has one thread for torch, and leaves Ctrl-C to the main process.

    Args:   n: how many; ahead: items in work or ready, for each of them; start: a start method of `multiprocessing`.
    Raises: SettingError for less than 1 of either, and for a start method that the system does not have.
    """

    n: int = attrs.field(validator=_at_least_one)
    ahead: int = attrs.field(default=2, validator=_at_least_one)
    start: str = attrs.field(
        factory=lambda: "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn",
        validator=_start_method,
    )

"""`python -m pipeline replay`: monitors over a log, from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress

import attrs

from pipeline import monitors
from pipeline._written_names import event_class, monitor
from pipeline.errors import SettingError
from pipeline.events import Event, RunEnded, RunStarted
from pipeline.monitor import Monitor
from pipeline.recording import read_events, replay

__all__ = ["add_to"]

_WIDTH = 72

_EXAMPLES = """
examples:
  python -m pipeline replay runs/a
  python -m pipeline replay runs/a --monitor MeanLoss --monitor "EarlyStopping('val_loss', patience=3)"
  python -m pipeline replay runs/a --monitor "every(GradNorm(), 10)"
  python -m pipeline replay runs/a --monitor mymodule:LongestWait --event mymodule:Spike
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add the command to those of the command line."""
    parser = commands.add_parser(
        "replay",
        help="results of monitors over the log of a run",
        description="Fold monitors over the log of a run and print their results.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log", help="the run's folder, or the file")
    parser.add_argument(
        "--monitor",
        action="append",
        type=monitor,
        help="a name of pipeline.monitors, or module:Name, with arguments as they are written in Python; may be "
        "repeated; without it all monitors of the library that need no argument and have something to tell",
    )
    parser.add_argument(
        "--event", action="append", type=event_class, default=[], help="module:Name of an event class of your own"
    )
    parser.add_argument("--skip-unknown", action="store_true", help="pass over events of other classes")
    parser.set_defaults(run=_run)


def _run(asked: argparse.Namespace) -> None:
    watching: list[Monitor] = asked.monitor or _without_arguments()
    events = read_events(asked.log, asked.event, skip_unknown=asked.skip_unknown)
    results = replay(events, [_Overview(), *watching])
    lines = [f"{asked.log}: {results.pop(_Overview().name)}", ""]
    if not asked.monitor:
        results = {name: result for name, result in results.items() if result is not None}
    margin = max(map(len, results), default=0) + 2
    for name, result in results.items():
        first, *rest = _written(result)
        lines += [name.ljust(margin) + first, *(" " * margin + line for line in rest)]
    sys.stdout.write("\n".join(lines) + "\n")


def _without_arguments() -> list[Monitor]:
    """The library's monitors that can be had by their name alone."""
    found: list[Monitor] = []
    for name in monitors.__all__:
        cls = getattr(monitors, name)
        if isinstance(cls, type):
            with suppress(TypeError, SettingError):  # it asks for arguments
                found.append(cls())
    return found


@attrs.frozen
class _Overview:
    """How many events there are, how far the run came, and how it ended."""

    name: str = "the log"

    def init(self) -> tuple[int, Event | None, str | None]:
        return 0, None, None

    def reduce(self, accumulator: tuple[int, Event | None, str | None], event: Event) -> tuple[int, Event, str | None]:
        count, _, end = accumulator
        if isinstance(event, RunStarted):
            end = None
        elif isinstance(event, RunEnded):
            end = ", ".join(event.reasons)
        return count + 1, event, end

    def result(self, accumulator: tuple[int, Event | None, str | None]) -> str:
        count, last, end = accumulator
        if last is None:
            return "no events"
        ended = "no end: it runs still, or was killed" if end is None else f"ended by {end}"
        return (
            f"{_counted(count, 'event')}, {_counted(last.update, 'update')}, {_counted(last.epoch, 'epoch')}; {ended}"
        )


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _written(result: object) -> list[str]:
    """A result on one line where it is plain and fits, and otherwise an entry a line."""
    if isinstance(result, Mapping) and result:
        parts: dict[str, list[str]] = {str(key): _written(value) for key, value in result.items()}
        flat, margin = "  ".join(f"{key} {value[0]}" for key, value in parts.items()), max(map(len, parts)) + 2
        lines = [
            (key if place == 0 else "").ljust(margin) + line
            for key, value in parts.items()
            for place, line in enumerate(value)
        ]
        return [flat] if _is_flat(result.values()) and len(flat) <= _WIDTH else lines
    if isinstance(result, (tuple, list)) and result:
        lines = [line for value in result for line in _written(value)]
        flat = ", ".join(lines)
        return [flat] if _is_flat(result) and len(flat) <= _WIDTH else lines
    if isinstance(result, float):
        return [f"{result:.6g}"]
    return ["-" if result is None else str(result)]


def _is_flat(values: Iterable[object]) -> bool:
    return not any(isinstance(value, (Mapping, tuple, list)) for value in values)

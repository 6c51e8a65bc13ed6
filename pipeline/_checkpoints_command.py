"""`python -m pipeline checkpoints`: what a run has saved, from the command line."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["add_to"]

_EXAMPLES = """
examples:
  python -m pipeline checkpoints runs/a
  python -m pipeline checkpoints runs/a --verify
  python -m pipeline checkpoints runs/a/checkpoints/0000000900
  python -m pipeline checkpoints runs/a/checkpoints/0000000900 --against runs/b/checkpoints/0000000900
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add the command to those of the command line."""
    parser = commands.add_parser(
        "checkpoints",
        help="what a run has saved: a list, what is in one, what sets two apart",
        description="List the checkpoints of a run, show what is in one of them, or what sets two apart.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="the run's, or that of one checkpoint")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--verify", action="store_true", help="read every file, and find out which are damaged")
    what.add_argument("--against", type=Path, metavar="OTHER", help="compare with this checkpoint")
    parser.set_defaults(run=_run)


def _run(asked: argparse.Namespace) -> None:
    report: Any = import_module("pipeline.checkpoint._report")  # only now: it imports torch, which takes seconds
    run = asked.folder.parent if asked.folder.name == "checkpoints" else asked.folder
    if asked.against is not None:
        lines = report.compared(asked.folder, asked.against)
    elif report.is_run(run):
        lines = report.listed(run, verified=asked.verify)
    else:
        lines = report.shown(asked.folder)  # which verifies it
    for line in lines:
        sys.stdout.write(f"{_harmless(line)}\n")


def _harmless(line: str) -> str:
    """The line without what a terminal would obey: names in it come from files."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)

"""`python -m pipeline`: what a person asks of a run's folder without writing a program. No torch here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pipeline import _checkpoints_command as checkpoints_command
from pipeline import _replay_command as replay_command
from pipeline.errors import FoldtrainError


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line asks for; where that cannot be done, say so and end with a status above 0."""
    parser = argparse.ArgumentParser(prog="python -m pipeline", description="Look into the folder of a run.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    replay_command.add_to(commands)
    checkpoints_command.add_to(commands)
    asked = parser.parse_args(arguments)
    try:
        asked.run(asked)
    except (FoldtrainError, OSError) as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()

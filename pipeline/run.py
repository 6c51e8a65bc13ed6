"""What a fold returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from pipeline.records import TrainState

__all__ = ["Run", "run_of"]


@attrs.frozen(eq=False)
class Run:
    """What a fold returns: the last state, the monitors' results by name, and why it ended, all reasons kept."""

    state: TrainState
    results: Mapping[str, Any]
    stopped_by: tuple[str, ...]


def run_of(error: BaseException) -> Run:
    """The run that `error` ended: the state before the micro-batch that failed, and the results up to there.

    Raises: ValueError for an error that no fold raised.
    """
    run = getattr(error, "__run__", None)
    if not isinstance(run, Run):
        raise ValueError("this error did not come out of a fold")
    return run

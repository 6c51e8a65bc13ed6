"""Learning-rate schedules: pure functions of the update count, from 0, that print as they were written.

A schedule is any `f(count) -> rate`; those here are frozen attrs classes. The first update has count 0, and is never
wasted on a rate of 0 by a warmup. Only `tabulate` needs torch, and loads it when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipeline.schedules._settings import Schedule
from pipeline.schedules.combined import Join, Scale, Warmup, join, points, scale, warmup
from pipeline.schedules.shapes import (
    Constant,
    Cosine,
    Exponential,
    Linear,
    Polynomial,
    Staircase,
    Table,
    constant,
    cosine,
    exponential,
    linear,
    polynomial,
    staircase,
)
from pipeline.schedules.whole import (
    OneCycle,
    WarmRestarts,
    WarmupCosine,
    WarmupStableDecay,
    one_cycle,
    warm_restarts,
    warmup_cosine,
    warmup_stable_decay,
)

if TYPE_CHECKING:
    from pipeline.schedules.tabulated import tabulate

__all__ = [
    "Constant",
    "Cosine",
    "Exponential",
    "Join",
    "Linear",
    "OneCycle",
    "Polynomial",
    "Scale",
    "Schedule",
    "Staircase",
    "Table",
    "WarmRestarts",
    "Warmup",
    "WarmupCosine",
    "WarmupStableDecay",
    "constant",
    "cosine",
    "exponential",
    "join",
    "linear",
    "one_cycle",
    "points",
    "polynomial",
    "scale",
    "staircase",
    "tabulate",
    "warm_restarts",
    "warmup",
    "warmup_cosine",
    "warmup_stable_decay",
]


def __getattr__(name: str) -> Any:
    if name == "tabulate":
        return importlib.import_module("pipeline.schedules.tabulated").tabulate
    raise AttributeError(f"module 'pipeline.schedules' has no attribute {name!r}")

"""`EarlyStopping`: patience, margins, and the time before which it does not stop."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pipeline import monitors, replay
from pipeline.events import Event
from tests.monitors.cases import evaluation, reduced, start, update


def evaluations(values: list[float], measure: str = "val_loss", **more: Any) -> list[Event]:
    return [evaluation(value, n, measure, **more) for n, value in enumerate(values, start=1)]


def stops(stopping: monitors.EarlyStopping, events: list[Event]) -> list[int]:
    """The places after which it asks to stop."""
    return [n for n in range(len(events) + 1) if list(stopping.signals(reduced(stopping, events[:n])))]


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [
        ("min", [math.nan, 0.5, 0.4, math.nan], 0.4),
        ("max", [math.nan, 0.1, 0.2, math.nan], 0.2),
        ("min", [math.inf, 0.5], 0.5),
        ("min", [0.5, -math.inf], -math.inf),
    ],
)
def test_nan_is_never_best(mode: Any, values: list[float], best: float) -> None:
    stopping = monitors.EarlyStopping("val_loss", patience=5, mode=mode)
    assert replay(evaluations(values), [stopping])["EarlyStopping"]["best"] == best


def test_nan_counts_as_no_improvement() -> None:
    assert stops(monitors.EarlyStopping("val_loss", patience=2), evaluations([math.nan] * 3)) == [2, 3]
    assert stops(monitors.EarlyStopping("val_loss", patience=2), evaluations([1.0, math.nan, math.nan, 0.5])) == [3]


def test_patience_counts_evaluations_that_report_the_measure() -> None:
    stopping = monitors.EarlyStopping("val_loss", patience=2)
    accumulator = reduced(stopping, [*evaluations([1.0, 1.1]), *evaluations([0.0, 0.0], "val_other")])
    assert list(stopping.signals(accumulator)) == []
    accumulator = reduced(stopping, evaluations([1.2]), accumulator)
    (signal,) = stopping.signals(accumulator)
    assert "val_loss no better for 2 evaluations (best 1 at update 1)" in signal.reason


def test_min_delta_is_what_a_value_must_be_better_by() -> None:
    stopping = monitors.EarlyStopping("val_loss", patience=5, min_delta=0.1)
    assert replay(evaluations([1.0, 0.95, 0.89]), [stopping])["EarlyStopping"] == {
        "best": 0.89,
        "update": 3,
        "waited": 0,
    }
    assert replay(evaluations([1.0, 0.95]), [stopping])["EarlyStopping"]["waited"] == 1


def test_before_the_minimum_of_updates_it_waits_and_does_not_stop() -> None:
    stopping = monitors.EarlyStopping("val_loss", patience=1, min_updates=4)
    assert stops(stopping, evaluations([1.0, 2.0, 2.0, 2.0])) == [4]
    assert stops(stopping, evaluations([1.0, 2.0, 2.0, 0.5])) == []


def test_it_is_the_evaluation_that_must_lie_behind_the_minimum_time() -> None:
    stopping = monitors.EarlyStopping("val_loss", patience=1, min_updates=4)
    log = [*evaluations([1.0, 2.0]), update(4), update(5), evaluation(2.0, 6)]
    assert stops(stopping, log) == [5]


def test_before_the_minimum_of_seconds_it_waits_and_does_not_stop() -> None:
    stopping = monitors.EarlyStopping("val_loss", patience=1, min_seconds=10.0)
    log = [start(100.0), *(evaluation(1.0, n, time=100.0 + 3 * n) for n in (1, 2, 3, 4))]
    assert stops(stopping, log) == [5]


def test_seconds_between_two_runs_do_not_count_and_those_before_do() -> None:
    stopping = monitors.EarlyStopping("val_loss", patience=1, min_seconds=10.0)
    first = [start(0.0), evaluation(1.0, 1, time=4.0), update(2, time=6.0)]
    resumed = [start(1000.0, n=2), evaluation(1.0, 3, time=1003.0), evaluation(1.0, 4, time=1004.0)]
    assert stops(stopping, [*first, *resumed]) == [6]


@pytest.mark.parametrize(
    "bad",
    [
        {"patience": 0},
        {"patience": math.nan},
        {"mode": "best"},
        {"min_delta": -1.0},
        {"min_updates": -1},
        {"min_seconds": math.inf},
    ],
)
def test_settings_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        monitors.EarlyStopping("val_loss", **bad)

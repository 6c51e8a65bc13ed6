"""The laws of monitors, over one list that every public monitor is on."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import monitors, replay
from pipeline.events import EvalDone, Event, RunStarted, UpdateDone, UpdateSkipped
from pipeline.monitor import Monitor

ALL: list[Any] = [
    monitors.MeanLoss(),
    monitors.Mean("accuracy"),
    monitors.LearningRate(),
    monitors.GradNorm(),
    monitors.Throughput(),
    monitors.EarlyStopping("val_loss", patience=2),
    monitors.Plateau("val_loss", patience=1, cooldown=1, warmup=2),
]

numbers = st.floats(-1e3, 1e3) | st.just(float("nan"))
positive = st.integers(0, 50)


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    events: list[Event] = []
    time, update = 0.0, 0
    for kind in draw(st.lists(st.sampled_from(["update", "skip", "eval", "start"]), max_size=30)):
        time += draw(st.floats(0, 10))
        at: dict[str, Any] = {"micro_step": update, "update": update, "epoch": 0, "time": time}
        if kind == "update":
            update += 1
            weight = draw(positive)
            measures = {"accuracy": (draw(st.floats(0, 1)) * weight, weight)} if draw(st.booleans()) else {}
            events.append(
                UpdateDone(
                    **{**at, "update": update}, loss=draw(numbers), weight=weight, micro_batches=1, measures=measures,
                    rates={"default": draw(st.floats(0, 1))}, grad_norm=draw(st.floats(0, 1e3)), samples=update * 3,
                )
            )  # fmt: skip
        elif kind == "skip":
            events.append(
                UpdateSkipped(**at, reason="x", skipped=1, in_row=1, loss=0.0, grad_norm=math.inf, micro_batches=1)
            )
        elif kind == "eval":
            values = {"val_loss": draw(numbers)} if draw(st.booleans()) else {"val_other": 1.0}
            events.append(EvalDone(**at, name="val", values=values, weight=3.0, batches=1))
        else:
            events.append(RunStarted(**at, until="Updates(3)"))
    return events


def reduced(monitor: Any, events: list[Event], accumulator: Any = None) -> Any:
    accumulator = monitor.init() if accumulator is None else accumulator
    for event in events:
        accumulator = monitor.reduce(accumulator, event)
    return accumulator


def same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)  # NaN equal to NaN


def test_every_public_monitor_is_on_the_list() -> None:
    assert {type(m).__name__ for m in ALL} == set(monitors.__all__)
    assert all(isinstance(m, Monitor) for m in ALL)


@pytest.mark.parametrize("monitor", ALL, ids=lambda m: m.name)
@given(events=logs(), data=st.data())
def test_cut_anywhere_and_gone_on_gives_the_same(monitor: Any, events: list[Event], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(events)))
    middle = reduced(monitor, events[:cut])
    asked = monitor.result(middle)
    carried = json.loads(json.dumps(middle)) if middle is not None else None  # plain values: they travel
    carried = _tuples(carried)
    whole = reduced(monitor, events)
    assert same(monitor.result(middle), asked)
    if middle is not None:
        assert same(reduced(monitor, events[cut:], middle), whole)
        assert same(reduced(monitor, events[cut:], carried), whole)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@given(events=logs())
def test_the_order_of_monitors_changes_nothing(events: list[Event]) -> None:
    assert same(sorted(replay(events, ALL).items()), sorted(replay(events, ALL[::-1]).items()))


@pytest.mark.parametrize("monitor", [m for m in ALL if hasattr(m, "merge")], ids=lambda m: m.name)
@given(a=logs(), b=logs(), c=logs())
def test_merge_is_associative_has_a_unit_and_equals_one_log(
    monitor: Any, a: list[Event], b: list[Event], c: list[Event]
) -> None:
    x, y, z = (reduced(monitor, log) for log in (a, b, c))
    merge, unit = monitor.merge, monitor.init()
    assert _near(merge(merge(x, y), z), merge(x, merge(y, z)))
    assert _near(merge(unit, x), x)
    assert _near(merge(x, unit), x)
    assert _near(merge(x, y), reduced(monitor, [*a, *b]))


def _near(a: Any, b: Any) -> bool:
    return all((math.isnan(x) and math.isnan(y)) or x == pytest.approx(y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("monitor", ALL, ids=lambda m: m.name)
def test_with_no_events_the_result_is_none(monitor: Any) -> None:
    assert monitor.result(monitor.init()) is None
    assert replay([], [monitor]) == {monitor.name: None}


class TestValues:
    def update(self, **more: Any) -> UpdateDone:
        given = {"micro_step": 1, "update": 1, "epoch": 0, "time": 0.0, "loss": 1.0, "weight": 1.0, "grad_norm": 1.0}
        return UpdateDone(**{**given, "micro_batches": 1, "rates": {"default": 0.1}, **more})

    def test_means_are_weighted_and_a_weight_of_zero_changes_nothing(self) -> None:
        events = [self.update(loss=loss, weight=w) for loss, w in ((0.7, 256), (0.8, 256), (0.9, 10))]
        expected = (0.7 * 256 + 0.8 * 256 + 0.9 * 10) / 522
        for log in (events, [*events, self.update(loss=math.nan, weight=0)]):
            assert replay(log, [monitors.MeanLoss()])["MeanLoss"] == pytest.approx(expected, abs=1e-12)
        assert expected == pytest.approx(0.75287, abs=1e-5)
        assert replay([self.update(loss=math.nan, weight=0)], [monitors.MeanLoss()]) == {"MeanLoss": None}

    def test_a_measure_is_the_mean_over_what_it_counted(self) -> None:
        events = [self.update(measures={"hit": (1.0, 1)}), self.update(measures={"hit": (0.0, 9)})]
        assert replay(events, [monitors.Mean("hit")]) == {"Mean hit": 0.1}

    def test_rates_norms_and_throughput(self) -> None:
        events = [
            self.update(time=1.0, samples=10, tokens=5, update=1, grad_norm=1.0, rates={"default": 0.1, "b": 0.3}),
            self.update(time=3.0, samples=30, tokens=15, update=2, grad_norm=3.0, rates={"default": 0.2}),
        ]
        watch = [monitors.LearningRate(), monitors.LearningRate("b", "b"), monitors.GradNorm(), monitors.Throughput()]
        assert replay(events, watch) == {
            "LearningRate": 0.2,
            "b": 0.3,
            "GradNorm": {"last": 3.0, "mean": 2.0, "max": 3.0},
            "Throughput": {"samples": 10.0, "tokens": 5.0, "updates": 0.5},
        }

    def evals(self, values: list[float], measure: str = "val_loss") -> list[Event]:
        return [
            EvalDone(micro_step=i, update=i, epoch=i, time=0.0, name="val", values={measure: v}, weight=1.0, batches=1)
            for i, v in enumerate(values, 1)
        ]

    @pytest.mark.parametrize(
        ("mode", "values", "best"),
        [
            ("min", [math.nan, 0.5, 0.4, math.nan], 0.4),
            ("max", [math.nan, 0.1, 0.2, math.nan], 0.2),
            ("min", [math.inf, 0.5], 0.5),
            ("min", [0.5, -math.inf], -math.inf),
        ],
    )
    def test_nan_is_never_best(self, mode: Any, values: list[float], best: float) -> None:
        stopping = monitors.EarlyStopping("val_loss", patience=5, mode=mode)
        assert replay(self.evals(values), [stopping])["EarlyStopping"]["best"] == best

    def test_patience_counts_evaluations_that_report_the_measure(self) -> None:
        stopping = monitors.EarlyStopping("val_loss", patience=2)
        accumulator = reduced(stopping, [*self.evals([1.0, 1.1]), *self.evals([0.0, 0.0], "val_other")])
        assert list(stopping.signals(accumulator)) == []
        accumulator = reduced(stopping, self.evals([1.2]), accumulator)
        (signal,) = stopping.signals(accumulator)
        assert "val_loss no better for 2 evaluations (best 1 at update 1)" in signal.reason

    def test_min_delta_is_what_a_value_must_be_better_by(self) -> None:
        stopping = monitors.EarlyStopping("val_loss", patience=5, min_delta=0.1)
        assert replay(self.evals([1.0, 0.95, 0.89]), [stopping])["EarlyStopping"] == {
            "best": 0.89,
            "update": 3,
            "waited": 0,
        }
        assert replay(self.evals([1.0, 0.95]), [stopping])["EarlyStopping"]["waited"] == 1

    @pytest.mark.parametrize("bad", [{"patience": 0}, {"mode": "best"}, {"min_delta": -1.0}])
    def test_settings_are_checked(self, bad: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="must be"):
            monitors.EarlyStopping("val_loss", **bad)

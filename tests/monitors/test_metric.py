"""`Metric`: stateful metrics as monitors, whose state is in the accumulator alone."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics

from pipeline import monitors, replay
from pipeline.errors import SettingError
from pipeline.events import Event, UpdateDone
from tests.monitors.cases import Total, fed, reduced, start, update


def loss_and_weight(event: Event) -> tuple[float, float] | None:
    return (float(event.loss), float(event.weight)) if isinstance(event, UpdateDone) else None


def norm(event: Event) -> tuple[Any] | None:
    return (torch.tensor([float(event.grad_norm)]),) if isinstance(event, UpdateDone) else None


def both(event: Event) -> tuple[Any, Any] | None:
    return None if (fed := norm(event)) is None else (fed[0], fed[0] ** 2)


LOG = [start(), *(update(n, loss=1 / n, weight=n, grad_norm=n % 3 + 0.1) for n in range(1, 8))]


def test_the_metric_that_is_given_is_never_updated() -> None:
    metric = Total()
    monitor = monitors.Metric(metric, fed)
    assert replay(LOG, [monitor]) == {"Total": (pytest.approx(7.7), 1)}
    assert vars(metric) == vars(Total())


def test_an_accumulator_stays_as_it_was_when_it_is_gone_on_from() -> None:
    monitor = monitors.Metric(Total(), fed)
    middle = reduced(monitor, LOG[:4])
    kept = copy.deepcopy(middle)
    first, second = (reduced(monitor, LOG[4:], middle) for _ in range(2))
    assert middle == kept
    assert first == second == reduced(monitor, LOG)


def test_what_the_metric_held_when_it_was_given_does_not_count() -> None:
    used = Total()
    used.update(100.0)
    assert replay(LOG, [monitors.Metric(used, fed)]) == replay(LOG, [monitors.Metric(Total(), fed)])


def test_before_the_first_event_that_feeds_it_there_is_no_result() -> None:
    assert replay([start()], [monitors.Metric(Total(), fed)]) == {"Total": None}
    silent = monitors.Metric(torchmetrics.MeanMetric(), loss_and_weight)
    assert replay([], [silent]) == {"MeanMetric": None}


@pytest.mark.parametrize(
    ("metric", "feed"),
    [
        (torchmetrics.MeanMetric(), loss_and_weight),
        (torchmetrics.MaxMetric(), norm),
        (torchmetrics.CatMetric(), norm),
        (torchmetrics.PearsonCorrCoef(), both),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "compute") else "",
)
def test_torchmetrics_give_what_they_give_by_themselves(metric: Any, feed: Any) -> None:
    alone = copy.deepcopy(metric)
    for event in LOG:
        if (args := feed(event)) is not None:
            alone.update(*args)
    monitor = monitors.Metric(metric, feed)
    accumulator = monitor.init()
    for event in LOG:  # each time through what a checkpoint does to it
        accumulator = monitor.reduce(_tuples(json.loads(json.dumps(accumulator))), event)
    expected = alone.compute().tolist()
    assert monitor.result(accumulator) == (tuple(expected) if isinstance(expected, list) else expected)
    assert metric.update_count == 0


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class Holder(Total):
    """A metric of all kinds of state."""

    def reset(self) -> None:
        super().reset()
        self.table = np.zeros((0, 2), dtype=np.float32)
        self.counts = torch.zeros(2, 3, dtype=torch.int16)
        self.seen: tuple[Any, ...] = (None, True, "x", [np.float64(0.5)])

    def update(self, value: float) -> None:
        super().update(value)
        self.table = np.vstack([self.table, np.array([[value, 1]], dtype=np.float32)])
        self.counts[0, 1] += 1
        self.empty = torch.zeros(0, 3)
        self.seen = (*self.seen, {"value": torch.tensor(value, dtype=torch.bfloat16)})

    def compute(self) -> Any:
        kinds = (str(self.table.dtype), str(self.counts.dtype), str(self.seen[-1]["value"].dtype))
        shape = tuple(self.empty.shape)
        return {"table": self.table, "counts": self.counts, "seen": self.seen[:4], "kinds": kinds, "shape": shape}


def test_arrays_keep_their_type_and_shape_and_containers_their_kind() -> None:
    result = replay([update(1, grad_norm=0.1), update(2, grad_norm=2.0)], [monitors.Metric(Holder(), fed)])["Holder"]
    assert result == {
        "table": ((pytest.approx(0.1), 1.0), (2.0, 1.0)),
        "counts": ((0, 2, 0), (0, 0, 0)),
        "seen": (None, True, "x", (0.5,)),
        "kinds": ("float32", "torch.int16", "torch.bfloat16"),
        "shape": (0, 3),
    }


class Hidden(Total):
    """A metric whose state is no plain value."""

    def reset(self) -> None:
        super().reset()
        self.members = set[float]()


class HiddenLater(Total):
    """A metric whose state is no plain value any more, once it has been updated."""

    def update(self, value: float) -> None:
        self.sum = complex(value)  # type: ignore[assignment]


def test_state_that_cannot_be_carried_is_refused() -> None:
    with pytest.raises(SettingError, match=r"Metric.metric must be a metric that keeps numbers.*members = set\(\)"):
        monitors.Metric(Hidden(), fed)
    with pytest.raises(SettingError, match="sum = "):
        replay(LOG, [monitors.Metric(HiddenLater(), fed)])


@pytest.mark.parametrize("bad", [Total, object(), None])
def test_what_is_no_metric_is_refused(bad: Any) -> None:
    with pytest.raises(SettingError, match="an object with `update`, `compute` and `reset`"):
        monitors.Metric(bad, fed)


@pytest.mark.parametrize(
    "several",
    [
        torchmetrics.MetricCollection([torchmetrics.MeanMetric()]),
        torchmetrics.MinMaxMetric(torchmetrics.MeanMetric()),
        torchmetrics.MeanMetric() + torchmetrics.MaxMetric(),
    ],
    ids=lambda metric: type(metric).__name__,
)
def test_metrics_made_of_metrics_are_refused(several: Any) -> None:
    with pytest.raises(SettingError, match="Give each metric inside a Metric of its own"):
        monitors.Metric(several, loss_and_weight)

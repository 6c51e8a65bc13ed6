"""`Plateau`, evaluation by evaluation against torch's `ReduceLROnPlateau`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pipeline import monitors
from pipeline.errors import SettingError
from pipeline.events import EvalDone


def evaluation(value: float, update: int = 1, measure: str = "val_loss") -> EvalDone:
    at: dict[str, Any] = {"micro_step": update, "update": update, "epoch": 0, "time": 0.0}
    return EvalDone(**at, name="val", values={measure: value}, weight=1.0, batches=1)


def factors(plateau: monitors.Plateau, values: list[float]) -> list[float | None]:
    accumulator, found = plateau.init(), list[float | None]()
    for value in values:
        accumulator = plateau.reduce(accumulator, evaluation(value))
        found.append(plateau.result(accumulator))
    return found


def torchs(values: list[float], **settings: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer, eps=0.0, **settings)
    found = list[float]()
    for value in values:
        scheduler.step(value)
        found.append(optimizer.param_groups[0]["lr"])
    return found


# Few different values, near each other: ties, thresholds met exactly, and long plateaus.
values = st.lists(st.sampled_from([1.0, 0.9999, 0.99, 0.9, 0.5, 1.01, 1.1, 2.0, math.nan, math.inf, 0.0]), max_size=40)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("threshold_mode", ["relative", "absolute"])
@given(
    values=values,
    patience=st.integers(0, 4),
    cooldown=st.integers(0, 4),
    threshold=st.sampled_from([0.0, 1e-4, 0.01, 0.1, 0.5]),
    factor=st.sampled_from([0.1, 0.5, 0.9]),
    floor=st.sampled_from([0.0, 0.01, 0.3]),
)
def test_it_is_torchs_after_every_evaluation(
    mode: Any,
    threshold_mode: Any,
    values: list[float],
    patience: int,
    cooldown: int,
    threshold: float,
    factor: float,
    floor: float,
) -> None:
    shared: dict[str, Any] = {"patience": patience, "cooldown": cooldown, "threshold": threshold, "factor": factor}
    plateau = monitors.Plateau("val_loss", **shared, threshold_mode=threshold_mode, mode=mode, floor=floor)
    theirs = torchs(values, mode=mode, **shared, threshold_mode=threshold_mode[:3], min_lr=floor)
    assert factors(plateau, values) == theirs


@pytest.mark.parametrize(("mode", "values"), [("min", [-1.0, -1.0, -1.0]), ("max", [-1.0, -1.0, -1.0])])
def test_below_zero_a_plateau_is_one_too(mode: Any, values: list[float]) -> None:
    plateau = monitors.Plateau("val_loss", patience=0, threshold=0.1, mode=mode)
    assert factors(plateau, values) == pytest.approx([1.0, 0.1, 0.01])
    better = [-1.0, -1.05, -1.2] if mode == "min" else [-1.0, -0.95, -0.8]
    assert factors(plateau, better) == pytest.approx([1.0, 0.1, 0.1])


def test_evaluations_in_the_warmup_and_of_other_measures_pass_by() -> None:
    plateau = monitors.Plateau("val_loss", patience=0, warmup=10)
    accumulator = plateau.init()
    for event in (evaluation(0.1, 5), evaluation(9.0, 9), evaluation(0.0, 20, "val_other")):
        accumulator = plateau.reduce(accumulator, event)
    assert accumulator == plateau.init()
    assert plateau.result(accumulator) is None
    assert list(plateau.signals(accumulator)) == []
    accumulator = plateau.reduce(accumulator, evaluation(5.0, 10))
    assert plateau.result(accumulator) == 1.0
    assert monitors.Plateau("val_loss").reduce(plateau.init(), evaluation(1.0, 0)) != plateau.init()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"factor": 1.0}, "Plateau.factor must be above 0 and below 1"),
        ({"factor": 0.0}, "Plateau.factor"),
        ({"patience": -1}, "Plateau.patience must be a whole number, 0 or more"),
        ({"cooldown": -1}, "Plateau.cooldown"),
        ({"warmup": -1}, "Plateau.warmup"),
        ({"threshold": 1.0}, "Plateau.threshold must be 0 or more, and below 1"),
        ({"threshold": math.nan}, "Plateau.threshold"),
        ({"threshold": math.inf, "threshold_mode": "absolute"}, "Plateau.threshold"),
        ({"threshold_mode": "rel"}, "Plateau.threshold_mode must be 'relative' or 'absolute'"),
        ({"mode": "best"}, "Plateau.mode must be 'min' or 'max'"),
        ({"floor": 1.0}, "Plateau.floor must be .* bound on the factor"),
    ],
)
def test_settings_are_checked(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        monitors.Plateau("val_loss", **bad)

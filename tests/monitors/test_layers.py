"""Layer by layer: verdicts on gradient norms, and ratios of updates to weights."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pipeline import monitors, replay
from pipeline.errors import SettingError
from tests.monitors.cases import update


def grads(**norms: float) -> Any:
    return update(facts={f"grad_norm/{layer}": norm for layer, norm in norms.items()})


def judged(monitor: monitors.LayerGradNorms, *events: Any) -> dict[str, Any]:
    return replay(events, [monitor])[monitor.name]


def verdicts(monitor: monitors.LayerGradNorms, **norms: float) -> list[str]:
    return [layer["verdict"] for layer in judged(monitor, grads(**norms)).values()]


def test_a_layer_is_judged_against_the_median_of_its_update() -> None:
    monitor = monitors.LayerGradNorms(vanishing=0.1, exploding=10.0)
    assert verdicts(monitor, a=1.0, b=2.0, c=3.0, d=0.19, e=21.0) == [*["healthy"] * 3, "vanishing", "exploding"]
    assert verdicts(monitor, a=1e-9, b=2e-9, c=3e-9) == ["healthy"] * 3  # all together small: no layer stands out


def test_thresholds_are_met_from_the_side_that_their_words_say() -> None:
    monitor = monitors.LayerGradNorms(vanishing=0.5, exploding=2.0)
    assert verdicts(monitor, a=0.5, b=1.0, c=2.0) == ["vanishing", "healthy", "healthy"]


def test_absolute_thresholds_are_norms() -> None:
    monitor = monitors.LayerGradNorms(0.1, 10.0, threshold_mode="absolute")
    assert verdicts(monitor, a=0.1, b=10.0, c=11.0) == ["vanishing", "healthy", "exploding"]
    assert verdicts(monitor, a=1e-9, b=2e-9) == ["vanishing"] * 2


@pytest.mark.parametrize("mode", ["relative", "absolute"])
def test_zero_vanishes_and_what_is_not_finite_explodes(mode: Any) -> None:
    monitor = monitors.LayerGradNorms(threshold_mode=mode)
    expected = ["healthy", "vanishing", "exploding", "exploding"]
    assert verdicts(monitor, a=1.0, b=0.0, c=math.nan, d=math.inf) == expected
    assert verdicts(monitor, a=0.0, b=0.0) == ["vanishing"] * 2
    assert verdicts(monitor, a=math.nan, b=0.0) == ["exploding", "vanishing"]


def test_layers_of_no_gradient_do_not_move_the_median() -> None:
    assert verdicts(monitors.LayerGradNorms(), a=0.0, b=0.0, c=0.0, d=1.0) == [*["vanishing"] * 3, "healthy"]


def test_the_last_norm_and_the_shares_of_the_updates_that_told_it() -> None:
    monitor = monitors.LayerGradNorms(0.1, 10.0, threshold_mode="absolute")
    found = judged(monitor, grads(a=1.0, b=1.0), update(), grads(a=0.01), grads(a=0.02), grads(a=20.0))
    assert found == {
        "a": {"norm": 20.0, "verdict": "exploding", "vanishing": 0.5, "exploding": 0.25},
        "b": {"norm": 1.0, "verdict": "healthy", "vanishing": 0.0, "exploding": 0.0},
    }


def test_the_layers_stay_in_the_order_of_the_model() -> None:
    assert list(judged(monitors.LayerGradNorms(), grads(z=1.0, a=1.0), grads(a=1.0, m=1.0))) == ["z", "a", "m"]


@pytest.mark.parametrize(
    "bad", [{"vanishing": 0.0}, {"exploding": math.inf}, {"vanishing": 2.0, "exploding": 2.0}, {"threshold_mode": "no"}]
)
def test_settings_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=r"LayerGradNorms\..* must be"):
        monitors.LayerGradNorms(**bad)


def moved(**layers: tuple[float, float]) -> Any:
    facts = {f"update_norm/{layer}": norm for layer, (norm, _) in layers.items()}
    return update(facts=facts | {f"param_norm/{layer}": norm for layer, (_, norm) in layers.items()})


def test_a_ratio_is_that_of_the_update_to_the_weights() -> None:
    events = [moved(a=(1.0, 4.0), b=(2.0, 2.0)), update(), moved(a=(3.0, 4.0))]
    assert replay(events, [monitors.UpdateRatios()])["UpdateRatios"] == {
        "a": {"last": 0.75, "mean": 0.5, "max": 0.75},
        "b": {"last": 1.0, "mean": 1.0, "max": 1.0},
    }


def test_a_ratio_of_nan_is_never_the_largest_and_shows_in_the_mean() -> None:
    for norms in ([math.nan, 1.0], [1.0, math.nan]):
        spread = replay([moved(a=(norm, 2.0)) for norm in norms], [monitors.UpdateRatios()])["UpdateRatios"]["a"]
        assert spread["max"] == 0.5
        assert math.isnan(spread["mean"])


def test_a_layer_of_zeros_or_without_a_norm_passes_by() -> None:
    events = [moved(a=(1.0, 0.0)), update(facts={"update_norm/b": 1.0}), update(facts={"param_norm/c": 1.0})]
    assert replay(events, [monitors.UpdateRatios()])["UpdateRatios"] is None

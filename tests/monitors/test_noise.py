"""`GradNoiseScale` on gradients whose mean and covariance are known."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from pipeline import MeasureNoise, fold, init, monitors, replay
from tests.cases.probe import Probe, items, probe_step
from tests.monitors.cases import update

DIM, ITEMS, MICRO_BATCHES = 10, 4, 8
MEAN, SIGMA = 0.2, 1.0
SQUARE, TRACE = DIM * MEAN**2, DIM * SIGMA**2  # |G|² and tr(Σ): a noise scale of 25 items


def square(vector: list[float]) -> float:
    return sum(x * x for x in vector)


def window(rng: random.Random, **more: Any) -> Any:
    """An update from items whose gradients are drawn from one normal distribution."""
    spread = SIGMA / math.sqrt(ITEMS)
    micro = [[rng.gauss(MEAN, spread) for _ in range(DIM)] for _ in range(MICRO_BATCHES)]
    mean = [sum(column) / MICRO_BATCHES for column in zip(*micro, strict=True)]
    measured = {"micro_grad_square": (sum(map(square, micro)), MICRO_BATCHES)}
    given = {"weight": ITEMS * MICRO_BATCHES, "micro_batches": MICRO_BATCHES, "measures": measured}
    return update(**{**given, "grad_norm": math.sqrt(square(mean)), **more})


def found(monitor: monitors.GradNoiseScale, *events: Any) -> dict[str, Any]:
    return replay(events, [monitor])[monitor.name]


def test_gaussian_gradients_have_the_noise_scale_that_they_were_drawn_with() -> None:
    rng = random.Random(0)
    estimate = found(monitors.GradNoiseScale(decay=1), *(window(rng) for _ in range(2000)))
    assert estimate["grad_square"] == pytest.approx(SQUARE, rel=0.03)
    assert estimate["trace"] == pytest.approx(TRACE, rel=0.03)
    assert estimate["noise_scale"] == pytest.approx(TRACE / SQUARE, rel=0.05)
    assert estimate["batch_size"] == round(estimate["noise_scale"])


def test_both_estimators_are_the_ones_of_the_paper() -> None:
    # Two micro-batches of 3 items, with mean gradients (3, 0) and (1, 4): the window's is (2, 2).
    event = update(weight=6, grad_norm=math.sqrt(8), measures={"micro_grad_square": (9.0 + 17.0, 2)}, micro_batches=2)
    grad_square = (6 * 8 - 3 * 13) / (6 - 3)
    trace = (13 - 8) / (1 / 3 - 1 / 6)
    estimate = found(monitors.GradNoiseScale(), event)
    expected = {"noise_scale": trace / grad_square, "batch_size": 10, "grad_square": 3.0, "trace": trace}
    assert estimate == pytest.approx(expected, rel=1e-12)


def test_the_averages_are_divided_and_not_the_ratios_averaged() -> None:
    a = update(weight=2, grad_norm=1.0, measures={"micro_grad_square": (4.0, 2)})  # |G|² 0, tr(Σ) 2
    b = update(weight=2, grad_norm=2.0, measures={"micro_grad_square": (8.0, 2)})  # |G|² 4, tr(Σ) 0
    assert found(monitors.GradNoiseScale(decay=1), a, b)["noise_scale"] == 0.5
    assert found(monitors.GradNoiseScale(decay=0.5), a, b)["noise_scale"] == 0.25
    assert found(monitors.GradNoiseScale(decay=0.5), a, b)["trace"] == pytest.approx(2 / 3)


def test_a_recent_change_is_seen_sooner_with_a_decay() -> None:
    rng = random.Random(1)
    calm = [window(rng, grad_norm=1.0, measures={"micro_grad_square": (MICRO_BATCHES, MICRO_BATCHES)})] * 50
    noisy = [window(rng) for _ in range(50)]
    fading, summed = (found(monitors.GradNoiseScale(decay=d), *calm, *noisy)["noise_scale"] for d in (0.9, 1))
    assert fading > 3 * summed


def test_noise_that_drowns_the_gradient_gives_no_noise_scale_and_says_so() -> None:
    event = update(weight=2, grad_norm=0.1, measures={"micro_grad_square": (8.0, 2)})
    estimate = found(monitors.GradNoiseScale(), event)
    assert (estimate["noise_scale"], estimate["batch_size"]) == (None, None)
    assert estimate["grad_square"] < 0


def test_gradients_that_agree_ask_for_the_smallest_batch() -> None:
    agree = update(weight=2, grad_norm=2.0, measures={"micro_grad_square": (8.0, 2)})
    nearer = update(weight=2, grad_norm=2.0, measures={"micro_grad_square": (7.9, 2)})
    for event in (agree, nearer):
        estimate = found(monitors.GradNoiseScale(), event)
        assert (estimate["noise_scale"], estimate["batch_size"]) == (0.0, 1)


def test_a_run_on_items_of_known_spread_tells_it() -> None:
    # The gradient of (w - y)² / 2 at w = 0 is -y: with a rate of 0 the items are drawn around |G|² = 1, tr(Σ) = 4.
    generator = torch.Generator().manual_seed(0)
    batches = [items(*(1.0 + 2.0 * torch.randn(4, generator=generator)).tolist()) for _ in range(4 * 500)]
    step = probe_step(model := Probe(), every=4, lr=0.0).insert_before("Accumulate", MeasureNoise())
    run = fold(step, init(step, model), batches, monitors=[monitors.GradNoiseScale(decay=1)])
    estimate = run.results["GradNoiseScale"]
    assert estimate["grad_square"] == pytest.approx(1.0, rel=0.1)
    assert estimate["trace"] == pytest.approx(4.0, rel=0.1)


@pytest.mark.parametrize(
    "bad",
    [
        {"measures": {}},
        {"measures": {"micro_grad_square": (1.0, 1)}},
        {"measures": {"micro_grad_square": (0.0, 0)}},
        {"weight": 0},
        {"grad_norm": math.nan},
        {"grad_norm": 1e200},
        {"measures": {"micro_grad_square": (math.inf, MICRO_BATCHES)}},
    ],
)
def test_windows_that_do_not_tell_pass_by(bad: dict[str, Any]) -> None:
    rng = random.Random(2)
    told = window(rng)
    assert found(monitors.GradNoiseScale(), told, window(rng, **bad)) == found(monitors.GradNoiseScale(), told)
    assert replay([window(rng, **bad)], [monitors.GradNoiseScale()]) == {"GradNoiseScale": None}

"""Every schedule against its counterpart in `torch.optim.lr_scheduler`, at each of 1,000 updates, to 1e-12."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torchs

from pipeline import schedules
from pipeline.schedules import Schedule

UPDATES = 1_000
RATE = 0.3

Make = Callable[[Optimizer], torchs.LRScheduler]


def chained(o: Optimizer) -> torchs.LRScheduler:
    return torchs.ChainedScheduler([torchs.ExponentialLR(o, 0.999), torchs.LinearLR(o, 0.1, total_iters=400)])


def sequence(o: Optimizer, *makes: Make, milestones: list[int]) -> torchs.LRScheduler:
    return torchs.SequentialLR(o, [make(o) for make in makes], milestones)


def after_warmup(o: Optimizer, make: Make, updates: int, start: float | None = None) -> torchs.LRScheduler:
    """A line to the full rate; without a `start` it begins at 1 / updates and is there one update earlier."""
    first, length = (1 / updates, updates - 1) if start is None else (start, updates)
    rise: Make = lambda o: torchs.LinearLR(o, first, total_iters=length)  # noqa: E731
    return sequence(o, rise, make, milestones=[updates])


# Each pair holds for all of the 1,000 updates: torch's cosine rises again after its end, and its one-cycle raises.
PAIRS: dict[str, tuple[Schedule, Make]] = {
    "constant": (schedules.constant(RATE), lambda o: torchs.ConstantLR(o, 1.0)),
    "linear down": (
        schedules.linear(RATE, 0.03, 700),
        lambda o: torchs.LinearLR(o, 1.0, 0.1, total_iters=700),
    ),
    "linear up": (schedules.linear(0.003, RATE, 700), lambda o: torchs.LinearLR(o, 0.01, total_iters=700)),
    "cosine": (schedules.cosine(RATE, 0.001, 1_000), lambda o: torchs.CosineAnnealingLR(o, 1_000, 0.001)),
    "polynomial": (schedules.polynomial(RATE, 0.0, 800, 2.0), lambda o: torchs.PolynomialLR(o, 800, 2.0)),
    "polynomial root": (schedules.polynomial(RATE, 0.0, 800, 0.5), lambda o: torchs.PolynomialLR(o, 800, 0.5)),
    "exponential": (schedules.exponential(RATE, 0.997), lambda o: torchs.ExponentialLR(o, 0.997)),
    "exponential every 100": (
        schedules.exponential(RATE, 0.5, every=100, floor=0.01),
        lambda o: torchs.LambdaLR(o, lambda n: max(0.01 / RATE, 2 ** (-n / 100))),
    ),
    "staircase every": (schedules.staircase(RATE, 0.5, every=130), lambda o: torchs.StepLR(o, 130, 0.5)),
    "staircase milestones": (
        schedules.staircase(RATE, 0.1, milestones=[1, 300, 750]),
        lambda o: torchs.MultiStepLR(o, [1, 300, 750], 0.1),
    ),
    "warmup": (
        schedules.warmup(schedules.cosine(RATE, 0.0, 900), 100),
        lambda o: after_warmup(o, lambda o: torchs.CosineAnnealingLR(o, 900), 100),
    ),
    "warmup from a start": (
        schedules.warmup(schedules.exponential(RATE, 0.998), 100, start=0.03),
        lambda o: after_warmup(o, lambda o: torchs.ExponentialLR(o, 0.998), 100, 0.1),
    ),
    "warmup_cosine": (
        schedules.warmup_cosine(RATE, 50, 1_000, 0.01),
        lambda o: after_warmup(o, lambda o: torchs.CosineAnnealingLR(o, 950, 0.01), 50),
    ),
    "warmup_stable_decay": (
        schedules.warmup_stable_decay(RATE, 1_000, warmup=50, decay=200, floor=0.03),
        lambda o: sequence(
            o,
            lambda o: torchs.LinearLR(o, 1 / 50, total_iters=49),
            lambda o: torchs.ConstantLR(o, 1.0),
            lambda o: torchs.LinearLR(o, 1.0, 0.1, total_iters=200),
            milestones=[50, 800],
        ),
    ),
    "warm_restarts": (
        schedules.warm_restarts(RATE, 0.01, 70),
        lambda o: torchs.CosineAnnealingWarmRestarts(o, 70, 1, 0.01),
    ),
    "warm_restarts of 1 doubled": (
        schedules.warm_restarts(RATE, 0.0, 1, 2),
        lambda o: torchs.CosineAnnealingWarmRestarts(o, 1, 2),
    ),
    "warm_restarts tripled": (
        schedules.warm_restarts(RATE, 0.0, 10, 3),
        lambda o: torchs.CosineAnnealingWarmRestarts(o, 10, 3),
    ),
    "one_cycle": (schedules.one_cycle(RATE, 1_000), lambda o: torchs.OneCycleLR(o, RATE, 1_000)),
    "one_cycle linear": (
        schedules.one_cycle(RATE, 1_000, rise=0.4567, start=0.1, end=0.01, shape="linear"),
        lambda o: torchs.OneCycleLR(
            o, RATE, 1_000, pct_start=0.4567, anneal_strategy="linear", div_factor=3.0, final_div_factor=10.0
        ),
    ),
    "join": (
        schedules.join(RATE, schedules.exponential(RATE, 0.99), schedules.linear(RATE, 0, 500), boundaries=[200, 500]),
        lambda o: sequence(
            o,
            lambda o: torchs.ConstantLR(o, 1.0),
            lambda o: torchs.ExponentialLR(o, 0.99),
            lambda o: torchs.LinearLR(o, 1.0, 0.0, total_iters=500),
            milestones=[200, 500],
        ),
    ),
    "scale": (schedules.scale(schedules.exponential(RATE, 0.999), schedules.linear(0.1, 1.0, 400)), chained),
    "tabulate": (
        schedules.tabulate(lambda o: torchs.CyclicLR(o, 0.01, RATE, 80, mode="triangular2"), 1_000, rate=RATE),
        lambda o: torchs.CyclicLR(o, 0.01, RATE, 80, mode="triangular2"),
    ),
}


def rates(make: Make, updates: int = UPDATES) -> Iterator[float]:
    """What torch's scheduler puts into the optimizer for each update."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE, momentum=0.9)
    scheduler = make(optimizer)
    for count in range(updates):
        yield float(optimizer.param_groups[0]["lr"])
        if count < updates - 1:
            optimizer.step()
            scheduler.step()


@pytest.mark.parametrize("name", PAIRS)
def test_at_every_count_it_is_what_torchs_counterpart_gives(name: str) -> None:
    schedule, make = PAIRS[name]
    worst = max(abs(schedule(count) - rate) for count, rate in enumerate(rates(make)))
    assert worst <= 1e-12


def test_every_schedule_has_a_counterpart_here() -> None:
    written = {name for name in schedules.__all__ if name.islower()} - {"points"}
    assert {name.split()[0] for name in PAIRS} == written


def test_warm_restarts_begin_again_at_the_very_count_however_far_out() -> None:
    for factor in (2, 3, 10):
        schedule = schedules.warm_restarts(1.0, 0.0, 7, factor)
        begins, length = 0, 7
        while begins < 10**15:
            assert schedule(begins) == 1.0
            assert begins == 0 or schedule(begins - 1) < 0.1
            begins, length = begins + length, length * factor

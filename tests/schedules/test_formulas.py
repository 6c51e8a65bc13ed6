"""Every schedule against its formula as the books have it, written here a second time, over 1,000 updates."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from pipeline import schedules
from pipeline.schedules import Schedule

UPDATES = 1_000


def clipped(n: float, updates: float) -> float:
    return min(n / updates, 1.0)


def falling(n: float, updates: float) -> float:
    return (1 + math.cos(math.pi * clipped(n, updates))) / 2


def restarted(n: int, first: int, factor: int) -> float:
    """By the list of all restarts."""
    begins = [0]
    while begins[-1] <= n:
        begins.append(begins[-1] + first * factor ** (len(begins) - 1))
    return falling(n - begins[-2], begins[-1] - begins[-2])


def cycle(n: int) -> float:
    """1,000 updates, the peak of 0.5 at n = 299, from 0.02 to 2e-6 at n = 999."""
    if n <= 299:
        return 0.5 + (0.02 - 0.5) * falling(n, 299)
    return 2e-6 + (0.5 - 2e-6) * falling(n - 299, 700)


def three_parts(n: int, left: Callable[[float], float]) -> float:
    """Up to 0.5 over 100 updates, level to 600, down to 0.05 at 900."""
    if n < 100:
        return 0.5 * (n + 1) / 100
    return 0.05 + 0.45 * left(min(max(n - 600, 0) / 300, 1.0))


FORMULAS: dict[str, tuple[Schedule, Callable[[int], float]]] = {
    "constant": (schedules.constant(0.5), lambda n: 0.5),
    "linear": (schedules.linear(0.5, 0.1, 700), lambda n: 0.5 - 0.4 * clipped(n, 700)),
    "cosine": (schedules.cosine(0.5, 0.1, 700), lambda n: 0.1 + 0.4 * falling(n, 700)),
    "cosine up": (schedules.cosine(0.1, 0.5, 700), lambda n: 0.5 - 0.4 * falling(n, 700)),
    "polynomial": (schedules.polynomial(0.5, 0.1, 700, 3), lambda n: 0.1 + 0.4 * (1 - clipped(n, 700)) ** 3),
    "exponential": (
        schedules.exponential(0.5, 0.7, every=90, floor=0.01),
        lambda n: max(0.5 * math.exp(n / 90 * math.log(0.7)), 0.01),
    ),
    "staircase every": (schedules.staircase(0.5, 0.7, every=90), lambda n: 0.5 * 0.7 ** math.floor(n / 90)),
    "staircase milestones": (
        schedules.staircase(0.5, 0.7, milestones=(90, 91, 500)),
        lambda n: 0.5 * 0.7 ** ((n >= 90) + (n >= 91) + (n >= 500)),
    ),
    "warmup": (
        schedules.warmup(schedules.linear(0.5, 0.0, 800), 100),
        lambda n: 0.5 * (n + 1) / 100 if n < 100 else 0.5 * (1 - clipped(n - 100, 800)),
    ),
    "warmup from a start": (
        schedules.warmup(0.5, 100, start=0.1),
        lambda n: 0.1 + 0.4 * clipped(n, 100),
    ),
    "warmup_cosine": (
        schedules.warmup_cosine(0.5, 100, 900, 0.05),
        lambda n: 0.5 * (n + 1) / 100 if n < 100 else 0.05 + 0.45 * falling(n - 100, 800),
    ),
    "warmup_stable_decay linear": (
        schedules.warmup_stable_decay(0.5, 900, warmup=100, decay=300, floor=0.05),
        lambda n: three_parts(n, lambda d: 1 - d),
    ),
    "warmup_stable_decay cosine": (
        schedules.warmup_stable_decay(0.5, 900, warmup=100, decay=300, floor=0.05, shape="cosine"),
        lambda n: three_parts(n, lambda d: falling(d, 1)),
    ),
    "warmup_stable_decay root": (
        schedules.warmup_stable_decay(0.5, 900, warmup=100, decay=300, floor=0.05, shape="root"),
        lambda n: three_parts(n, lambda d: 1 - d**0.5),
    ),
    "warm_restarts": (schedules.warm_restarts(0.5, 0.1, 7, 2), lambda n: 0.1 + 0.4 * restarted(n, 7, 2)),
    "one_cycle": (schedules.one_cycle(0.5, 1_000), cycle),
    "join": (
        schedules.join(0.5, schedules.linear(0.4, 0.0, 400), 0.3, boundaries=[100, 600]),
        lambda n: 0.5 if n < 100 else 0.4 * (1 - clipped(n - 100, 400)) if n < 600 else 0.3,
    ),
    "scale": (schedules.scale(schedules.linear(0.5, 0.0, 700), 0.1), lambda n: 0.05 * (1 - clipped(n, 700))),
    "scale by another": (
        schedules.scale(lambda n: 1 / (1 + n), schedules.linear(0.0, 1.0, 10)),
        lambda n: clipped(n, 10) / (1 + n),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_at_every_count_it_is_what_its_formula_gives(name: str) -> None:
    schedule, formula = FORMULAS[name]
    assert max(abs(schedule(n) - formula(n)) for n in range(UPDATES)) <= 1e-12


def test_every_schedule_has_a_formula_here() -> None:
    written = {name for name in schedules.__all__ if name.islower()} - {"points", "tabulate"}
    assert {name.split()[0] for name in FORMULAS} == written


@pytest.mark.parametrize("name", FORMULAS)
def test_the_rate_depends_on_the_count_alone(name: str) -> None:
    schedule = FORMULAS[name][0]
    forwards = [schedule(n) for n in range(UPDATES)]
    assert [schedule(n) for n in reversed(range(UPDATES))] == forwards[::-1]
    assert [schedule(n) for n in range(UPDATES)] == forwards


@pytest.mark.parametrize(
    ("schedule", "end"),
    [
        (schedules.linear(0.1, 0.3, 7), 0.3),
        (schedules.cosine(0.1, 0.3, 7), 0.3),
        (schedules.polynomial(0.1, 0.3, 7), 0.3),
        (schedules.warmup_cosine(0.1, 2, 7, 0.03), 0.03),
        (schedules.warmup_stable_decay(0.1, 7, warmup=2, decay=3, floor=0.03), 0.03),
        (schedules.one_cycle(0.1, 8, end=0.03), 0.03),
    ],
    ids=repr,
)
def test_it_ends_exactly_where_it_says_and_stays_there(schedule: Schedule, end: float) -> None:
    assert [schedule(n) for n in (7, 8, 100, 10**12)] == [end] * 4
    assert schedule(6) != end


def test_a_warmup_reaches_the_very_rate_and_wastes_no_update_on_0() -> None:
    for updates in range(1, 300):
        rise = [schedules.warmup(0.1, updates)(n) for n in range(updates)]
        assert rise[0] > 0
        assert rise[-1] == 0.1
        assert rise == sorted(rise)
    assert schedules.warmup(schedules.cosine(1.0, 0.0, 10), 0)(0) == 1.0
    assert schedules.warmup(1.0, 4, start=0.0)(0) == 0.0


def test_a_warmup_in_front_of_a_cosine_is_warmup_cosine() -> None:
    one, other = schedules.warmup_cosine(0.3, 7, 60, 0.01), schedules.warmup(schedules.cosine(0.3, 0.01, 53), 7)
    assert max(abs(one(n) - other(n)) for n in range(100)) <= 1e-16
    assert schedules.warmup_cosine(1.0, 4, 100)(0) == 0.25
    assert schedules.warmup_cosine(1.0, 0, 100)(0) == 1.0


@pytest.mark.parametrize("rise", [0.0, 0.001, 0.5, 0.999])
@pytest.mark.parametrize("total", [2, 3, 10])
def test_a_cycle_of_any_length_has_its_peak_and_its_end(rise: float, total: int) -> None:
    rates = [schedules.one_cycle(1.0, total, rise=rise)(n) for n in range(total)]
    assert 0 <= min(rates) == rates[-1]
    assert max(rates) <= 1.0
    assert rates[0] == (1.0 if rise * total <= 1 else 1 / 25)


def test_points_are_what_a_plot_wants() -> None:
    schedule = schedules.linear(1.0, 0.0, 4)
    assert schedules.points(schedule, 6) == [(0, 1.0), (1, 0.75), (2, 0.5), (3, 0.25), (4, 0.0), (5, 0.0)]
    assert schedules.points(schedule, 6, every=3) == [(0, 1.0), (3, 0.25)]

"""Schedules are values: they print as written, compare and travel, and refuse what makes no sense."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch.optim import lr_scheduler as torchs

from pipeline import schedules
from pipeline.errors import SettingError

ALL: list[Any] = [
    schedules.constant(0.1),
    schedules.linear(0.1, 0.0, 100),
    schedules.cosine(0.1, 0.01, 100),
    schedules.polynomial(0.1, 0.0, 100, power=0.9),
    schedules.exponential(0.1, 0.9, every=10, floor=1e-5),
    schedules.staircase(0.1, 0.5, every=30),
    schedules.staircase(0.1, 0.5, milestones=[30, 60]),
    schedules.warmup(schedules.cosine(0.1, 0.0, 90), 10),
    schedules.warmup(0.1, 10, start=0.01),
    schedules.warmup_cosine(0.1, 10, 100),
    schedules.warmup_stable_decay(0.1, 100, warmup=10, decay=20, shape="root"),
    schedules.warm_restarts(0.1, 0.0, 10, 2),
    schedules.one_cycle(0.1, 100),
    schedules.join(0.1, schedules.linear(0.1, 0.0, 50), boundaries=[50]),
    schedules.scale(schedules.one_cycle(0.1, 100), 0.5),
]
TABLE = schedules.tabulate(lambda o: torchs.StepLR(o, 2, 0.5), 6, rate=1.0)


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_what_it_prints_makes_it_again(schedule: Any) -> None:
    assert eval(repr(schedule), vars(schedules)) == schedule


@pytest.mark.parametrize("schedule", [*ALL, TABLE], ids=repr)
def test_it_is_a_value(schedule: Any) -> None:
    for other in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))):
        assert other == schedule
        assert hash(other) == hash(schedule)
        assert [other(n) for n in range(100)] == [schedule(n) for n in range(100)]
    with pytest.raises(AttributeError):
        schedule.start = 1.0


def test_prints_are_short() -> None:
    assert repr(schedules.warmup_cosine(1e-3, 10, 20)) == "WarmupCosine(peak=0.001, warmup=10, total=20, floor=0.0)"
    assert repr(TABLE) == "Table(6 rates, 1 … 0.25)"


def test_counts_may_be_written_as_floats_if_they_are_whole() -> None:
    assert schedules.linear(1, 0, 1e5) == schedules.linear(1.0, 0.0, 100_000)  # pyright: ignore[reportArgumentType]


NAN = float("nan")
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "negative rate": (lambda: schedules.constant(-1.0), "Constant.rate must be a number, 0 or more and finite, got -1"),
    "NaN": (lambda: schedules.linear(0.1, NAN, 10), "Linear.end must be a number"),
    "infinite rate": (lambda: schedules.cosine(float("inf"), 0, 10), "Cosine.start must be a number"),
    "no number": (lambda: schedules.constant("0.1"), "Constant.rate must be a number"),
    "no updates": (lambda: schedules.linear(1, 0, 0), "Linear.updates must be a whole number, 1 or more, got 0"),
    "half an update": (lambda: schedules.cosine(1, 0, 10.5), "Cosine.updates must be a whole number"),
    "fractional warmup": (lambda: schedules.warmup_cosine(1, 3.3, 10), "WarmupCosine.warmup must be a whole number"),
    "power": (lambda: schedules.polynomial(1, 0, 10, 0), "Polynomial.power must be a number, positive"),
    "growth": (lambda: schedules.exponential(1, 1.1), "Exponential.factor must be .* Any function of the update count"),
    "two kinds of stairs": (lambda: schedules.staircase(1, 0.1, every=2, milestones=[3]), "Staircase must be given"),
    "no stairs": (lambda: schedules.staircase(1, 0.1), "Staircase must be given either every or milestones"),
    "milestones": (
        lambda: schedules.staircase(1, 0.1, milestones=[5, 5]),
        "Staircase.milestones must be update counts",
    ),
    "milestone 0": (lambda: schedules.staircase(1, 0.1, milestones=[0, 5]), "Staircase.milestones must be"),
    "negative warmup": (lambda: schedules.warmup(1, -1), "Warmup.updates must be a whole number of updates, 0 or more"),
    "no schedule": (lambda: schedules.warmup(schedules.Cosine, 10), "Warmup.schedule must be a schedule"),
    "negative number as schedule": (lambda: schedules.warmup(-1.0, 10), "Constant.rate must be"),
    "warmup longer": (
        lambda: schedules.warmup_cosine(1, 20, 20),
        r"WarmupCosine.total must be more than warmup \(20\)",
    ),
    "too short": (
        lambda: schedules.warmup_stable_decay(1, 20, warmup=10, decay=11),
        r"WarmupStableDecay.total must be at least warmup \+ decay \(21\), got 20",
    ),
    "shape": (lambda: schedules.warmup_stable_decay(1, 9, warmup=1, decay=1, shape="x"), "shape must be 'linear', 'co"),
    "cycle's shape": (lambda: schedules.one_cycle(1, 20, shape="root"), "OneCycle.shape must be 'cosine' or 'linear'"),
    "rise": (lambda: schedules.one_cycle(1, 20, rise=1), "OneCycle.rise must be a share of the run, below 1"),
    "cycle of one": (lambda: schedules.one_cycle(1, 1), "OneCycle.total must be at least 2 updates"),
    "restarts": (lambda: schedules.warm_restarts(1, 0, 10, 1.5), "WarmRestarts.factor must be a whole number"),
    "boundaries": (
        lambda: schedules.join(1, 2, boundaries=[]),
        r"Join.boundaries must be one fewer than the schedules \(2\), got \(\). Name",
    ),
    "order": (lambda: schedules.join(1, 2, 3, boundaries=[9, 3]), "Join.boundaries must be update counts"),
    "no rates": (lambda: schedules.Table([]), "Table.rates must be at least one rate"),
    "bad rate": (lambda: schedules.Table([0.1, -0.1]), "Table.rates must be a number"),
    "nothing to tabulate": (lambda: schedules.tabulate(lambda o: torchs.StepLR(o, 1), 0, rate=1), "at least 1, got 0"),
    "plateau": (
        lambda: schedules.tabulate(torchs.ReduceLROnPlateau, 10, rate=1),
        r"depends on the count alone.*monitors\.Plateau",
    ),
    "no scheduler": (lambda: schedules.tabulate(lambda o: None, 10, rate=1), "returns a torch scheduler, got None"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused_when_built(name: str) -> None:
    build, message = REFUSED[name]
    with pytest.raises(SettingError, match=message):
        build()


def test_a_table_stays_at_its_last_rate_and_does_not_follow_the_scheduler() -> None:
    made: list[torchs.LRScheduler] = []

    def make(optimizer: Any) -> torchs.LRScheduler:
        made.append(torchs.StepLR(optimizer, 2, 0.5))
        return made[0]

    table = schedules.tabulate(make, 5, rate=0.8)
    made[0].base_lrs[0] = 100.0
    assert [table(n) for n in (0, 1, 2, 3, 4, 5, 100)] == [0.8, 0.8, 0.4, 0.4, 0.2, 0.2, 0.2]


def test_schedules_leave_torch_out_until_a_table_is_asked_for() -> None:
    code = (
        "import sys; from pipeline import schedules; schedules.warmup_cosine(1, 2, 3)(0);"
        "without = 'torch' not in sys.modules; schedules.tabulate;"
        "sys.exit(not (without and 'torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'cosinus'"):
        schedules.cosinus  # noqa: B018

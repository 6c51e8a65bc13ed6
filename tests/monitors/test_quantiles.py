"""`Quantiles`: the error that it states, whatever it is given and however it is split."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import monitors, replay
from pipeline.errors import SettingError
from tests.monitors.cases import reduced, update

AT = (0.0, 0.01, 0.25, 0.5, 0.75, 0.999, 1.0)
NAMES = ("p0", "p1", "p25", "p50", "p75", "p99.9", "p100")


def log(values: list[float]) -> list[Any]:
    return [update(loss=value) for value in values]


def found(sketch: monitors.Quantiles, values: list[float]) -> Any:
    return replay(log(values), [sketch])[sketch.name]


sizes = st.floats(1e-12, 1e12)
values = sizes | sizes.map(lambda x: -x) | st.just(0.0) | st.integers(-5, 5).map(float)


@given(st.lists(values, min_size=1, max_size=60), st.sampled_from([0.001, 0.01, 0.3]))
def test_no_quantile_is_farther_off_than_the_error(values: list[float], error: float) -> None:
    exact = [sorted(values)[math.floor(q * (len(values) - 1))] for q in AT]
    near = found(monitors.Quantiles(at=AT, error=error), values)
    assert tuple(near) == NAMES
    for value, estimate in zip(exact, near.values(), strict=True):
        assert abs(estimate - value) <= error * abs(value) * (1 + 1e-9)


@given(st.lists(values, min_size=1, max_size=40), st.randoms())
def test_neither_order_nor_split_changes_anything(values: list[float], rng: random.Random) -> None:
    sketch = monitors.Quantiles()
    shuffled = rng.sample(values, len(values))
    cut = rng.randrange(len(values) + 1)
    merged = sketch.merge(reduced(sketch, log(values[:cut])), reduced(sketch, log(values[cut:])))
    assert reduced(sketch, log(shuffled)) == reduced(sketch, log(values)) == merged


def test_memory_is_bounded_whatever_comes() -> None:
    sketch = monitors.Quantiles(error=0.2)
    rng = random.Random(0)
    spread = [rng.choice([-1, 1]) * 10 ** rng.uniform(-300, 300) for _ in range(3000)]
    accumulator = reduced(sketch, log(spread))
    assert sum(count for _, count in accumulator) == 3000
    assert len(accumulator) <= 56 / 0.2


def test_very_small_is_0_very_large_is_infinite_and_nan_and_weight_0_pass_by() -> None:
    sketch = monitors.Quantiles(at=(0.0, 0.5, 1.0))
    assert found(sketch, [-1e13, 1e-13, 1e300]) == {"p0": -math.inf, "p50": 0.0, "p100": math.inf}
    assert found(sketch, [-math.inf, -1e-13, math.inf]) == {"p0": -math.inf, "p50": 0.0, "p100": math.inf}
    assert found(sketch, [math.nan]) is None
    assert replay([update(weight=0)], [sketch]) == {"Quantiles loss": None}


def test_the_ends_of_the_range_are_in_it() -> None:
    assert found(monitors.Quantiles(at=(0.0, 1.0)), [1e-12, 1e12]) == pytest.approx(
        {"p0": 1e-12, "p100": 1e12}, rel=0.01
    )


def test_norms_measures_and_facts_too() -> None:
    event = update(grad_norm=2.0, measures={"hit": (6.0, 3)}, facts={"temperature": 2.0})
    for measure in ("grad_norm", "hit", "temperature"):
        near = replay([event], [monitors.Quantiles(measure, at=[0.5])])[f"Quantiles {measure}"]
        assert near == {"p50": pytest.approx(2.0, rel=0.01)}


@pytest.mark.parametrize(
    "bad",
    [{"at": ()}, {"at": (1.5,)}, {"at": (math.nan,)}, {"at": 1.5}, {"error": 0}, {"error": 1e-17}, {"error": 1.0}],
)
def test_settings_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=r"Quantiles\..* must be"):
        monitors.Quantiles(**bad)


def test_one_quantile_may_be_given_by_itself_and_close_ones_keep_their_names() -> None:
    assert replay([update(loss=2.0)], [monitors.Quantiles(at=0.5)])["Quantiles loss"] == {"p50": pytest.approx(2, 0.01)}  # type: ignore[arg-type]
    assert set(replay([update()], [monitors.Quantiles(at=(0.9999999, 1.0))])["Quantiles loss"]) == {"p99.99999", "p100"}

"""The laws of monitors, over one list that every public monitor and combinator is on."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import events as all_events
from pipeline import monitors, observe, replay
from pipeline.errors import SettingError
from pipeline.events import Event
from pipeline.monitor import Monitor
from pipeline.monitors._written import Written
from tests.monitors import cases
from tests.monitors.cases import ALL, CASES, KINDS, Custom, logs, reduced

each_monitor = pytest.mark.parametrize("monitor", ALL, ids=lambda m: m.name)
MERGED = [monitor for monitor in ALL if hasattr(monitor, "merge")]


def same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)  # NaN equal to NaN, and 1 not equal to 1.0


def carried(value: Any) -> Any:
    """An accumulator as a checkpoint carries it: through JSON, whose lists are tuples again."""
    return _tuples(json.loads(json.dumps(value)))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def near(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(near, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or a == pytest.approx(b)
    return a == b


def test_every_public_monitor_and_combinator_is_on_the_list() -> None:
    assert set(CASES) == set(monitors.__all__)
    assert all(isinstance(monitor, Monitor) for monitor in ALL)
    for name, made in CASES.items():
        assert all(repr(monitor).startswith(f"{name}(") for monitor in made)


def test_every_event_is_in_the_logs() -> None:
    assert {kind.__name__ for kind in KINDS} == {*all_events.__all__, Custom.__name__} - {"Event"}


@each_monitor
def test_with_no_events_the_result_is_none(monitor: Any) -> None:
    assert monitor.result(monitor.init()) is None
    assert replay([], [monitor]) == {monitor.name: None}


@each_monitor
@given(events=logs(), data=st.data())
def test_cut_anywhere_carried_and_gone_on_gives_the_same(
    monitor: Any, events: list[Event], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(events)))
    whole, middle = reduced(monitor, events), reduced(monitor, events[:cut])
    assert same(carried(middle), middle)
    for event in events[cut:]:
        middle = monitor.reduce(carried(middle), event)
    assert same(middle, whole)
    assert same(monitor.result(middle), monitor.result(whole))


@each_monitor
@given(events=logs())
def test_the_result_and_the_signals_asked_twice_are_the_same_and_change_nothing(
    monitor: Any, events: list[Event]
) -> None:
    accumulator = reduced(monitor, events)
    kept = repr(accumulator)
    assert same(monitor.result(accumulator), monitor.result(accumulator))
    if hasattr(monitor, "signals"):
        assert list(monitor.signals(accumulator)) == list(monitor.signals(accumulator))
    assert repr(accumulator) == kept


@given(events=logs(), data=st.data())
def test_the_order_of_monitors_changes_nothing(events: list[Event], data: st.DataObject) -> None:
    other = data.draw(st.permutations(ALL))
    assert same(sorted(replay(events, ALL).items()), sorted(replay(events, other).items()))


@given(events=logs())
def test_combined_they_give_what_each_gives_apart(events: list[Event]) -> None:
    apart = replay(events, ALL)
    combined = replay(events, [monitors.combine(*ALL)])["combine"]
    assert same(combined, None if all(result is None for result in apart.values()) else apart)


@pytest.mark.parametrize("monitor", MERGED, ids=lambda m: m.name)
@given(a=logs(), b=logs(), c=logs())
def test_merge_is_associative_has_a_unit_and_equals_one_log(
    monitor: Any, a: list[Event], b: list[Event], c: list[Event]
) -> None:
    x, y, z = (reduced(monitor, log) for log in (a, b, c))
    merge, unit = monitor.merge, monitor.init()
    assert near(merge(merge(x, y), z), merge(x, merge(y, z)))
    assert near(merge(unit, x), x)
    assert near(merge(x, unit), x)
    assert near(merge(x, y), reduced(monitor, [*a, *b]))
    assert same(carried(merge(x, y)), merge(x, y))


@each_monitor
def test_monitors_print_as_they_were_written(monitor: Any) -> None:
    written = repr(monitor)
    if "lambda" not in written and "Total object" not in written:
        known = {name: getattr(monitors, name) for name in monitors.__all__}
        assert repr(eval(written, {**known, **vars(cases)})) == written
    assert "name='MeanLoss'" not in written


def test_no_monitor_needs_torch_to_be_built_folded_or_asked() -> None:
    # In a fresh interpreter: this one has torch already.
    code = """
import sys
from pipeline import replay
from tests.monitors.cases import ALL, evaluation, skip, start, update

log = [start(), update(1), skip(1), evaluation(1.0), update(2), evaluation(2.0, 2)]
assert len(replay(log, ALL)) == len(ALL)
sys.exit("torch" in sys.modules)
"""
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=root).returncode == 0


PLAIN = [monitor for monitor in ALL if attrs.has(type(monitor)) and isinstance(monitor, Written)]


@pytest.mark.parametrize("bad", [object(), math.nan, ()], ids=["an object", "NaN", "nothing"])
@pytest.mark.parametrize("monitor", PLAIN, ids=lambda m: m.name)
def test_a_setting_that_means_nothing_is_refused_when_it_is_built(monitor: Any, bad: Any) -> None:
    for field in attrs.fields(type(monitor)):
        if field.init and field.name not in ("name", "minutes", "updates"):
            with pytest.raises(SettingError, match="must be"):
                attrs.evolve(monitor, **{field.name: bad})
    with pytest.raises(SettingError, match="must be text"):
        observe([attrs.evolve(monitor, name=bad)])

"""Monitors made of monitors: what each combinator does, and what it keeps of the one inside."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import monitors, replay
from pipeline.errors import DuplicateNameError, SettingError
from pipeline.events import EpochEnded, Event, UpdateDone
from pipeline.monitor import Evaluate, Monitor, Rewind, Save, ScaleRate, Stop
from tests.monitors.cases import evaluation, logs, reduced, skip, start, update

MEAN = monitors.MeanLoss()


def losses(*values: float) -> list[Event]:
    return [update(n, loss=value) for n, value in enumerate(values, start=1)]


def epoch_end(n: int = 1) -> EpochEnded:
    return EpochEnded(micro_step=n, update=n, epoch=1, time=float(n), batches=n)


def result_of(monitor: Any, events: list[Event]) -> Any:
    return replay(events, [monitor])[monitor.name]


class TestMap:
    def test_it_is_a_function_of_the_result(self) -> None:
        perplexity = monitors.map(MEAN, math.exp, name="perplexity")
        assert replay(losses(1.0, 3.0), [perplexity]) == {"perplexity": math.exp(2.0)}

    def test_of_no_result_there_is_no_function(self) -> None:
        assert result_of(monitors.map(MEAN, math.exp), []) is None


class TestFilter:
    def test_only_events_that_pass_are_seen(self) -> None:
        events = [
            update(loss=1.0, part="generator"),
            update(loss=5.0, part="critic"),
            update(loss=3.0, part="generator"),
        ]
        assert result_of(monitors.filter(MEAN, lambda e: e.part == "generator"), events) == 2.0

    def test_events_that_the_monitor_passes_over_are_not_asked_about(self) -> None:
        events = [start(), evaluation(1.0), update(part="generator")]  # the first two are of no part
        assert result_of(monitors.filter(MEAN, lambda e: e.part == "generator"), events) == 1.0


class TestPremap:
    def test_the_monitor_sees_other_events(self) -> None:
        halved = monitors.premap(
            MEAN, lambda e: attrs.evolve(e, loss=float(e.loss) / 2) if isinstance(e, UpdateDone) else e
        )
        assert result_of(halved, [start(), *losses(2.0, 6.0)]) == 2.0

    def test_what_is_watched_may_be_a_name_of_its_own_making(self) -> None:
        renamed = monitors.premap(monitors.Best("score"), lambda e: e)
        assert not hasattr(renamed, "watches")
        assert hasattr(renamed, "merge")


class TestEvery:
    def test_every_nth_update_of_the_training_and_all_other_events(self) -> None:
        skips = monitors.every(monitors.Skips(), 3)
        assert result_of(monitors.every(MEAN, 3), losses(1, 2, 3, 4, 5, 6, 7)) == 4.5
        assert result_of(skips, [update(1), skip(1), update(2), update(3)])["share"] == 0.5

    def test_it_counts_from_the_start_of_training(self) -> None:
        assert result_of(monitors.every(MEAN, 3), losses(1, 2, 3, 4, 5, 6)[4:]) == 6.0


class TestCombine:
    def test_by_their_names_or_by_those_given(self) -> None:
        both = monitors.combine(MEAN, norm=monitors.GradNorm(), name="both")
        expected = {"MeanLoss": 1.0, "norm": {"last": 1.0, "mean": 1.0, "max": 1.0}}
        assert replay([update()], [both]) == {"both": expected}
        assert repr(both) == "combine(MeanLoss(), norm=GradNorm(), name='both')"

    def test_none_where_all_are_and_none_of_one_where_the_others_tell(self) -> None:
        both = monitors.combine(MEAN, monitors.TimeLeft())
        assert result_of(both, [start()]) is None
        assert result_of(both, losses(1.0)) == {"MeanLoss": 1.0, "TimeLeft": None}
        assert result_of(monitors.combine(), losses(1.0)) is None

    def test_two_of_one_name_are_refused(self) -> None:
        with pytest.raises(DuplicateNameError, match="Two monitors are called 'MeanLoss'"):
            monitors.combine(MEAN, MEAN)
        with pytest.raises(DuplicateNameError, match="name="):
            monitors.combine(MEAN, MeanLoss=monitors.GradNorm())

    def test_a_ratio_of_two_is_a_map_over_both(self) -> None:
        both = monitors.combine(loss=MEAN, norm=monitors.GradNorm())
        ratio = monitors.map(both, lambda r: r["loss"] / r["norm"]["mean"], name="ratio")
        assert result_of(ratio, [update(loss=6.0, grad_norm=2.0)]) == 3.0

    def test_it_watches_what_each_watches(self) -> None:
        stopping, plateau = monitors.EarlyStopping("val_loss"), monitors.Plateau("val_loss")
        assert monitors.combine(MEAN, stopping, plateau).watches == ("val_loss", "val_loss")
        assert monitors.combine(stopping, monitors.Best("val_accuracy")).watches == ("val_loss", "val_accuracy")
        assert monitors.combine(MEAN, monitors.Best("loss", of="updates")).watches == ()


class TestWindow:
    @given(st.lists(st.floats(-5, 5), max_size=12), st.integers(1, 5))
    def test_it_is_the_monitor_over_the_last_events_alone(self, values: list[float], n: int) -> None:
        log = losses(*values)
        assert result_of(monitors.window(MEAN, n), log) == result_of(MEAN, log[-n:])

    def test_events_that_the_monitor_passes_over_do_not_count(self) -> None:
        log = [*losses(1.0, 3.0), evaluation(9.0), update(loss=math.nan, weight=0), start(), skip()]
        assert result_of(monitors.window(MEAN, 2), log) == 2.0

    def test_a_speed_over_the_last_updates(self) -> None:
        log = [update(n, samples=n, time=time) for n, time in enumerate([0.0, 1.0, 2.0, 12.0, 22.0])]
        assert result_of(monitors.window(monitors.Throughput(), 3), log)["samples"] == 0.1

    def test_a_monitor_without_merge_is_refused(self) -> None:
        with pytest.raises(SettingError, match=r"window\(monitor\) must be a monitor with `merge`, got EarlyStopping"):
            monitors.window(monitors.EarlyStopping("val_loss"), 3)

    def test_signals_are_those_over_the_last_events(self) -> None:
        high = monitors.monitor(
            "high", int, lambda n, e: n + (e.loss > 2), lambda n: n, merge=lambda a, b: a + b, signals=stop_at(2)
        )
        recent = monitors.window(high, 3)
        accumulator = reduced(recent, losses(3, 3, 1, 1, 3))
        assert list(recent.signals(accumulator)) == [Stop("2 high")]  # 1 changes nothing, and so is not counted
        assert list(recent.signals(reduced(recent, losses(3, 1)))) == []


def stop_at(most: int) -> Any:
    return lambda n: [Stop(f"{most} high")] if n >= most else []


class TestPerEpoch:
    LOG = (*losses(1.0, 3.0), epoch_end(2), update(3, loss=5.0), epoch_end(3), update(4, loss=9.0))

    def test_one_result_for_each_epoch_that_ended(self) -> None:
        assert result_of(monitors.per_epoch(MEAN), list(self.LOG)) == (2.0, 5.0)
        assert result_of(monitors.per_epoch(MEAN, 1), list(self.LOG)) == (5.0,)
        assert result_of(monitors.per_epoch(MEAN), list(self.LOG[:2])) is None

    def test_an_epoch_in_which_nothing_counted_has_none(self) -> None:
        assert result_of(monitors.per_epoch(MEAN), [epoch_end(), *losses(1.0), epoch_end()]) == (None, 1.0)

    def test_it_asks_for_nothing(self) -> None:
        assert not hasattr(monitors.per_epoch(monitors.Plateau("val_loss")), "signals")


class TestMonitor:
    def test_plain_functions_are_a_monitor(self) -> None:
        longest = monitors.monitor("longest", float, lambda most, e: max(most, e.time), lambda most: most or None)
        assert isinstance(longest, Monitor)
        assert replay([update(3), update(1)], [longest]) == {"longest": 3.0}
        assert repr(monitors.monitor("n", int, max, abs, merge=min)) == "monitor('n', int, max, abs, merge=min)"

    def test_it_has_merge_and_signals_where_they_are_given(self) -> None:
        bare = monitors.monitor("n", int, max, abs)
        assert not hasattr(bare, "merge")
        assert not hasattr(bare, "signals")
        full = monitors.monitor("n", int, max, abs, merge=min, signals=list)
        assert (full.merge, full.signals) == (min, list)

    @pytest.mark.parametrize("bad", [{"init": 0}, {"reduce": None}, {"result": "x"}, {"merge": 1}, {"signals": ()}])
    def test_what_cannot_be_called_is_refused(self, bad: dict[str, Any]) -> None:
        with pytest.raises(SettingError, match=rf"monitor\({next(iter(bad))}\) must be a function"):
            monitors.monitor("n", **{"init": int, "reduce": max, "result": abs, **bad})


MAKE: dict[str, Any] = {
    "map": lambda m, **k: monitors.map(m, repr, **k),
    "filter": lambda m, **k: monitors.filter(m, bool, **k),
    "premap": lambda m, **k: monitors.premap(m, repr, **k),
    "every": lambda m, **k: monitors.every(m, 2, **k),
    "window": lambda m, **k: monitors.window(m, 2, **k),
    "per_epoch": monitors.per_epoch,
}
each_wrapper = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


@each_wrapper
def test_it_is_called_as_the_monitor_inside_unless_it_is_given_a_name(make: Any) -> None:
    assert make(MEAN).name == "MeanLoss"
    assert make(MEAN, name="other").name == "other"
    assert repr(make(MEAN, name="other")).endswith(", name='other')")
    assert "name=" not in repr(make(MEAN))


@each_wrapper
def test_it_is_a_value(make: Any) -> None:
    assert make(MEAN) == make(monitors.MeanLoss())
    assert make(MEAN) != make(monitors.GradNorm())
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        make(MEAN).name = "other"


@each_wrapper
@pytest.mark.parametrize("bad", [monitors.MeanLoss, "MeanLoss", None])
def test_what_is_no_monitor_is_refused(make: Any, bad: Any) -> None:
    with pytest.raises(SettingError, match=r"\(monitor\) must be a monitor, such as `monitors.MeanLoss\(\)`"):
        make(bad)
    with pytest.raises(SettingError, match=r"combine\(monitor\) must be a monitor"):
        monitors.combine(loss=bad)


@each_wrapper
def test_an_attribute_that_it_does_not_have_is_an_attribute_error(make: Any) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        _ = make(MEAN).absent


@pytest.mark.parametrize("word", ["map", "filter", "premap", "every", "per_epoch"])
def test_it_can_merge_where_the_monitor_inside_can(word: str) -> None:
    assert hasattr(MAKE[word](MEAN), "merge")
    assert not hasattr(MAKE[word](monitors.TimeLeft()), "merge")


@pytest.mark.parametrize("word", ["map", "filter", "every"])
@given(events=logs())
def test_it_asks_what_the_monitor_inside_asks(word: str, events: list[Event]) -> None:
    inside = monitors.EarlyStopping("val_loss", patience=1)
    outside = {"every": monitors.every(inside, 1), "filter": monitors.filter(inside, lambda event: True)}.get(
        word, MAKE["map"](inside)
    )
    asked = list(inside.signals(reduced(inside, events)))
    assert list(outside.signals(reduced(outside, events))) == asked
    assert not hasattr(MAKE[word](MEAN), "signals")


def asking(name: str, *signals: Any) -> Monitor:
    return monitors.monitor(name, int, lambda n, e: n, lambda n: n, signals=lambda n: signals)


def test_combined_monitors_ask_all_that_each_asks_and_their_factors_together() -> None:
    both = monitors.combine(
        asking("a", Stop("a"), ScaleRate(0.5), Save("a")),
        MEAN,
        asking("b", ScaleRate(0.1), Evaluate("val"), Rewind("b")),
    )
    expected = {Stop("a"), Save("a"), Evaluate("val"), Rewind("b"), ScaleRate(0.05)}
    asked = list(both.signals(both.init()))
    assert set(asked) == expected
    assert len(asked) == len(expected)
    assert not hasattr(monitors.combine(MEAN), "signals")


SAVING = monitors.SaveEvery(updates=2)


@pytest.mark.parametrize("word", ["map", "filter", "premap", "every"])
def test_around_one_that_asks_for_checkpoints_it_does_so_at_the_same_updates(word: str) -> None:
    inside = {"filter": monitors.filter(SAVING, lambda event: True), "premap": monitors.premap(SAVING, lambda e: e)}
    for outside in (inside.get(word, MAKE[word](SAVING)), monitors.combine(MEAN, SAVING)):
        assert outside.needs_store
        assert [outside.urgent(update(n)) for n in (1, 2)] == [False, True]
    assert not hasattr(MAKE[word](MEAN), "needs_store")
    assert not hasattr(MAKE[word](MEAN), "urgent")
    assert not monitors.combine(MEAN).needs_store
    assert not hasattr(monitors.combine(MEAN), "urgent")


def test_what_premap_makes_of_an_event_says_whether_it_is_urgent() -> None:
    later = monitors.premap(SAVING, lambda event: attrs.evolve(event, update=event.update + 1))
    assert [later.urgent(update(n)) for n in (1, 2)] == [True, False]


def test_an_epoch_asks_for_no_checkpoints() -> None:
    assert not hasattr(monitors.per_epoch(SAVING), "needs_store")


@pytest.mark.parametrize(("combinator", "bad"), [("every", 0), ("window", 1.5), ("per_epoch", 0)])
def test_counts_are_checked(combinator: str, bad: Any) -> None:
    with pytest.raises(SettingError, match=rf"{combinator}\(\w+\) must be a whole number, 1 or more"):
        getattr(monitors, combinator)(MEAN, bad)


@pytest.mark.parametrize(("combinator", "setting"), [("map", "fn"), ("filter", "predicate"), ("premap", "fn")])
def test_what_is_no_function_is_refused(combinator: str, setting: str) -> None:
    with pytest.raises(SettingError, match=rf"{combinator}\({setting}\) must be a function, got 3"):
        getattr(monitors, combinator)(MEAN, 3)


def test_a_filter_asks_only_about_what_a_monitor_reads_unless_that_keeps_the_time() -> None:
    asked: list[str] = []

    def of_updates(event: Event) -> bool:
        asked.append(type(event).__name__)
        return True

    for monitor in (monitors.EarlyStopping("val_loss"), monitors.SaveEvery(updates=2)):
        replay([start(), update(1), evaluation(1.0)], [monitors.filter(monitor, of_updates)])
    assert {*asked} == {"EvalDone", "UpdateDone"}
    replay([start()], [monitors.filter(monitors.SaveEvery(minutes=2), of_updates)])
    assert "RunStarted" in asked

"""What the monitors give, against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import monitors, replay
from pipeline.errors import SettingError
from pipeline.events import Event, LossScaleChanged, MemoryMeasured, RunEnded
from tests.monitors.cases import evaluation, skip, start, update


def result_of(monitor: Any, *events: Event) -> Any:
    return replay(events, [monitor])[monitor.name]


class TestMeans:
    def test_means_are_weighted_and_a_weight_of_zero_changes_nothing(self) -> None:
        events = [update(loss=loss, weight=w) for loss, w in ((0.7, 256), (0.8, 256), (0.9, 10))]
        expected = (0.7 * 256 + 0.8 * 256 + 0.9 * 10) / 522
        for log in (events, [*events, update(loss=math.nan, weight=0)]):
            assert result_of(monitors.MeanLoss(), *log) == pytest.approx(expected, abs=1e-12)
        assert expected == pytest.approx(0.75287, abs=1e-5)
        assert result_of(monitors.MeanLoss(), update(loss=math.nan, weight=0)) is None

    def test_a_measure_is_the_mean_over_what_it_counted(self) -> None:
        events = [update(measures={"hit": (1.0, 1)}), update(measures={"hit": (0.0, 9)})]
        assert replay(events, [monitors.Mean("hit")]) == {"Mean hit": 0.1}

    def test_a_measure_that_counted_nothing_changes_nothing_even_as_nan(self) -> None:
        nothing = update(measures={"hit": (math.nan, 0)})
        assert result_of(monitors.Mean("hit"), nothing) is None
        assert result_of(monitors.Mean("hit"), update(measures={"hit": (3.0, 4)}), nothing) == 0.75

    @given(st.lists(st.floats(-10, 10), min_size=1, max_size=20), st.floats(0.01, 1))
    def test_an_exponential_mean_weighs_each_update_by_its_age(self, losses: list[float], decay: float) -> None:
        weights = [decay**age for age in range(len(losses))][::-1]
        expected = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
        mean = monitors.ExponentialMean(decay=decay)
        assert result_of(mean, *(update(loss=x) for x in losses)) == pytest.approx(expected, abs=1e-9)

    def test_an_exponential_mean_of_equal_values_is_that_value_from_the_first_on(self) -> None:
        mean = monitors.ExponentialMean("grad_norm", decay=0.9)
        for n in (1, 2, 50):
            assert result_of(mean, *[update(grad_norm=3.0)] * n) == pytest.approx(3.0)

    @pytest.mark.parametrize("bad", [{"loss": math.nan}, {"loss": math.inf}, {"loss": 9.0, "weight": 0}])
    def test_an_exponential_mean_passes_over_what_would_be_in_it_for_good(self, bad: dict[str, Any]) -> None:
        assert result_of(monitors.ExponentialMean(), update(loss=2.0), update(**bad), update(loss=2.0)) == 2.0

    @pytest.mark.parametrize("measure", ["loss", "grad_norm", "accuracy", "temperature"])
    def test_a_reading_is_the_loss_the_norm_a_measure_or_a_fact(self, measure: str) -> None:
        told = update(loss=4.0, grad_norm=4.0, measures={"accuracy": (8.0, 2.0)}, facts={"temperature": 4.0})
        assert result_of(monitors.ExponentialMean(measure), told, update(weight=0) if measure == "loss" else told) == 4

    @pytest.mark.parametrize("decay", [0, -0.1, 1.1, math.nan, True])
    @pytest.mark.parametrize("monitor", [monitors.ExponentialMean, monitors.GradNoiseScale])
    def test_a_decay_is_above_0_and_at_most_1(self, monitor: Any, decay: float) -> None:
        with pytest.raises(SettingError, match=rf"{monitor.__name__}.decay must be above 0 and at most 1, got {decay}"):
            monitor(decay=decay)


class TestRatesAndNorms:
    def test_rates_and_norms(self) -> None:
        events = [update(1, rates={"default": 0.1, "b": 0.3}), update(2, grad_norm=3.0, rates={"default": 0.2})]
        watch = [monitors.LearningRate(), monitors.LearningRate("b", "b"), monitors.LearningRates()]
        assert replay(events, [*watch, monitors.GradNorm()]) == {
            "LearningRate": 0.2,
            "b": 0.3,
            "LearningRates": {"default": 0.2, "b": 0.3},
            "GradNorm": {"last": 3.0, "mean": 2.0, "max": 3.0},
        }

    def test_rates_of_parts_stay_apart(self) -> None:
        events = [update(part="generator", rates={"default": 0.1}), update(part="critic", rates={"default": 0.2})]
        assert result_of(monitors.LearningRates(), *events) == {"generator/default": 0.1, "critic/default": 0.2}

    def test_global_norms_are_those_of_all_layers_together(self) -> None:
        facts = {"param_norm/a": 3.0, "param_norm/b": 4.0, "update_norm/a": 0.6, "update_norm/b": 0.8}
        events = [update(1, facts=facts), update(2), update(3, facts={"param_norm/a": 1.0})]
        assert result_of(monitors.ParamNorm(), *events) == {"last": 1.0, "mean": 3.0, "max": 5.0}
        assert result_of(monitors.UpdateNorm(), *events) == pytest.approx({"last": 1.0, "mean": 1.0, "max": 1.0})

    def test_nan_is_never_the_largest_norm_and_shows_in_the_mean(self) -> None:
        for norms in ([math.nan, 2.0], [2.0, math.nan]):
            spread = result_of(monitors.GradNorm(), *(update(grad_norm=norm) for norm in norms))
            assert spread["max"] == 2.0
            assert math.isnan(spread["mean"])


class TestWindows:
    def test_the_share_of_updates_that_were_clipped(self) -> None:
        assert result_of(monitors.ClipShare(), *(update(clip_factor=f) for f in (1.0, 0.5, 0.99, 1.0, 1.0))) == 0.4

    def test_skips_tell_how_many_which_share_and_the_last_in_full(self) -> None:
        events = [update(1), skip(1, reason="a"), update(2), skip(2, reason="b", micro_batch=3, parameter="0.weight")]
        last = {"reason": "b", "update": 2, "micro_batch": 3, "parameter": "0.weight"}
        assert result_of(monitors.Skips(), *events) == {"count": 2, "share": 0.5, "last": last}
        assert result_of(monitors.Skips(), update()) == {"count": 0, "share": 0.0, "last": None}

    def test_the_loss_scale_now_on_average_and_as_it_changed(self) -> None:
        def changed(n: int, before: float, after: float) -> Event:
            return LossScaleChanged(micro_step=n, update=n, epoch=0, time=float(n), before=before, after=after)

        events: list[Event] = [update(1, loss_scale=4.0), skip(1, loss_scale=4.0), changed(1, 4.0, 2.0)]
        events += [update(2, loss_scale=2.0), changed(2, 2.0, 4.0), update(3, loss_scale=4.0), changed(3, 4.0, 8.0)]
        expected = {"current": 8.0, "mean": 10 / 3, "changes": 3, "history": ((2, 4.0), (3, 8.0))}
        assert result_of(monitors.LossScaleHistory(keep=2), *events) == expected
        assert result_of(monitors.LossScaleHistory(keep=0), *events)["history"] == ()
        assert result_of(monitors.LossScaleHistory(), *events)["history"] == ((1, 2.0), (2, 4.0), (3, 8.0))

    def test_without_a_loss_scale_there_is_none_to_tell_of(self) -> None:
        assert result_of(monitors.LossScaleHistory(), update(), skip()) is None
        only_skipped = result_of(monitors.LossScaleHistory(), skip(loss_scale=4.0))
        assert only_skipped == {"current": 4.0, "mean": None, "changes": 0, "history": ()}


class TestMemory:
    def measured(self, **sizes: int) -> MemoryMeasured:
        return MemoryMeasured(micro_step=1, update=1, epoch=0, time=0.0, **sizes)

    def test_peaks_are_kept_and_what_was_not_told_is_left_out(self) -> None:
        events = [
            self.measured(allocated_peak=5, resident=8),
            self.measured(allocated_peak=9),
            self.measured(allocated_peak=2, resident=6),
        ]
        expected = {"allocated_peak": {"last": 2, "max": 9}, "resident": {"last": 6, "max": 8}}
        assert result_of(monitors.Memory(), *events) == expected

    def test_where_nobody_tells_there_is_no_result(self) -> None:
        assert result_of(monitors.Memory(), self.measured()) is None


class TestTime:
    def test_speed_is_that_from_the_first_update_to_the_last(self) -> None:
        events = [update(1, time=1.0, samples=10, tokens=5), update(2, time=3.0, samples=30, tokens=15, waited=0.5)]
        expected = {"samples": 10.0, "tokens": 5.0, "updates": 0.5, "waiting": 0.25}
        assert result_of(monitors.Throughput(), *events) == expected

    def test_what_the_first_update_waited_lies_before_the_time_that_counts(self) -> None:
        events = [update(1, time=9.0, waited=9.0), update(2, time=10.0), update(3, time=11.0, waited=1.0)]
        assert result_of(monitors.Throughput(), *events)["waiting"] == 0.5

    def test_the_time_between_two_runs_does_not_count_and_what_was_before_it_does(self) -> None:
        first = [start(0.0), update(1, time=1.0, samples=1), update(2, time=2.0, samples=2)]
        resumed = [start(99.0, n=2), update(3, time=100.0, samples=3), update(4, time=103.0, samples=7)]
        expected = {"samples": 5 / 4, "tokens": 0.0, "updates": 2 / 4, "waiting": 0.0}
        assert result_of(monitors.Throughput(), *first, *resumed) == expected

    @pytest.mark.parametrize(
        "events", [[update(1)], [update(1), start(n=1), update(2)], [update(1), update(2, time=1.0)]]
    )
    def test_without_time_there_is_no_speed(self, events: list[Event]) -> None:
        assert result_of(monitors.Throughput(), *events) is None

    def test_the_time_left_is_the_updates_left_at_the_pace_so_far(self) -> None:
        events = [start(0.0, 10), update(1, time=5.0), update(2, time=7.0), update(4, time=11.0)]
        assert result_of(monitors.TimeLeft(), *events) == 6 * 2.0
        assert result_of(monitors.TimeLeft(), *events, update(10, time=12.0)) == 0.0
        assert result_of(monitors.TimeLeft(), *events, update(11, time=12.0)) == 0.0

    def test_a_resumed_run_has_a_clock_of_its_own(self) -> None:
        before = [start(0.0, 10), update(1, time=5.0), update(2, time=7.0)]
        assert result_of(monitors.TimeLeft(), *before, start(100.0, 20, n=2)) is None
        after = [start(100.0, 20, n=2), update(3, time=101.0), update(4, time=104.0)]
        assert result_of(monitors.TimeLeft(), *before, *after) == 16 * 3.0

    def test_the_time_left_is_not_known_where_the_end_is_not(self) -> None:
        assert result_of(monitors.TimeLeft(), start(), update(1), update(2)) is None

    def test_at_the_end_nothing_is_left_though_windows_were_skipped(self) -> None:
        end = RunEnded(micro_step=2, update=2, epoch=1, time=9.0, reasons=("Epochs(1)",))
        assert result_of(monitors.TimeLeft(), start(0.0, 4), update(1), update(2), end) == 0.0
        assert result_of(monitors.TimeLeft(), start(0.0, 4), end) is None
        assert result_of(monitors.TimeLeft(), start(0.0, 10), update(1)) is None
        assert result_of(monitors.TimeLeft(), update(1), update(2)) is None


class TestBest:
    @pytest.mark.parametrize(
        ("mode", "values", "best"),
        [
            ("min", [math.nan, 0.5, 0.4, math.nan], 0.4),
            ("max", [math.nan, 0.1, 0.2, math.nan], 0.2),
            ("min", [math.inf, 0.5], 0.5),
            ("min", [0.5, -math.inf], -math.inf),
        ],
    )
    def test_nan_is_never_best(self, mode: Any, values: list[float], best: float) -> None:
        events = [evaluation(value, n) for n, value in enumerate(values, start=1)]
        found = result_of(monitors.Best("val_loss", mode=mode), *events)
        assert found == {"best": best, "update": values.index(best) + 1, "epoch": 0}

    def test_of_equal_values_the_first_stays(self) -> None:
        events = [evaluation(1.0, 3, epoch=1), evaluation(1.0, 5, epoch=2)]
        assert result_of(monitors.Best("val_loss"), *events) == {"best": 1.0, "update": 3, "epoch": 1}

    def test_of_updates_too(self) -> None:
        hits = [update(n, measures={"hit": (n % 3, 2)}) for n in range(1, 5)]
        best = monitors.Best("hit", mode="max", of="updates")
        assert result_of(best, *hits, evaluation(9.0, measure="hit")) == {"best": 1.0, "update": 2, "epoch": 0}
        assert best.watches == ()
        assert monitors.Best("val_loss").watches == ("val_loss",)

    def test_only_nan_is_no_best(self) -> None:
        assert result_of(monitors.Best("val_loss"), evaluation(math.nan)) is None

    @pytest.mark.parametrize("bad", [{"mode": "best"}, {"of": "batches"}])
    def test_settings_are_checked(self, bad: dict[str, Any]) -> None:
        with pytest.raises(SettingError, match=r"Best\..* must be"):
            monitors.Best("val_loss", **bad)


@pytest.mark.parametrize("keep", [1, 4, 100])
def test_the_history_of_the_loss_scale_keeps_the_newest_changes_and_drops_none_before_it_must(keep: int) -> None:
    history = monitors.LossScaleHistory(keep=keep)
    accumulator = history.init()
    for n in range(7):
        accumulator = history.reduce(
            accumulator, LossScaleChanged(micro_step=n, update=n, epoch=0, time=0.0, before=1.0, after=float(n + 1))
        )
        assert len(accumulator[4]) == min(n + 1, keep)

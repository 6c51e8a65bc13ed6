"""Monitors and sinks in a loop written by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from pipeline import monitors, observe, replay
from pipeline.errors import DuplicateNameError, MeasureError, SettingError
from pipeline.events import BatchSkipped, CheckpointSaved, EvalDone, Event, RunEnded, UpdateDone
from pipeline.monitor import Save, Stop


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = 0

    def write(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1


def test_a_loop_by_hand_has_the_same_monitors_and_sinks() -> None:
    recorder = Recorder()
    now = iter(range(100))
    watch = [monitors.MeanLoss(), monitors.EarlyStopping("val_loss", patience=1), monitors.LearningRate()]
    with observe(watch, [recorder], clock=lambda: float(next(now))) as run:
        for epoch in range(10):
            for i in range(3):
                run.update(1.0 + i, weight=i, rates={"default": 0.1}, grad_norm=2.0, samples=4, tokens=7)
            run.evaluation("val", {"loss": 1.0 + epoch})
            run.epoch_ended(batches=3)
            if run.stops:
                break
    assert run.results["MeanLoss"] == pytest.approx((2 * 1 + 3 * 2) / 3)
    assert run.results == replay(recorder.events, watch)
    assert len(run.stops) == 1
    assert "val_loss no better" in run.stops[0]
    last = recorder.events[-1]
    assert isinstance(last, RunEnded)
    assert last.reasons == run.stops
    assert (last.update, last.epoch, recorder.closed) == (6, 2, 1)
    updates = [e for e in recorder.events if isinstance(e, UpdateDone)]
    assert [(e.update, e.samples, e.tokens) for e in updates] == [(n, 4 * n, 7 * n) for n in range(1, 7)]
    assert [e.values for e in recorder.events if isinstance(e, EvalDone)] == [{"val_loss": 1.0}, {"val_loss": 2.0}]
    times = [e.time for e in recorder.events]
    assert times == sorted(times)


def test_what_monitors_ask_of_the_rates_is_there_to_be_used() -> None:
    plateau = monitors.Plateau("val_loss", factor=0.5, patience=0)
    with observe([plateau]) as run:
        assert run.rate_factor == 1.0
        for _ in range(3):
            run.evaluation("val", {"loss": 1.0})
        assert run.rate_factor == 0.25


def test_any_event_can_be_sent_and_a_loss_that_has_a_float_will_do() -> None:
    class Scalar:
        def __float__(self) -> float:
            return 3.0

    recorder = Recorder()
    with observe([monitors.MeanLoss()], [recorder]) as run:
        run.send(BatchSkipped(micro_step=0, update=0, epoch=0, time=0.0))
        run.update(Scalar())
    assert run.results["MeanLoss"] == 3.0
    assert [type(e).__name__ for e in recorder.events] == ["RunStarted", "BatchSkipped", "UpdateDone", "RunEnded"]
    update = recorder.events[2]
    assert isinstance(update, UpdateDone)
    assert type(update.loss) is float
    assert math.isnan(float(update.grad_norm))


def test_an_error_in_the_loop_is_told_of_and_the_sinks_are_closed() -> None:
    class Broken(Recorder):
        def write(self, event: Event) -> None:
            if isinstance(event, RunEnded):
                raise OSError("disk full")

    recorder = Recorder()

    def loop() -> None:
        with observe([], [Broken(), recorder]) as run:
            run.update(1.0)
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom") as caught:
        loop()
    assert isinstance(recorder.events[-1], RunEnded)
    assert recorder.events[-1].reasons == ("ValueError: boom",)
    assert recorder.closed == 1
    assert any("disk full" in note for note in caught.value.__notes__)


def test_two_monitors_of_one_name_are_refused() -> None:
    with pytest.raises(DuplicateNameError, match="MeanLoss"):
        observe([monitors.MeanLoss(), monitors.MeanLoss()])


def test_it_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from pipeline import monitors, observe, sinks\n"
        "with observe([monitors.MeanLoss()]) as run: run.update(1.0)\n"
        "assert run.results == {'MeanLoss': 1.0}\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_that_is_asked_for_is_there_for_the_loop_to_do() -> None:
    saving = monitors.SaveEvery(updates=2)
    with observe([saving, monitors.EarlyStopping("val_loss", patience=1)]) as run:
        run.update(1.0)
        assert run.asked == ()
        run.update(1.0)
        assert run.asked == (Save("every 2 updates"),)
        run.send(CheckpointSaved(micro_step=2, update=2, epoch=0, time=0.0, path="a", reasons=("every 2 updates",)))
        assert run.asked == ()
        for _ in range(2):
            run.evaluation("val", {"loss": 1.0})
        assert [type(signal) for signal in run.asked] == [Stop]


def test_a_misspelt_measure_is_told_of_at_the_end_and_costs_nothing() -> None:
    recorder = Recorder()
    run = observe([monitors.MeanLoss(), monitors.EarlyStopping("val_los")], [recorder])
    run.__enter__()
    run.update(1.0)
    run.evaluation("val", {"loss": 1.0})
    with pytest.raises(MeasureError, match=r"'val_los', which nothing reports\. What is reported: val_loss"):
        run.__exit__(None, None, None)
    assert run.results["MeanLoss"] == 1.0
    assert isinstance(recorder.events[-1], RunEnded)
    assert recorder.closed == 1
    with observe([monitors.EarlyStopping("val_los")]) as short:  # which ends before anything was evaluated
        short.update(1.0)


@pytest.mark.parametrize("bad", [monitors.MeanLoss, "MeanLoss", None])
def test_what_is_no_monitor_and_what_is_no_sink_is_refused(bad: Any) -> None:
    with pytest.raises(SettingError, match=r"Each of `monitors` must be a monitor, such as `monitors.MeanLoss\(\)`"):
        observe([bad])
    with pytest.raises(SettingError, match=r"Each of `sinks` must be a sink, such as `sinks.Console\(\)`"):
        observe([], [bad])


@pytest.mark.parametrize("asked", [Stop("now"), ["stop"], None], ids=["not in a list", "no signal", "nothing"])
def test_what_a_monitor_asks_for_must_be_signals(asked: Any) -> None:
    talking = monitors.monitor("talking", int, lambda n, _: n, lambda n: n, signals=lambda _: asked)
    if isinstance(asked, Stop):
        with observe([talking]) as run:
            assert run.stops == ("now",)
        return
    with pytest.raises(SettingError, match=r"What talking.signals gives must be signals in a list"):
        observe([talking]).__enter__()


class Failing(Recorder):
    def write(self, event: Event) -> None:
        raise OSError("no space")


def test_a_sink_that_fails_on_the_first_event_leaves_none_open() -> None:
    sinks = [Recorder(), Failing()]
    with pytest.raises(OSError, match="no space"):
        observe([], sinks).__enter__()
    assert [sink.closed for sink in sinks] == [1, 1]

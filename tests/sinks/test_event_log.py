"""EventLog: every event as one line of JSON that gives the same values back."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    EmitEvents,
    Epochs,
    Evaluation,
    Forward,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    chain,
    events,
    fold,
    init,
    monitors,
    replay,
    sinks,
    supervised,
)
from pipeline.events import Event, RunEnded, RunStarted, UpdateDone

AT: Mapping[str, Any] = {"micro_step": 4, "update": 1, "epoch": 0, "time": 12.5}


@attrs.frozen(kw_only=True)
class Measured(Event):
    """An event of a user's own."""

    value: Any


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def written(folder: Path, *given: Event) -> list[dict[str, Any]]:
    """What stands in the folder's log after these events and the sink's end."""
    log = sinks.EventLog(folder)
    for event in given:
        log.write(event)
    log.close()
    return lines(folder)


def update(**changes: Any) -> UpdateDone:
    fields = {"loss": 0.1, "weight": 8.0, "micro_batches": 4, "rates": {"default": 1e-3}, "grad_norm": 2.5}
    return UpdateDone(**{**AT, **fields, **changes})


def from_line(line: dict[str, Any]) -> Event:
    return getattr(events, line["event"])(**{name: value for name, value in line.items() if name != "event"})


def train(folder: Path, **settings: Any) -> Any:
    """A small run into `folder`, with an evaluation each epoch."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = [(torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(5)]
    forward = Forward(
        model, supervised(F.cross_entropy, measures={"accuracy": lambda o, t: (o.argmax(1) == t).float().mean()})
    )
    optimizer = Optimizer(torch.optim.SGD, lr=0.1)
    step = chain(forward, ScaledBackward(), Accumulate(every=2), MaybeStep(optimizer), EmitEvents(micro_batches=True))
    return fold(
        step,
        init(step, model),
        settings.pop("stream", data),
        until=Epochs(3),
        evaluations=[Evaluation(forward, data[:2])],
        sinks=[sinks.EventLog(folder), *settings.pop("sinks", ())],
        **settings,
    )


class TestLines:
    def test_a_line_names_the_class_and_holds_every_field(self, tmp_path: Path) -> None:
        event = update(measures={"accuracy": (3.0, 4)}, facts={"spread": 0.5})
        (line,) = written(tmp_path, event)
        assert line.pop("event") == "UpdateDone"
        assert line == {**attrs.asdict(event), "measures": {"accuracy": [3.0, 4]}}

    @given(value=st.floats())
    def test_every_float_comes_back_to_the_bit(self, value: float, tmp_path_factory: pytest.TempPathFactory) -> None:
        (line,) = written(tmp_path_factory.mktemp("run"), update(loss=value))
        assert repr(line["loss"]) == repr(value)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_survives_in_fields_and_in_mappings(self, value: float, tmp_path: Path) -> None:
        (line,) = written(tmp_path, update(grad_norm=value, facts={"x": value}))
        assert repr(line["grad_norm"]) == repr(line["facts"]["x"]) == repr(value)

    @given(text=st.text())
    def test_any_text_stays_on_one_line(self, text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = tmp_path_factory.mktemp("run")
        (line,) = written(folder, RunEnded(**AT, reasons=(text, "Updates(3)")))
        assert line["reasons"] == [text, "Updates(3)"]
        assert (folder / "events.jsonl").read_bytes().count(b"\n") == 1

    @pytest.mark.parametrize(
        ("value", "read"),
        [
            (torch.tensor(0.5), 0.5),
            (torch.tensor(0.5, requires_grad=True), 0.5),
            (torch.tensor([1, 2]), [1, 2]),
            (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
            (np.float32(0.5), 0.5),
            (np.int64(3), 3),
            (MappingProxyType({"a": torch.tensor(1.5)}), {"a": 1.5}),
            (RunStarted(**AT, until="Updates(3)"), {**AT, "until": "Updates(3)", "total_updates": None}),
            (None, None),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_values_that_json_does_not_know_are_written_as_those_that_it_does(
        self, value: Any, read: Any, tmp_path: Path
    ) -> None:
        (line,) = written(tmp_path, Measured(**AT, value=value))
        assert line == {"event": "Measured", **AT, "value": read}

    def test_what_has_no_such_form_is_refused_and_leaves_no_half_a_line(self, tmp_path: Path) -> None:
        log = sinks.EventLog(tmp_path)
        log.write(update())
        with pytest.raises(TypeError, match=r"EventLog cannot write <object object.*give events numbers, strings"):
            log.write(Measured(**AT, value=object()))
        log.write(update())
        log.close()
        assert [line["event"] for line in lines(tmp_path)] == ["UpdateDone", "UpdateDone"]


class TestFile:
    def test_the_first_event_makes_the_folder(self, tmp_path: Path) -> None:
        log = sinks.EventLog(tmp_path / "runs" / "a")
        assert log.path == tmp_path / "runs" / "a" / "events.jsonl"
        assert not (tmp_path / "runs").exists()
        log.write(update())
        log.close()
        assert len(lines(tmp_path / "runs" / "a")) == 1

    def test_each_line_is_there_as_it_comes(self, tmp_path: Path) -> None:
        log = sinks.EventLog(tmp_path)
        for count in (1, 2, 3):
            log.write(update())
            assert len(lines(tmp_path)) == count
        log.close()

    def test_a_log_that_is_there_is_continued(self, tmp_path: Path) -> None:
        written(tmp_path, update(loss=1.0))
        assert [line["loss"] for line in written(tmp_path, update(loss=2.0))] == [1.0, 2.0]

    def test_one_log_serves_several_runs_one_after_the_other(self, tmp_path: Path) -> None:
        log = sinks.EventLog(tmp_path)
        for loss in (1.0, 2.0):
            log.write(update(loss=loss))
            log.close()
        log.close()
        assert [line["loss"] for line in lines(tmp_path)] == [1.0, 2.0]

    def test_it_prints_as_it_was_written(self) -> None:
        assert repr(sinks.EventLog("runs/a")) == "EventLog('runs/a')"


class TestRun:
    def test_the_log_holds_what_any_other_sink_was_given(self, tmp_path: Path) -> None:
        given: list[Event] = []

        class Recorder:
            def write(self, event: Event) -> None:
                given.append(event)

            def close(self) -> None:
                pass

        train(tmp_path, sinks=[Recorder()])
        expected = [{"event": type(event).__name__, **attrs.asdict(event)} for event in given]
        assert lines(tmp_path) == json.loads(json.dumps(expected))

    def test_monitors_over_the_log_give_the_live_results(self, tmp_path: Path) -> None:
        watching = [
            monitors.MeanLoss(),
            monitors.Mean("accuracy"),
            monitors.LearningRate(),
            monitors.GradNorm(),
            monitors.Throughput(),
            monitors.EarlyStopping("val_loss"),
        ]
        run = train(tmp_path, monitors=watching)
        assert None not in run.results.values()
        assert replay(map(from_line, lines(tmp_path)), watching) == run.results

    def test_a_run_that_failed_says_so_in_its_last_line(self, tmp_path: Path) -> None:
        def stream() -> Any:
            yield torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
            raise OSError("the disk is gone")

        with pytest.raises(OSError, match="the disk is gone"):
            train(tmp_path, stream=stream())
        last = lines(tmp_path)[-1]
        assert (last["event"], last["reasons"]) == ("RunEnded", ["OSError: the disk is gone"])

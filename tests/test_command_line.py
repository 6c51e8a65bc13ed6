"""`python -m pipeline replay`: results that a person can read, and errors that say what to write instead."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from pipeline import sinks
from pipeline.__main__ import main
from pipeline.events import EpochEnded, EvalDone, Event, RunEnded, RunStarted, UpdateDone
from tests import test_command_line as this  # as `module:Name` finds it


@attrs.frozen(kw_only=True)
class Spike(Event):
    """An event of a user's own."""

    height: float


@attrs.frozen
class Highest:
    """A monitor of a user's own."""

    least: float = 0.0
    name: str = "Highest"

    def init(self) -> float | None:
        return None

    def reduce(self, accumulator: float | None, event: Event) -> float | None:
        return max(accumulator or self.least, event.height) if isinstance(event, this.Spike) else accumulator

    def result(self, accumulator: float | None) -> float | None:
        return accumulator


MADE = Highest(name="made before")


def called() -> Highest:
    raise AssertionError("this function was called")


def run_of(folder: Path, *, spikes: bool = False, end: bool = True) -> None:
    """Two epochs of three updates."""
    log = sinks.EventLog(folder)
    log.write(RunStarted(micro_step=0, update=0, epoch=0, time=0.0, until="Epochs(2)"))
    for n in range(1, 7):
        at: dict[str, Any] = {"micro_step": n, "update": n, "epoch": (n - 1) // 3, "time": float(n)}
        log.write(
            UpdateDone(
                **at, loss=1 / n, weight=1.0, micro_batches=1, rates={"default": 0.1, "head": 0.2}, grad_norm=float(n),
                measures={"accuracy": (n / 10, 1.0)}, samples=4 * n,
            )
        )  # fmt: skip
        if spikes:
            log.write(this.Spike(**at, height=float(n)))
        if n % 3 == 0:
            at["epoch"] += 1
            log.write(EvalDone(**at, name="val", values={"val_loss": 1.0 - n / 8}, weight=1.0, batches=1))
            log.write(EpochEnded(**at, batches=3))
    if end:
        log.write(RunEnded(micro_step=6, update=6, epoch=2, time=7.0, reasons=("Epochs(2)",)))
    log.close()


Ask = Callable[..., list[str]]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """What the command says about the log in the folder `a`."""
    monkeypatch.chdir(tmp_path)

    def asked(*monitors: str, more: tuple[str, ...] = (), log: str = "a") -> list[str]:
        given = [part for monitor in monitors for part in ("--monitor", monitor)]
        main(["replay", log, *given, *more])
        return capsys.readouterr().out.splitlines()

    return asked


def refused(ask: Ask, capsys: pytest.CaptureFixture[str], *monitors: str, **more: Any) -> tuple[Any, str]:
    with pytest.raises(SystemExit) as caught:
        ask(*monitors, **more)
    return caught.value.code, capsys.readouterr().err.splitlines()[-1]


class TestResults:
    def test_each_monitor_has_its_line(self, ask: Ask, tmp_path: Path) -> None:
        run_of(tmp_path / "a")
        written = ("MeanLoss", "EarlyStopping('val_loss', patience=3)", "Mean('accuracy')", "Mean('nothing')")
        assert ask(*written) == [
            "a: 12 events, 6 updates, 2 epochs; ended by Epochs(2)",
            "",
            "MeanLoss       0.408333",
            "EarlyStopping  best 0.25  update 6  waited 0",
            "Mean accuracy  0.35",
            "Mean nothing   -",
        ]

    def test_what_does_not_fit_on_a_line_gets_several(self, ask: Ask, tmp_path: Path) -> None:
        run_of(tmp_path / "a")
        assert ask("per_epoch(GradNorm())", "combine(a=MeanLoss, b=GradNorm(name='norm'), name='both')")[2:] == [
            "GradNorm  last 3  mean 2  max 3",
            "          last 6  mean 5  max 6",
            "both      a  0.408333",
            "          b  last 6  mean 3.5  max 6",
        ]

    def test_without_a_name_it_asks_all_that_need_no_argument_and_have_something_to_tell(
        self, ask: Ask, tmp_path: Path
    ) -> None:
        run_of(tmp_path / "a")
        named = {line.split()[0] for line in ask()[2:]}
        assert {"GradNorm", "LearningRate", "MeanLoss", "Throughput"} <= named
        assert not named & {"EarlyStopping", "Mean", "LossScaleHistory"}

    def test_it_says_of_a_log_without_an_end_that_it_has_none(self, ask: Ask, tmp_path: Path) -> None:
        run_of(tmp_path / "a", end=False)
        assert ask("MeanLoss")[0] == "a: 11 events, 6 updates, 2 epochs; no end: it runs still, or was killed"
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "events.jsonl").touch()
        assert ask("MeanLoss", log="b") == ["b: no events", "", "MeanLoss  -"]

    def test_events_and_monitors_of_ones_own_are_named_with_their_module(
        self, ask: Ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run_of(tmp_path / "a", spikes=True)
        own = "tests.test_command_line"
        asked = (
            f"{own}:Highest",
            f"{own}:Highest(7.5, name='least')",
            f"{own}:MADE",
            f"{own}:every(MADE, 2, name='2nd')",
        )
        assert ask(*asked, more=("--event", f"{own}:Spike"))[2:] == [
            "Highest      6", "least        7.5", "made before  6", "2nd          6",
        ]  # fmt: skip
        assert ask("MeanLoss", more=("--skip-unknown",))[2:] == ["MeanLoss  0.408333"]
        code, says = refused(ask, capsys, "MeanLoss")
        assert code == 1
        assert says.startswith("error: a/events.jsonl, line 3: 'Spike' is no event of the library's own.")
        assert "--event module:Spike" in says


class TestRefused:
    @pytest.mark.parametrize(
        ("written", "says"),
        [
            ("MeanLos", "MeanLos: no monitor is called MeanLos, did you mean MeanLoss?"),
            ("Mean(accuracy)", "no monitor is called accuracy, there are Best, .* A text stands in quotes"),
            ("Mean()", "Mean(): .* missing 1 required positional argument: 'measure'"),
            ("EarlyStopping('x', patience=0)", "EarlyStopping.patience must be a whole number, 1 or more, got 0"),
            ("Mean('a'", "write a monitor as in Python, such as EarlyStopping"),
            ("", "write a monitor as in Python"),
            ("3", "3 is no monitor, which has name, init, reduce and result"),
            ("Mean(open('x'))", "no monitor is called open"),
            ("Mean(1 + 1)", "malformed node"),
            ("MeanLoss.__class__", "malformed node"),
            ("__import__('os')", "no monitor is called __import__"),
            ("map(MeanLoss, 3)", "no monitor is called map"),
            ("os:system('exit 1')", "no monitor is called system"),
            ("tests.test_command_line:called()", "no monitor is called called"),
            ("no.such:Thing", "no.such: it cannot be imported: No module named 'no'"),
        ],
    )
    def test_a_monitor_that_is_none_is_told_what_to_write(
        self, ask: Ask, capsys: pytest.CaptureFixture[str], written: str, says: str
    ) -> None:
        code, said = refused(ask, capsys, written)
        assert code == 2
        assert "error: argument --monitor: " in said
        assert all(part in said for part in says.split(" .* "))

    @pytest.mark.parametrize("written", ["Spike", "json:dumps", "json:nothing", "tests.test_command_line:Highest"])
    def test_an_event_class_that_is_none_too(self, ask: Ask, capsys: pytest.CaptureFixture[str], written: str) -> None:
        code, said = refused(ask, capsys, "MeanLoss", more=("--event", written))
        assert code == 2
        assert f"argument --event: {written}: give the module and the name of a subclass of Event" in said

    def test_what_is_wrong_with_a_log_is_said_in_a_line(
        self, ask: Ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert refused(ask, capsys, "MeanLoss") == (1, "error: there is no event log a")
        (tmp_path / "a").write_text("{\n")
        code, said = refused(ask, capsys, "MeanLoss")
        assert code == 1
        assert said.startswith("error: a, line 1 is no event: it is not JSON")
        (tmp_path / "a").write_text("")
        assert refused(ask, capsys, "MeanLoss", "MeanLoss")[1].startswith("error: Two monitors are called 'MeanLoss'")


def test_it_runs_as_a_program_without_torch(tmp_path: Path) -> None:
    run_of(tmp_path)
    code = "import sys, runpy; sys.argv[0] = 'pipeline'; runpy.run_module('pipeline', run_name='__main__')"
    code += "; sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-W", "error", "-c", code, "replay", str(tmp_path), "--monitor", "MeanLoss"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "MeanLoss  0.408333"
    usage = subprocess.run([sys.executable, "-m", "pipeline"], capture_output=True, text=True, check=False)
    assert (usage.returncode, usage.stdout) == (2, "")
    assert "usage: python -m pipeline [-h] command" in usage.stderr

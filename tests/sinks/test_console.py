"""Console: what a terminal, a pipe and a file show of a run."""

import io
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from rich.console import Console as RichConsole
from torch import nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    EmitEvents,
    Evaluation,
    Forward,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    Updates,
    chain,
    fold,
    init,
    sinks,
    supervised,
)
from pipeline.errors import SettingError
from pipeline.events import EpochEnded, EpochStarted, EvalDone, Event, RunEnded, RunStarted, UpdateDone, UpdateSkipped

ESCAPE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3\d|4\d|9\d|10\d)(?:;\d+)*m")


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich asks the environment: here for a terminal in colour, whatever the tests run in."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLORTERM", "COLUMNS", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


# -- what is shown --------------------------------------------------------------------------------------------------


def terminal(width: int = 120, **settings: Any) -> RichConsole:
    return RichConsole(file=io.StringIO(), force_terminal=True, width=width, height=25, **settings)


def pipe(width: int = 80) -> RichConsole:
    return RichConsole(file=io.StringIO(), width=width)


def output(console: RichConsole) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown(given: Iterable[Event], on: RichConsole, **settings: Any) -> str:
    """What is written to the console `on` for these events."""
    sink = sinks.Console(console=on, **settings)
    for event in given:
        sink.write(event)
    return output(on)


def screen(written: str) -> list[str]:
    """The lines that stand on a terminal after all of it, without colours."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[^\x1b\r\n]+|.", written, flags=re.DOTALL):
        escape = ESCAPE.fullmatch(token)
        if token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif escape is None:
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            column += len(token)
        elif escape[2] == "A":
            row -= int(escape[1] or 1)
        elif escape[2] == "K":
            assert escape[1] == "2"
            lines[row] = ""
        else:
            assert escape[2] in "mhl", f"unknown {token!r}"
    while lines[-1] == "":
        lines.pop()
    return lines


# -- what has happened ----------------------------------------------------------------------------------------------


def at(update: int, epoch: int = 0, time: float = 0.0) -> dict[str, Any]:
    return {"micro_step": 4 * update, "update": update, "epoch": epoch, "time": time}


def started(total: int | None = 30, **place: Any) -> RunStarted:
    until = "Epochs(3)" if total is None else f"Updates({total})"
    return RunStarted(**at(**{"update": 0, **place}), until=until, total_updates=total)


def updated(update: int, *, loss: float = 0.5, **place: Any) -> UpdateDone:
    return UpdateDone(
        **at(update, **place),
        loss=loss,
        weight=32.0,
        micro_batches=4,
        rates={"default": 1e-3},
        grad_norm=2.0,
        samples=32 * update,
    )


def skipped(update: int, count: int, **place: Any) -> UpdateSkipped:
    nan = float("nan")
    fields = {"loss": nan, "grad_norm": nan, "micro_batches": 4, "in_row": count}
    return UpdateSkipped(**at(update, **place), reason="non-finite gradients", skipped=count, **fields)


def evaluated(update: int, **place: Any) -> EvalDone:
    values = {"val_loss": 0.25, "val_accuracy": 0.875}
    return EvalDone(**at(update, **place), name="val", values=values, weight=180.0, batches=1)


def ended(update: int, *reasons: str, **place: Any) -> RunEnded:
    return RunEnded(**at(update, **place), reasons=reasons or ("Updates(30)",))


def three_epochs(total: int | None = 30) -> list[Event]:
    """Thirty updates in three epochs, a tenth of a second each; the loss of an update is 1 / its epoch."""
    run: list[Event] = [started(total)]
    for epoch in range(3):
        done, now = 10 * epoch, float(epoch)
        run.append(EpochStarted(**at(done, epoch, now)))
        run += [updated(done + n, epoch=epoch, time=now + n / 10, loss=1 / (epoch + 1)) for n in range(1, 11)]
        run.append(evaluated(done + 10, epoch=epoch + 1, time=now + 1))
        run.append(EpochEnded(**at(done + 10, epoch + 1, now + 1), batches=40))
    return [*run, ended(30, epoch=3, time=3.0)]


def up_to(update: int, total: int | None = 30) -> list[Event]:
    """`three_epochs` as far as this update."""
    run = three_epochs(total)
    return run[: run.index(next(e for e in run if isinstance(e, UpdateDone) and e.update == update)) + 1]


EVALUATED = "  val_loss 0.2500  val_accuracy 0.8750"
PACE = "  lr 1.00e-03  |g| 2.0000      320 samples/s"
ROWS = [
    "training until Updates(30)",
    f"epoch   1  update 10/30  loss 1.0000{EVALUATED}{PACE}",
    f"epoch   2  update 20/30  loss 0.5000{EVALUATED}{PACE}",
    f"epoch   3  update 30/30  loss 0.3333{EVALUATED}{PACE}",
    "ended after 30 updates, 3.0 s: Updates(30)",
]


class TestInATerminal:
    def test_a_run_leaves_its_rows_and_nothing_of_the_live_line(self) -> None:
        written = shown(three_epochs(), terminal())
        assert screen(written) == ROWS
        assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1  # the cursor is hidden, and comes back

    def test_while_it_runs_the_line_below_the_rows_tells_how_far_it_is(self) -> None:
        bar = "━━━━━━━━━━━━" + "────────────"
        assert screen(shown(up_to(15), terminal())) == [
            *ROWS[:2],
            f"epoch   2  update 15/30  loss 0.5000   0:02 left{PACE}  {bar}",
        ]

    def test_before_the_first_update_the_line_is_there(self) -> None:
        assert screen(shown([started()], terminal()))[1] == f"epoch   1  update  0/30  {'─' * 32}"

    def test_a_row_brings_the_line_to_where_the_row_is(self) -> None:
        lines = screen(
            shown([started(), *(updated(n, time=n / 1000) for n in range(1, 11)), evaluated(10)], terminal())
        )
        assert [line[:23] for line in lines[1:]] == ["epoch   1  update 10/30"] * 2

    @pytest.mark.parametrize(("per_second", "most"), [(10.0, 10), (2.0, 2)])
    def test_it_is_redrawn_at_most_so_many_times_a_second(self, per_second: float, most: int) -> None:
        run = [started(2000), *(updated(n, time=n / 1000) for n in range(1, 2001))]
        drawn = shown(run, terminal(), per_second=per_second).count("\x1b[2K")
        assert 2 * most - 1 <= drawn <= 2 * most + 1

    def test_a_clock_that_is_set_back_does_not_stop_it(self) -> None:
        run = [started(time=1000.0), updated(1, time=1000.0), updated(2, time=5.0)]
        assert "update  2/30" in screen(shown(run, terminal()))[-1]

    @pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120])
    def test_no_line_is_wider_than_the_terminal(self, width: int) -> None:
        for update in range(1, 31):
            lines = screen(shown(up_to(update), terminal(width), per_second=1e9))
            assert max(map(len, lines)) <= width

    def test_in_a_terminal_too_narrow_for_it_the_line_is_cut_off(self) -> None:
        lines = screen(shown(up_to(5), terminal(20), per_second=1e9))
        assert lines[-2:] == ["Updates(30)", "epoch   1  update  5"]

    def test_in_60_columns_rows_keep_the_evaluation_and_the_line_the_time_left(self) -> None:
        assert screen(shown(up_to(14), terminal(60), per_second=1e9)) == [
            "training until Updates(30)",
            "epoch   1  loss 1.0000  val_loss 0.2500  val_accuracy 0.8750",
            "epoch   2  update 14/30  loss 0.5000   0:02 left  ━━━─────",
        ]

    def test_without_a_total_there_is_no_bar_and_no_time_left(self) -> None:
        lines = screen(shown(up_to(6, None), terminal()))
        assert lines[0] == "training until Epochs(3)"
        assert lines[1] == f"epoch   1  update     6  loss 1.0000{PACE}"

    def test_no_color_takes_the_colours_and_leaves_the_bar_readable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert COLOUR.search(shown(three_epochs(), terminal()))
        monkeypatch.setenv("NO_COLOR", "1")
        written = shown(up_to(14), terminal())
        assert not COLOUR.search(written)
        assert "━─" in screen(written)[-1]

    def test_a_terminal_that_cannot_redraw_gets_rows_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "dumb")
        assert shown(three_epochs(), terminal()).splitlines() == ROWS

    def test_a_terminal_without_unicode_gets_a_bar_in_ascii(self) -> None:
        file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        sink = sinks.Console(console=RichConsole(file=file, force_terminal=True, width=120))
        for event in up_to(14):
            sink.write(event)
        file.flush()
        assert "#-" in screen(file.buffer.getvalue().decode("ascii"))[-1]  # type: ignore[attr-defined]

    def test_closing_without_an_end_gives_the_terminal_back(self) -> None:
        console = terminal()
        sink = sinks.Console(console=console)
        for event in up_to(4):
            sink.write(event)
        sink.close()
        assert screen(output(console)) == ROWS[:1]
        assert output(console).count("\x1b[?25h") == 1

    def test_what_others_print_stands_above_the_line(self) -> None:
        console = terminal()
        sink = sinks.Console(console=console)
        sink.write(started())
        sys.stdout.write("a word from the user\n")
        sink.write(updated(1, time=1.0))
        assert screen(output(console))[1] == "a word from the user"
        assert screen(output(console))[2].startswith("epoch   1  update  1/30")
        sink.close()


class TestElsewhere:
    def test_a_pipe_gets_the_rows_in_full_and_not_one_escape(self) -> None:
        assert shown(three_epochs(), pipe()).splitlines() == ROWS

    @pytest.mark.parametrize("on", [terminal, pipe])
    def test_a_row_comes_at_least_every_half_a_minute(self, on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "dumb")
        run = [started(1000), *(updated(n, time=float(n)) for n in range(1, 101))]
        rows = shown(run, on()).splitlines()[1:]
        assert [row[:24] for row in rows] == [f"epoch   1  update {n:>4}/1000"[:24] for n in (30, 60, 90)]


class TestRows:
    def test_an_epoch_without_an_evaluation_has_a_row_too(self) -> None:
        run = [event for event in three_epochs() if not isinstance(event, EvalDone)]
        rows = shown(run, pipe()).splitlines()
        assert rows == [row.replace(EVALUATED, "") for row in ROWS]

    def test_epochs_shorter_than_a_second_share_a_row(self) -> None:
        run: list[Event] = [started(1000)]
        for n in range(1, 1001):
            run += [updated(n, epoch=n - 1, time=n / 400), EpochEnded(**at(n, n, n / 400), batches=1)]
        rows = shown([*run, ended(1000, epoch=1000, time=2.5)], pipe()).splitlines()
        assert [re.findall(r"update +(\d+)", row) for row in rows[1:-1]] == [["400"], ["800"], ["1000"]]

    def test_loss_and_norm_are_means_since_the_row_before(self) -> None:
        run = [started(), updated(1, loss=1.0), updated(2, loss=3.0), evaluated(2), updated(3, loss=7.0), evaluated(3)]
        rows = shown(run, pipe()).splitlines()
        assert ["loss 2.0000" in rows[1], "loss 7.0000" in rows[2]] == [True, True]

    def test_two_evaluations_at_once_have_a_row_each(self) -> None:
        test = EvalDone(**at(10, 1), name="test", values={"test_loss": 0.125}, weight=1.0, batches=1)
        rows = shown([started(), updated(10), evaluated(10, epoch=1), test], pipe()).splitlines()
        assert "val_loss 0.2500" in rows[1]
        assert rows[2].startswith("epoch   1  update 10/30  test_loss 0.1250")

    @pytest.mark.parametrize(
        ("value", "text"),
        [(0.0, "0.0000"), (1e-5, "1.000e-05"), (123456.0, "1.235e+05"), (-2.5, "-2.5000"), (float("nan"), "nan")],
    )
    def test_values_of_any_size_stay_readable(self, value: float, text: str) -> None:
        event = EvalDone(**at(1), name="val", values={"val_loss": value}, weight=1.0, batches=1)
        assert f"val_loss {text}" in shown([started(), event], pipe())

    @pytest.mark.parametrize("on", [terminal, pipe])
    def test_skipped_windows_are_shown_although_nothing_else_happens(self, on: Any) -> None:
        run = [started(), *(skipped(0, n, time=n / 10) for n in range(1, 11)), ended(0, time=1.0)]
        during = screen(shown(run[:-1], terminal()))[-1]
        assert during.startswith("epoch   1  update  0/30  10 skipped")
        assert screen(shown(run, on()))[-2:] == [
            "epoch   1  update  0/30  10 skipped",
            "ended after 0 updates, 10 skipped, 1.0 s: Updates(30)",
        ]


class TestTheEnd:
    def test_what_no_row_has_told_gets_a_last_one(self) -> None:
        rows = shown([started(), updated(5), ended(5, "interrupted (Ctrl-C)", time=90.4)], pipe()).splitlines()
        assert rows[1].startswith("epoch   1  update  5/30  loss 0.5000")
        assert rows[2] == "ended after 5 updates, 1:30: interrupted (Ctrl-C)"

    @pytest.mark.parametrize("on", [terminal, pipe])
    def test_text_from_outside_is_shown_as_it_is(self, on: Any) -> None:
        reason = "ValueError: [red]no markup[/x] and :smile: no emoji [3, 4]"
        assert screen(shown([started(), ended(0, reason, "Updates(30)")], on()))[-1].endswith(f"{reason}; Updates(30)")

    def test_one_console_serves_several_runs_each_from_its_own_start(self) -> None:
        again = [started(60, update=30, epoch=3, time=100.0), updated(31, epoch=3, time=101.0)]
        assert screen(shown([*three_epochs(), *again, ended(31, epoch=3, time=102.0)], terminal())) == [
            *ROWS,
            "training from update 30 until Updates(60)",
            "epoch   4  update 31/60  loss 0.5000  lr 1.00e-03  |g| 2.0000",
            "ended after 31 updates, 2.0 s: Updates(30)",
        ]


class TestBuilding:
    @pytest.mark.parametrize("per_second", [0.0, -1.0, float("nan")])
    def test_a_rate_that_is_none_is_refused(self, per_second: float) -> None:
        with pytest.raises(SettingError, match=r"Console\.per_second must be above 0"):
            sinks.Console(per_second=per_second)

    def test_without_rich_the_error_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "rich.console", None)
        with pytest.raises(ImportError) as failure:
            sinks.Console()
        assert failure.value.__notes__ == ["Console needs rich: pip install 'foldtrain[console]'"]

    def test_importing_the_sinks_imports_no_rich(self) -> None:
        code = "import sys, pipeline.sinks; sys.exit('rich' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("on", [terminal, pipe])
def test_a_fold_shows_its_run(on: Any) -> None:
    model, console = nn.Linear(3, 2), on()
    data = [(torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(6)]
    forward = Forward(model, supervised(F.cross_entropy))
    optimizer = Optimizer(torch.optim.SGD, lr=0.1)
    step = chain(forward, ScaledBackward(), Accumulate(every=2), MaybeStep(optimizer), EmitEvents())
    evaluations, watching = [Evaluation(forward, data)], [sinks.Console(console=console)]
    fold(step, init(step, model), data, until=Updates(6), evaluations=evaluations, sinks=watching)
    lines = screen(output(console))
    assert [line[: len("epoch   1  update 3/6")] for line in lines] == [
        "training until Update",
        "epoch   1  update 3/6",
        "epoch   2  update 6/6",
        "ended after 6 updates",
    ]

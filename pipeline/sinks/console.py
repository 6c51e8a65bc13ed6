"""Live progress in a terminal, through rich."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pipeline.errors import SettingError
from pipeline.events import EpochEnded, EpochStarted, EvalDone, Event, RunEnded, RunStarted, UpdateDone, UpdateSkipped
from pipeline.monitors import GradNorm, MeanLoss, Throughput

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.text import Text

__all__ = ["Console"]

_LOSS, _NORM, _SPEED = MeanLoss(), GradNorm(), Throughput()
_EPOCH_ROWS = 1.0  # seconds: shorter epochs share a row
_QUIET = 30.0  # seconds: where there is no live line, a row comes at least this often
_GAP = "  "
_BAR = 6, 32  # columns


class Console:
    """A live line while training, a row for each evaluation and each epoch, and why the run ended.

    Loss and gradient norm are means over the updates since the row before; speed and time left are those of the whole
    run, evaluations included. In a terminal the line is redrawn at most `per_second` times a second of the events'
    clock, and what does not fit the width is left out. Elsewhere (a file, a pipe) there is no such line, and rows are
    written in full, one at least every 30 seconds.

    Args:   per_second: above 0; console: the `rich.console.Console` to write to, one on stdout by default.
    Raises: SettingError, when built; ImportError without rich: `pip install 'foldtrain[console]'`.
    """

    def __init__(self, *, per_second: float = 10.0, console: RichConsole | None = None) -> None:
        try:
            import rich.console  # noqa: PLC0415 - rich is optional
            import rich.live  # noqa: PLC0415
            import rich.text  # noqa: PLC0415
        except ImportError as error:
            error.add_note("Console needs rich: pip install 'foldtrain[console]'")
            raise
        if not per_second > 0:
            raise SettingError("Console.per_second", "above 0", per_second)
        self._interval = 1.0 / per_second
        self._console = rich.console.Console() if console is None else console
        self._live = rich.live.Live(console=self._console, auto_refresh=False, transient=True)
        self._text = rich.text.Text
        self._forget(RunStarted(micro_step=0, update=0, epoch=0, time=0.0, until=""))

    def write(self, event: Event) -> None:
        """Show one event."""
        if isinstance(event, RunStarted):
            self._start(event)
        elif isinstance(event, EpochStarted):
            self._epoch = event.epoch + 1
        elif isinstance(event, UpdateDone | UpdateSkipped):
            self._take(event)
            if self._live.is_started:
                self._draw(event)
            elif event.time - self._row_at >= _QUIET:
                self._row(event)
        elif isinstance(event, EvalDone):
            self._row(event, event.values)
        elif isinstance(event, EpochEnded):
            if self._is_news and event.time - self._row_at >= _EPOCH_ROWS:
                self._row(event)
        elif isinstance(event, RunEnded):
            self._end(event)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._live.stop()

    # -- what has happened --------------------------------------------------------------------------------------

    def _forget(self, event: RunStarted) -> None:
        self._started = event
        self._epoch, self._skipped, self._rate = event.epoch + 1, 0, math.nan
        self._loss, self._norm, self._speed = _LOSS.init(), _NORM.init(), _SPEED.init()
        self._row_at, self._drawn_at, self._is_news = event.time, -math.inf, False

    def _start(self, event: RunStarted) -> None:
        self._forget(event)
        begun = f" from update {event.update}" if event.update else ""
        self._print(self._text(f"training{begun} until {event.until}"))
        if self._console.is_interactive:
            self._live.update(self._line(event))
            self._live.start(refresh=True)

    def _take(self, event: UpdateDone | UpdateSkipped) -> None:
        self._is_news = True
        if isinstance(event, UpdateSkipped):
            self._skipped = event.skipped
            return
        self._loss, self._norm = _LOSS.reduce(self._loss, event), _NORM.reduce(self._norm, event)
        self._speed = _SPEED.reduce(self._speed, event)
        self._rate = event.rates.get("default", math.nan)

    def _end(self, event: RunEnded) -> None:
        if self._is_news:
            self._row(event)
        self._live.stop()
        skipped = f", {self._skipped} skipped" if self._skipped else ""
        seconds = event.time - self._started.time
        took = f"{seconds:.1f} s" if seconds < 60 else _clock(seconds)
        self._print(self._text(f"ended after {event.update} updates{skipped}, {took}: {'; '.join(event.reasons)}"))

    # -- the live line, and the rows above it -------------------------------------------------------------------

    def _draw(self, event: Event) -> None:
        if not 0 <= event.time - self._drawn_at < self._interval:
            self._drawn_at = event.time
            self._live.update(self._line(event), refresh=True)

    def _line(self, event: Event) -> Text:
        total, width = self._started.total_updates, self._console.width - len("^C")  # which a terminal writes behind it
        fields = [*self._where(event), *self._trained(), *self._time_left(event), *self._pace()]
        line = self._fit(fields, fields[:2], width - _BAR[0] - len(_GAP) if total else width)
        line.no_wrap, line.overflow = True, "crop"
        columns = min(_BAR[1], width - line.cell_len - len(_GAP))
        if total:
            done = min(columns * event.update // total, columns)
            full, rest = "#-" if self._console.options.ascii_only else "━─"
            line.append(_GAP).append(full * done, "green").append(rest * (columns - done), "dim")
        return line

    def _row(self, event: Event, values: Mapping[str, float] | None = None) -> None:
        where, shown = self._where(event), [self._field(n, _short(v), "bold") for n, v in (values or {}).items()]
        fields = [*where, *self._trained(), *shown, *self._pace()]
        if self._live.is_started:
            self._live.update(self._line(event), refresh=True)
        room = self._console.width if self._console.is_terminal else math.inf
        self._print(self._fit(fields, [where[0], *shown], room))
        self._loss, self._norm = _LOSS.init(), _NORM.init()
        self._row_at, self._is_news = event.time, False

    def _fit(self, fields: list[Text], needed: list[Text], room: float) -> Text:
        """The fields in a row: those needed, and of the others, in order, each that still fits."""
        kept: list[Text] = []
        room -= sum(field.cell_len + len(_GAP) for field in needed) - len(_GAP)
        for field in fields:
            if field not in needed:
                if field.cell_len + len(_GAP) > room:
                    continue
                room -= field.cell_len + len(_GAP)
            kept.append(field)
        return self._text(_GAP).join(kept)

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=not self._console.is_terminal)

    # -- fields -------------------------------------------------------------------------------------------------

    def _field(self, label: str, value: str, style: str = "") -> Text:
        return self._text.assemble((label, "dim"), " ", (value, style))

    def _where(self, event: Event) -> list[Text]:
        total = self._started.total_updates
        update = f"{event.update:>5}" if total is None else f"{event.update:>{len(str(total))}}/{total}"
        return [self._field("epoch", f"{self._epoch:>3}"), self._field("update", update)]

    def _trained(self) -> Iterator[Text]:
        loss = _LOSS.result(self._loss)
        if loss is not None:
            yield self._field("loss", _short(loss))

    def _time_left(self, event: Event) -> Iterator[Text]:
        speed, total = _SPEED.result(self._speed), self._started.total_updates
        if speed is not None and speed["updates"] and total is not None:
            yield self._text.assemble(f"{_clock((total - event.update) / speed['updates']):>5}", (" left", "dim"))

    def _pace(self) -> Iterator[Text]:
        norm, speed = _NORM.result(self._norm), _SPEED.result(self._speed)
        if self._skipped:
            yield self._text(f"{self._skipped} skipped", "yellow")
        if norm is not None:
            yield self._field("lr", f"{self._rate:.2e}")
            yield self._field("|g|", _short(norm["mean"]))
        if speed is not None:
            yield self._text.assemble(f"{speed['samples']:>7,.0f}", (" samples/s", "dim"))


def _short(value: float) -> str:
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.3e}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"

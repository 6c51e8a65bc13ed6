"""Live progress in a terminal, through rich."""

from __future__ import annotations

from typing import Any

from pipeline.events import EpochStarted, EvalDone, Event, RunEnded, RunStarted, UpdateDone, UpdateSkipped

__all__ = ["Console"]


class Console:
    """A progress line while training, a row for each evaluation, and why the run ended.

    In a terminal the line is redrawn at most `per_second` times a second of the events' clock; elsewhere (a file, a
    pipe) only the rows are printed. Needs rich: `pip install foldtrain[console]`.
    """

    def __init__(self, *, per_second: float = 10.0, console: Any = None) -> None:
        from rich.console import Console as RichConsole  # noqa: PLC0415 - rich is optional
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn  # noqa: PLC0415

        self._console: RichConsole = console or RichConsole()
        self._interval = 1.0 / per_second
        self._drawn = -1.0
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[facts]}"),
            console=self._console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._progress.add_task("training", total=None, epoch=0, facts="")
        self._last: UpdateDone | None = None
        self._first: UpdateDone | None = None
        self._started = 0.0
        self._skipped = 0

    def write(self, event: Event) -> None:
        """Show one event."""
        if isinstance(event, RunStarted):
            self._started = event.time
            self._console.print(f"training until {event.until}", highlight=False)
            self._progress.update(self._task, total=event.total_updates, completed=event.update)
            if self._console.is_terminal:
                self._progress.start()
        elif isinstance(event, EpochStarted):
            self._progress.update(self._task, epoch=event.epoch + 1)
        elif isinstance(event, UpdateDone):
            self._first = self._first or event
            self._last = event
            self._draw(event)
        elif isinstance(event, UpdateSkipped):
            self._skipped = event.skipped
        elif isinstance(event, EvalDone):
            self._row(event)
        elif isinstance(event, RunEnded):
            self._progress.stop()
            skipped = f", {self._skipped} skipped" if self._skipped else ""
            took = f"{event.time - self._started:.1f} s"
            self._console.print(
                f"ended after {event.update} updates{skipped}, {took}: {'; '.join(event.reasons)}", highlight=False
            )

    def _draw(self, event: UpdateDone) -> None:
        if event.time - self._drawn < self._interval:
            return
        self._drawn = event.time
        facts = (
            f"loss {float(event.loss):.4f}  lr {event.rates.get('default', 0.0):.2e}  |g| {float(event.grad_norm):.3f}"
        )
        first = self._first
        if first is not None and event.time > first.time:
            facts += f"  {(event.samples - first.samples) / (event.time - first.time):,.0f} samples/s"
        self._progress.update(self._task, completed=event.update, facts=facts)
        self._progress.refresh()

    def _row(self, event: EvalDone) -> None:
        values = "  ".join(f"{name} [bold]{value:.4f}[/bold]" for name, value in event.values.items())
        train = "" if self._last is None else f"loss {float(self._last.loss):.4f}  "
        self._console.print(f"epoch {event.epoch:>3}  update {event.update:>5}  {train}{values}", highlight=False)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()

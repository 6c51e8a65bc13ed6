"""Callbacks in the classic style (`on_epoch_end(epoch, logs)` and the like), told of a fold's events as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.errors import SettingError
from pipeline.events import EpochEnded, EpochStarted, EvalDone, Event, RunEnded, RunStarted, UpdateDone
from pipeline.monitor import Signal, Stop
from pipeline.monitors import MeanLoss

__all__ = ["Callbacks"]

_METHODS = (
    "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_batch_begin", "on_batch_end",
    "on_train_batch_begin", "on_train_batch_end", "on_test_begin", "on_test_end",
)  # fmt: skip


class Callbacks:
    """Subscribe callbacks written for other trainers: any object with some of the methods below.

    `on_train_begin(logs)`, `on_train_end(logs)`, `on_epoch_begin(epoch, logs)`, `on_epoch_end(epoch, logs)`,
    `on_batch_end(batch, logs)` or `on_train_batch_end(batch, logs)`, `on_test_end(logs)`. Epochs and batches count from
    0. A batch is an update here, which is what such a callback means; `on_batch_begin(batch, logs)` comes right before
    its `on_batch_end`, since events tell of what is done.

    `logs` is a dict of numbers: the update's `loss`, `lr`, `grad_norm` and measures; at an epoch's end the means of the
    epoch, and the values of the evaluations since the last (`val_loss`). All callbacks of a moment get the same dict.
    One that sets `logs["should_stop"]` to true, or `self.model.stop_training`, ends the run. With a `model`, a
    callback's `set_model(model)` is called first.

    Edges:  called when events are published: every n-th update with `fold(publish_every=n)`, 1 for callbacks that act
            on single updates. In a run that goes on from a checkpoint in the middle of an epoch, the callbacks begin
            there: after `on_train_begin` and `on_epoch_begin` with the epoch's number, its batches count from 0, and
            its means are of what is left of it.
    Raises: SettingError for an object that has none of these methods.
    """

    def __init__(self, callbacks: Iterable[Any], *, model: Any = None) -> None:
        self.callbacks = tuple(callbacks)
        self._stop: str | None = None
        self._in_run = self._in_epoch = False
        self._batch = 0
        self._sums: dict[str, tuple[float, float]] = {}
        self._evaluated: dict[str, float] = {}
        for callback in self.callbacks:
            if not any(hasattr(callback, method) for method in _METHODS):
                raise SettingError("Callbacks(callbacks)", f"objects with one of {', '.join(_METHODS)}", callback)
            if model is not None and hasattr(callback, "set_model"):
                callback.set_model(model)

    def write(self, event: Event) -> None:
        """Call what the event stands for."""
        if isinstance(event, RunStarted):
            self._begin_run()
        elif isinstance(event, EpochStarted):
            self._begin_epoch(event.epoch)
        elif isinstance(event, UpdateDone):
            if not self._in_epoch:  # a loop by hand tells of no start, nor does a run that goes on in the middle
                self._begin_epoch(event.epoch)
            self._updated(event)
        elif isinstance(event, EvalDone):
            self._evaluated |= event.values
            self._call("on_test_begin", {})
            self._call("on_test_end", dict(event.values))
        elif isinstance(event, EpochEnded):
            means = {name: total / weight for name, (total, weight) in self._sums.items() if weight}
            logs, self._evaluated, self._in_epoch = {**means, **self._evaluated}, {}, False
            self._call("on_epoch_end", logs, event.epoch - 1)
        elif isinstance(event, RunEnded):
            self._in_run = self._in_epoch = False
            self._call("on_train_end", {})

    def resume(self, events: int) -> None:
        """A run goes on from a checkpoint: for these callbacks it begins."""
        self._begin_run()

    def signals(self) -> Iterable[Signal]:
        """Stop, once a callback asked for it."""
        if self._stop is not None:
            yield Stop(self._stop)

    def close(self) -> None:
        """Nothing is held."""

    def _begin_run(self) -> None:
        if not self._in_run:
            self._stop, self._evaluated, self._in_run = None, {}, True
            self._call("on_train_begin", {})

    def _begin_epoch(self, epoch: int) -> None:
        self._batch, self._sums, self._in_epoch = 0, {}, True
        self._call("on_epoch_begin", {}, epoch)

    def _updated(self, event: UpdateDone) -> None:
        values: dict[str, tuple[float, float]] = {"loss": MeanLoss().reduce((0.0, 0.0), event)}
        values |= {name: (float(total), float(weight)) for name, (total, weight) in event.measures.items()}
        for name, (total, weight) in values.items():
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = before[0] + total, before[1] + weight
        logs: dict[str, Any] = {name: total / weight for name, (total, weight) in values.items() if weight}
        rates = list(event.rates.values())
        logs |= {"grad_norm": float(event.grad_norm), **({"lr": rates[0]} if rates else {})}
        for moment, given in (("begin", dict[str, Any]()), ("end", logs)):
            self._call((f"on_train_batch_{moment}", f"on_batch_{moment}"), given, self._batch)
        self._batch += 1

    def _call(self, methods: str | tuple[str, ...], logs: dict[str, Any], *place: int) -> None:
        """Call the first of these methods that a callback has: in classic base classes it calls the others itself."""
        methods = (methods,) if isinstance(methods, str) else methods
        for callback in self.callbacks:
            called = next((found for name in methods if (found := getattr(callback, name, None)) is not None), None)
            if called is None:
                continue
            called(*place, logs)
            if self._stop is None and _wants_to_stop(callback, logs):
                self._stop = f"{type(callback).__name__} asked to stop"

    def __repr__(self) -> str:
        return f"Callbacks({list(self.callbacks)!r})"


def _wants_to_stop(callback: Any, logs: Mapping[str, Any]) -> bool:
    return bool(logs.get("should_stop")) or bool(getattr(getattr(callback, "model", None), "stop_training", False))

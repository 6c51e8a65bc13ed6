"""Callbacks in the classic style, subscribed to a fold as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeline import Epochs, Evaluation, Forward, fold, init, observe, sinks, supervised
from pipeline.errors import SettingError
from pipeline.monitors import SaveEvery
from pipeline.transform import Chain
from tests.laws.cases import IN, OUT, accuracy, make_batches, make_step


def started() -> tuple[Chain, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(IN, OUT)
    return make_step(model, 2), model


class History:
    """As people write them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append(("train begin",))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch begin", epoch))

    def on_batch_end(self, batch: int, logs: dict[str, float]) -> None:
        self.calls.append(("batch", batch, logs))

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        self.calls.append(("epoch", epoch, logs))

    def on_train_end(self, logs: Any = None) -> None:
        self.calls.append(("train end",))


def test_every_moment_is_called_with_its_numbers() -> None:
    step, model = started()
    history = History()
    evaluation = Evaluation(
        Forward(model, supervised(F.cross_entropy, measures={"accuracy": accuracy})), make_batches(1)
    )
    fold(
        step,
        init(step, model),
        make_batches(4),
        until=Epochs(2),
        evaluations=[evaluation],
        sinks=[sinks.Callbacks([history])],
    )
    assert [call[:2] for call in history.calls] == [
        ("train begin",),
        *(call for epoch in (0, 1) for call in (("epoch begin", epoch), ("batch", 0), ("batch", 1), ("epoch", epoch))),
        ("train end",),
    ]
    logs = history.calls[2][2]
    assert set(logs) == {"loss", "accuracy", "grad_norm", "lr"}
    means = history.calls[4][2]
    assert set(means) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert means["loss"] == pytest.approx((history.calls[2][2]["loss"] + history.calls[3][2]["loss"]) / 2)


@pytest.mark.parametrize("way", ["logs", "model"])
def test_a_callback_can_end_the_run(way: str) -> None:
    class Enough:
        def __init__(self) -> None:
            self.model: Any = None

        def set_model(self, model: Any) -> None:
            self.model = model

        def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
            if epoch == 1 and way == "logs":
                logs["should_stop"] = True
            elif epoch == 1:
                self.model.stop_training = True

    step, model = started()
    trainer = SimpleNamespace(stop_training=False)
    subscribed = sinks.Callbacks([Enough()], model=trainer)
    run = fold(step, init(step, model), make_batches(4), until=Epochs(9), sinks=[subscribed])
    assert run.state.progress.epoch == 2
    assert run.stopped_by == ("Enough asked to stop",)


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(SettingError, match="on_train_begin"):
        sinks.Callbacks([object()])


class Classic:
    """A base class in which the one calls the other, as people have them."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.means: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.on_batch_end(batch, logs)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self.means.append(logs["loss"])
        logs["should_stop"] = epoch == 1


def test_a_batch_is_told_of_once_and_each_epoch_by_itself_in_a_loop_by_hand_too() -> None:
    classic = Classic()
    sink = sinks.Callbacks([classic])
    with observe([], [sink]) as run:
        for epoch in range(2):
            for _ in range(2):
                run.update(10.0 if epoch == 0 else 0.0)
            run.epoch_ended()
    assert run.stops == ("Classic asked to stop",)
    assert classic.batches == [0, 1, 0, 1]
    assert classic.means == [10.0, 0.0]
    with observe([], [sink]) as again:  # asked for then, and not now
        again.update(1.0)
    assert again.stops == ()


def test_a_loop_by_hand_begins_its_epochs_too() -> None:
    history = History()
    with observe([], [sinks.Callbacks([history])]) as run:
        for _ in range(2):
            run.update(1.0)
            run.epoch_ended()
    begun = [call for call in history.calls if call[0] == "epoch begin"]
    assert begun == [("epoch begin", 0), ("epoch begin", 1)]


class PowerCut(Exception):
    pass


def cut(batches: list[Any]) -> Iterator[Any]:
    yield from batches
    raise PowerCut


@pytest.mark.parametrize("further", [0, 1], ids=["the same limit", "a later one"])
def test_for_callbacks_a_run_that_goes_on_in_the_middle_of_an_epoch_begins_there(tmp_path: Path, further: int) -> None:
    step, model = started()
    batches = make_batches(8)
    with pytest.raises(PowerCut):
        fold(
            step, init(step, model), cut(batches[:5]), until=Epochs(1), monitors=[SaveEvery(updates=1)], store=tmp_path
        )
    step, model = started()
    history = History()
    fold(
        step,
        init(step, model),
        batches,
        until=Epochs(1 + further),
        monitors=[SaveEvery(updates=1)],
        sinks=[sinks.Callbacks([history])],
        store=tmp_path,
        resume="latest",
    )
    first = [("train begin",), ("epoch begin", 0), ("batch", 0), ("batch", 1), ("epoch", 0)]
    second = [("epoch begin", 1), *(("batch", n) for n in range(4)), ("epoch", 1)]
    assert [call[:2] for call in history.calls] == [*first, *second * further, ("train end",)]

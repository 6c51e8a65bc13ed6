"""What the tests of checkpoints share: a small run, and a checkpoint in the midst of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    AverageWeights,
    ClipByGlobalNorm,
    EmitEvents,
    Evaluation,
    Forward,
    LossScale,
    MaybeStep,
    Optimizer,
    Progress,
    Run,
    ScaledBackward,
    Tensors,
    TrainState,
    Updates,
    chain,
    fold,
    init,
    scan,
    supervised,
)
from pipeline.checkpoint import Checkpoint
from pipeline.place import Place
from pipeline.transform import Chain
from tests.monitors.cases import evaluation, update

IN, OUT = 4, 3


def a_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(IN, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, OUT))


def a_step(model: nn.Module, every: int = 2) -> Chain:
    return chain(
        Forward(model, supervised(F.cross_entropy)),
        ScaledBackward(),
        Accumulate(every, at_end="carry"),
        ClipByGlobalNorm(1.0),
        MaybeStep(Optimizer(torch.optim.AdamW, lr=0.05)),
        AverageWeights(decay=0.5),
        EmitEvents(),
    )


def batches(n: int = 5, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(4, IN, generator=generator), torch.randint(0, OUT, (4,), generator=generator)) for _ in range(n)
    ]


def started(seed: int = 0, every: int = 2) -> tuple[nn.Module, Chain, TrainState]:
    """A model, its step, and the state before the first batch."""
    model = a_model(seed)
    step = a_step(model, every)
    return model, step, init(step, model, seed=seed, loss_scale=LossScale(scale=16.0, interval=3))


def states(seed: int = 0, n: int = 5) -> Iterator[TrainState]:
    """The states of a run after each micro-batch."""
    _, step, state = started(seed)
    for now, _ in scan(step, state, batches(n)):
        yield now


def a_checkpoint(micro_steps: int = 3, **fields: Any) -> Checkpoint:
    """One within a window, of which something is kept everywhere."""
    state = next(state.copy() for state in states() if state.progress.micro_steps == micro_steps)
    kept: dict[str, Any] = {
        "place": Place(in_epoch=True, read=micro_steps, batches=micro_steps, until="Updates(2)"),
        "stream": {"epoch": 0, "order": (2, 0, 1), "drawn": torch.tensor([1, 2])},
        "accumulators": {"MeanLoss": (1.5, 2.0), "none yet": None},
        "told": 3,
        "pending": (update(1, loss=math.nan, rates={"default": 0.05}), evaluation(0.25, 1)),
        "reasons": ("a test",),
        "time": 12.5,
        "measures": {"val_loss": 0.25},
        "run": "this",
    }
    return Checkpoint(state, **{**kept, **fields})


def at(micro_steps: int, **fields: Any) -> Checkpoint:
    """One of next to nothing, for what is about folders: an update at each micro-step."""
    state = TrainState(Tensors({"w": torch.ones(3)}), progress=Progress(micro_steps=micro_steps, updates=micro_steps))
    return Checkpoint(state, **{"place": Place(in_epoch=True, read=1), **fields})


def training(folder: Path, *, updates: int = 6, seed: int = 0, **settings: Any) -> Run:
    """A run that goes on if it was there before, with an evaluation after each epoch."""
    model, step, state = started(seed)
    evaluation = Evaluation(Forward(model, supervised(F.cross_entropy)), batches(1, seed=1))
    given: dict[str, Any] = {"store": folder, "resume": "latest", "until": Updates(updates), "clock": lambda: 0.0}
    return fold(step, state, batches(), evaluations=[evaluation], **{**given, **settings})

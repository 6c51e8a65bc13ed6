"""A run that may be stopped at any moment, and is started again by the same command until it is done.

    python -m examples.resume      # Ctrl-C, kill it, or let it end: the next start goes on from there

It learns to tell two spirals apart. Its folder holds the checkpoints, the events of all starts as if it had been one,
and `model.safetensors`, the averaged weights of the best checkpoint so far, for other programs.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    AverageWeights,
    CheckpointStore,
    EmitEvents,
    Evaluation,
    Forward,
    MaybeStep,
    Optimizer,
    Run,
    ScaledBackward,
    Updates,
    chain,
    export,
    fold,
    init,
    monitors,
    schedules,
    sinks,
    stream,
    supervised,
)

UPDATES = 600


def spirals(n: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Points on two spirals with some noise, each with the number of its spiral."""
    generator = torch.Generator().manual_seed(seed)
    turn, which = torch.rand(n, generator=generator), torch.randint(0, 2, (n,), generator=generator)
    angle = 3 * torch.pi * turn + torch.pi * which
    points = torch.stack([angle.cos(), angle.sin()], 1) * turn[:, None]
    return list(zip(points + 0.01 * torch.randn(n, 2, generator=generator), which, strict=True))


def network() -> nn.Module:
    """A small one, the same at each start."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 2))


def main(folder: str | Path = "runs/resume", until: int = UPDATES) -> Run:
    """Begin the run, or go on with it."""
    model = network()
    loss = supervised(F.cross_entropy, measures={"accuracy": lambda out, y: (out.argmax(1) == y).float().mean()})
    forward = Forward(model, loss)
    step = chain(
        forward,
        ScaledBackward(),
        Accumulate(),
        MaybeStep(Optimizer(torch.optim.AdamW, lr=schedules.warmup_cosine(0.01, 20, UPDATES))),
        AverageWeights(decay=0.98),
        EmitEvents(),
    )
    store = CheckpointStore(folder, best="val_loss", background=True)
    run = fold(
        step,
        init(step, model, seed=0),
        stream.batches(spirals(2_000, seed=1), 50, shuffle=True, seed=0),
        evaluations=[Evaluation(forward, stream.batches(spirals(500, seed=2), 100), average="average")],
        monitors=[monitors.MeanLoss(), monitors.SaveEvery(updates=50), monitors.SaveBest("val_loss")],
        sinks=[sinks.EventLog(folder)],
        until=Updates(until),
        store=store,
        resume="latest",
    )
    best = store.load("best")
    export(best, Path(folder) / "model.safetensors", average="average")
    print(f"{run.state.progress.updates} updates, ended by {', '.join(run.stopped_by)}")
    print(f"best: {best.measures['val_accuracy']:.1%} of the held-out points at update {best.state.progress.updates}")
    return run


if __name__ == "__main__":
    main()

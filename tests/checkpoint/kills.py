"""A run that is killed again and again, in forked processes, so that torch is imported once.

`main(root)` makes the run whole in `root/whole`, and with 200 kills in `root/killed`, and writes down what it saw.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    AverageWeights,
    ClipByGlobalNorm,
    EmitEvents,
    Forward,
    LossScale,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    Updates,
    chain,
    fold,
    init,
    monitors,
    sinks,
    supervised,
    tap,
)
from pipeline.checkpoint import Checkpoint, CheckpointStore
from pipeline.checkpoint._folder import verify

KILLS, UPDATES, KEPT = 200, 450, 2


def run(folder: Path, *, life: int, told: Callable[[], object]) -> None:
    """One life of the run, the first or any other; `told` is called after each micro-batch."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(4, 4, generator=generator), torch.randint(0, 3, (4,), generator=generator)) for _ in range(7)
    ]
    step = chain(
        Forward(model, supervised(F.cross_entropy)),
        ScaledBackward(),
        Accumulate(2, at_end="carry"),
        ClipByGlobalNorm(0.5),
        MaybeStep(Optimizer(torch.optim.AdamW, lr=0.01)),
        AverageWeights(decay=0.9),
        EmitEvents(),
        tap(lambda _: told()),
    )
    done = fold(
        step,
        init(step, model, seed=1, loss_scale=LossScale(scale=2.0**15, interval=5)),
        batches,
        until=Updates(UPDATES),
        monitors=[monitors.MeanLoss(), monitors.GradNorm(), monitors.SaveEvery(updates=1)],
        sinks=[sinks.EventLog(folder)],
        store=CheckpointStore(folder, keep_last=KEPT, background=life % 2 == 1),
        resume="latest",
        clock=lambda: 0.0,
    )
    end = Checkpoint(done.state).taken_apart()
    bits = {name: tensor.detach().flatten().view(torch.uint8).tolist() for name, tensor in end.tensors.items()}
    noted = {"state": end.state["state"], "bits": bits, "results": repr(done.results), "by": done.stopped_by}
    (folder / "results.json").write_text(json.dumps(noted))


def start(folder: Path, life: int) -> tuple[int, int]:
    """Begin a life; its process, and a pipe that gets a byte for each micro-batch and ends with it."""
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    try:
        run(folder, life=life, told=lambda: os.write(writing, b"."))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def whole_ones(folder: Path) -> list[str]:
    """The names of the checkpoints that are there, once each of them is found whole."""
    return [path.name for path in sorted((folder / "checkpoints").glob("0*")) if verify(path)]


def main(root: Path) -> None:
    """Both runs, and what was seen on the way."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # torch imports much more with the first optimizer
    began = time.perf_counter()
    process, _ = start(root / "whole", 0)
    ended = [os.waitpid(process, 0)[1]]
    update = (time.perf_counter() - began) / UPDATES  # seconds
    killed, moments, seen = root / "killed", random.Random(0), {"kills": 0, "in a save": 0, "lost": 0}
    while seen["kills"] < KILLS:
        before = whole_ones(killed)
        process, reading = start(killed, seen["kills"])
        for _ in range(moments.randint(0, 3)):  # a life lasts for so many micro-batches, and some part of an update
            os.read(reading, 1)
        time.sleep(moments.uniform(0, update))
        os.kill(process, signal.SIGKILL)
        os.close(reading)
        if os.waitpid(process, 0)[1] != signal.SIGKILL:
            break  # it came to its end, or failed
        seen["kills"] += 1
        seen["in a save"] += any((killed / "checkpoints").glob(".*.partial"))
        after = whole_ones(killed)
        has_newest = max([*after, ""]) >= max([*before, ""])
        seen["lost"] += not (has_newest and len(after) >= min(len(before), KEPT))
    process, _ = start(killed, seen["kills"])
    ended.append(os.waitpid(process, 0)[1])
    (root / "seen.json").write_text(json.dumps({**seen, "ended": ended}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""What watching costs: a fold with twenty monitors and the event log, against the same fold without any.

The recipe is that of `bench_step.py`: a small MLP, window 4, clip, AdamW, cosine, events published every 10 updates.
Rounds alternate; the ratio of the medians is printed with the middle half of the ratios, round by round.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    ClipByGlobalNorm,
    EmitEvents,
    Forward,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    chain,
    fold,
    init,
    monitors,
    schedules,
    sinks,
    supervised,
)

WINDOW, UPDATES, ROUNDS = 4, 100, 41


def watchers() -> list[Any]:
    """Twenty monitors of what a small run tells."""
    return [
        monitors.MeanLoss(),
        monitors.ExponentialMean("loss"),
        monitors.Mean("accuracy"),
        monitors.LearningRate(),
        monitors.LearningRates(),
        monitors.GradNorm(),
        monitors.ClipShare(),
        monitors.LossScaleHistory(),
        monitors.Skips(),
        monitors.Throughput(),
        monitors.TimeLeft(),
        monitors.ParamNorm(),
        monitors.UpdateNorm(),
        monitors.UpdateRatios(),
        monitors.LayerGradNorms(),
        monitors.GradNoiseScale(),
        monitors.Memory(),
        monitors.Quantiles("loss"),
        monitors.per_epoch(monitors.MeanLoss(), name="loss by epoch"),
        monitors.every(monitors.GradNorm(), 10, name="every tenth norm"),
    ]


def main() -> None:
    """Print the ratio."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batches = [(torch.randn(32, 16), torch.randint(0, 4, (32,))) for _ in range(WINDOW * UPDATES)]
    with tempfile.TemporaryDirectory() as folder:
        watched: dict[bool, list[float]] = {False: [], True: []}
        runs = {which: started() for which in watched}
        for round_ in range(ROUNDS + 3):
            for which, (step, state) in runs.items():
                watch = watchers() if which else []
                log = [sinks.EventLog(f"{folder}/{round_}")] if which else []
                began = time.perf_counter()
                run = fold(step, state, batches, monitors=watch, sinks=log)
                took = time.perf_counter() - began
                runs[which] = step, run.state
                if round_ >= 3:
                    watched[which].append(took)
        ratios = sorted(a / b for a, b in zip(watched[True], watched[False], strict=True))
        micro = statistics.median(watched[False]) / len(batches)
        print(f"a micro-batch without any: {1e6 * micro:.0f} us")
        ratio = statistics.median(watched[True]) / statistics.median(watched[False])
        low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        print(f"20 monitors and the event log: {ratio:.3f} (middle half {low:.3f} to {high:.3f}; bar 1.10)")


def started() -> tuple[Any, Any]:
    """The step, and the state before the first batch."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    step = chain(
        Forward(model, supervised(F.cross_entropy)),
        ScaledBackward(),
        Accumulate(WINDOW),
        ClipByGlobalNorm(1.0),
        MaybeStep(Optimizer(torch.optim.AdamW, lr=schedules.warmup_cosine(1e-3, 10, 10_000))),
        EmitEvents(),
    )
    return step, init(step, model)


if __name__ == "__main__":
    main()

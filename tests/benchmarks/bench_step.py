"""What a step costs: the fold with three monitors against the loop that a careful person would write by hand.

MLP 32-64-10, batch 32, AdamW fused, window 4, clip 1.0, warmup-cosine, the loss of every update kept; one thread. The
two run in turn in one process; medians of the rounds, and their ratio.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    ClipByGlobalNorm,
    EmitEvents,
    Forward,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    Updates,
    chain,
    fold,
    init,
    monitors,
    schedules,
    supervised,
)

WINDOW, UPDATES = 4, 250
SCHEDULE = schedules.warmup_cosine(peak=1e-3, warmup=20, total=UPDATES)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def plain(batches: list[tuple[Tensor, Tensor]]) -> tuple[nn.Module, float]:
    """The hand-written loop: seconds for all updates."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    params = list(model.parameters())
    losses: list[float] = []
    start = time.perf_counter()
    total = torch.zeros(())
    for i, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y) / WINDOW
        loss.backward()
        total = total + loss.detach()
        if (i + 1) % WINDOW == 0:
            nn.utils.clip_grad_norm_(params, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = SCHEDULE(len(losses))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item())
            total = torch.zeros(())
    return model, time.perf_counter() - start


def folded(batches: list[tuple[Tensor, Tensor]]) -> tuple[nn.Module, float]:
    """The fold with three monitors: seconds for all updates."""
    model = make_model()
    step = chain(
        Forward(model, supervised(F.cross_entropy)),
        ScaledBackward(),
        Accumulate(every=WINDOW),
        ClipByGlobalNorm(1.0),
        MaybeStep(Optimizer(torch.optim.AdamW, lr=SCHEDULE, weight_decay=0.01)),
        EmitEvents(),
    )
    state = init(step, model)
    watch = [monitors.MeanLoss(), monitors.GradNorm(), monitors.LearningRate()]
    start = time.perf_counter()
    fold(step, state, batches, monitors=watch, until=Updates(UPDATES))
    return model, time.perf_counter() - start


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    batches = [(torch.randn(32, 32), torch.randint(0, 10, (32,))) for _ in range(UPDATES * WINDOW)]
    times: dict[str, list[float]] = {"plain": [], "fold": []}
    for turn in range(rounds + 1):
        for name, run in (("plain", plain), ("fold", folded)):
            gc.collect()
            model, seconds = run(batches)
            if turn:  # the first is the warm-up
                times[name].append(seconds / len(batches) * 1e6)
            params = list(model.parameters())
            assert all(p.isfinite().all() for p in params)
    ratios = [f / p for p, f in zip(times["plain"], times["fold"], strict=True)]
    for name, values in times.items():
        low, *_, high = sorted(values)
        print(f"{name:>6}: {statistics.median(values):7.1f} µs a micro-batch ({low:.1f} to {high:.1f})")
    ratio = statistics.median(times["fold"]) / statistics.median(times["plain"])
    print(
        f" ratio: {ratio:.3f} of the plain loop ({min(ratios):.3f} to {max(ratios):.3f} in {rounds} rounds); bar 1.05"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    main(parser.parse_args().rounds)

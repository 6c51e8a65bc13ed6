"""What a step costs: the fold with three monitors against the loop that a careful person would write by hand.

MLP 32-64-10, batch 32, AdamW fused, window 4, clip 1.0, warmup-cosine, the loss of every update kept; one thread. The
two run in turn in one process, fifty updates each; medians of the rounds, and the median of the rounds' ratios.
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
    chain,
    fold,
    init,
    monitors,
    schedules,
    supervised,
)

WINDOW, UPDATES = 4, 50
SCHEDULE = schedules.warmup_cosine(peak=1e-3, warmup=20, total=5_000)

Batches = list[tuple[Tensor, Tensor]]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


class Plain:
    """The hand-written loop."""

    def __init__(self) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
        self.losses: list[float] = []

    def run(self, batches: Batches) -> None:
        model, optimizer, losses = self.model, self.optimizer, self.losses
        params = list(model.parameters())
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


class Folded:
    """The fold with three monitors."""

    def __init__(self) -> None:
        self.model = make_model()
        self.step = chain(
            Forward(self.model, supervised(F.cross_entropy)),
            ScaledBackward(),
            Accumulate(every=WINDOW),
            ClipByGlobalNorm(1.0),
            MaybeStep(Optimizer(torch.optim.AdamW, lr=SCHEDULE, weight_decay=0.01)),
            EmitEvents(),
        )
        self.state = init(self.step, self.model)

    def run(self, batches: Batches) -> None:
        watch = [monitors.MeanLoss(), monitors.GradNorm(), monitors.LearningRate()]
        self.state = fold(self.step, self.state, batches, monitors=watch).state


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    batches = [(torch.randn(32, 32), torch.randint(0, 10, (32,))) for _ in range(UPDATES * WINDOW)]
    sides = {"plain": Plain(), "fold": Folded()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 3):
        gc.collect()
        for name in sorted(sides, reverse=bool(turn % 2)):  # who goes first takes turns
            start = time.perf_counter()
            sides[name].run(batches)
            if turn >= 3:  # the first are the warm-up
                times[name].append((time.perf_counter() - start) / len(batches) * 1e6)
    assert sides["fold"].state.progress.updates == UPDATES * (rounds + 3) == len(sides["plain"].losses)
    ratios = sorted(f / p for p, f in zip(times["plain"], times["fold"], strict=True))
    for name, values in times.items():
        low, *_, high = sorted(values)
        print(f"{name:>6}: {statistics.median(values):7.1f} µs a micro-batch ({low:.1f} to {high:.1f})")
    middle, quarter = statistics.median(ratios), len(ratios) // 4
    spread = f"middle half {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}, {rounds} rounds"
    print(f" ratio: {middle:.3f} of the plain loop ({spread}); bar 1.05")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=61)
    main(parser.parse_args().rounds)

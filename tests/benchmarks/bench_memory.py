"""Peak memory of a run, against the plain loop: a 50-million-parameter model on CPU, window 4, clip, AdamW.

Each side runs in a process of its own; the peak is the largest resident size that the system saw, less what the process
held before the model was made.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys

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
    supervised,
)

WIDTH, LAYERS, WINDOW, UPDATES, BATCH = 2500, 8, 4, 3, 8
SIDES = ("plain", "fold")
EXACT = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""Every large tensor in pages of its own, given back when it is freed: otherwise glibc keeps some, now and then."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def peak() -> float:
    """The largest resident size so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def plain(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for i, (x, y) in enumerate(batches):
        loss = F.mse_loss(model(x), y) / WINDOW
        loss.backward()
        if (i + 1) % WINDOW == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def folded(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    model = make_model()
    step = chain(
        Forward(model, supervised(F.mse_loss)),
        ScaledBackward(),
        Accumulate(every=WINDOW),
        ClipByGlobalNorm(1.0),
        MaybeStep(Optimizer(torch.optim.AdamW, lr=1e-3)),
        EmitEvents(),
    )
    fold(step, init(step, model), batches, monitors=[monitors.MeanLoss(), monitors.GradNorm(), monitors.Throughput()])


def measure(side: str) -> None:
    batches = [(torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)) for _ in range(WINDOW * UPDATES)]
    monitors.MeanLoss()  # both sides have the library loaded
    warm = nn.Linear(4, 4)
    warm(torch.randn(4, 4)).sum().backward()
    before = peak()
    (plain if side == "plain" else folded)(batches)
    print(peak() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", choices=SIDES)
    given = parser.parse_args()
    if given.side:
        measure(given.side)
        return
    peaks: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(given.rounds):
        for side in SIDES:
            command = [sys.executable, __file__, "--side", side]
            out = subprocess.run(command, check=True, capture_output=True, text=True, env=EXACT).stdout
            peaks[side].append(float(out))
    parameters = sum(p.numel() for p in make_model().parameters())
    print(f"{parameters / 1e6:.1f} million parameters, {parameters * 4 / 2**20:.0f} MiB each set")
    for side, values in peaks.items():
        print(f"{side:>6}: {statistics.median(values):8.1f} MiB at the peak ({', '.join(f'{v:.1f}' for v in values)})")
    ratio = statistics.median(peaks["fold"]) / statistics.median(peaks["plain"])
    print(f" ratio: {ratio:.4f} of the plain loop; bar 1.01")


if __name__ == "__main__":
    main()

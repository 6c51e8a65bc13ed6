"""Peak memory of a run, against the plain loop: 50-million-parameter models on CPU, AdamW.

First a fold in windows of 4 with a clip, against the loop that does the same. Then what saves memory, one update a
batch and no clip, on a model of residual blocks: at a batch of 8 activations are nothing, at 1024 they are more than
the parameters. bfloat16, which few CPUs multiply quickly, is measured at the small batch alone.

Each side runs in a process of its own; the peak is the largest resident size that the system saw, less what the process
held before the model was made. Times are CPU seconds of the quickest update but the first.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import attrs
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
    UpdateInBackward,
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


Batches = Iterable[tuple[Tensor, Tensor]]


@attrs.frozen
class Way:
    """A way to save memory, or none."""

    plain: bool = False
    window: int = 1
    recompute: bool = False
    in_backward: bool = False
    dtype: torch.dtype = torch.float32
    masters: bool = False

    def run(self, batches: Batches) -> None:
        model = make_blocks().to(self.dtype)
        if self.plain:
            plain(model, batches, window=1, max_norm=None)
            return
        rule = Optimizer(torch.optim.AdamW, lr=1e-3, masters=self.masters)
        forward = Forward(model, supervised(F.mse_loss), recompute="*" if self.recompute else ())
        usual = (ScaledBackward(), Accumulate(self.window), MaybeStep(rule))
        step = chain(forward, *([UpdateInBackward(rule)] if self.in_backward else usual), EmitEvents())
        fold(step, init(step, model), batches)


WAYS = {
    "plain loop": Way(plain=True),
    "fold": Way(),
    "window of 4": Way(window=4),
    "recompute": Way(recompute=True),
    "in backward": Way(in_backward=True),
    "in backward, recompute": Way(in_backward=True, recompute=True),
    "bfloat16": Way(dtype=torch.bfloat16),
    "bfloat16, masters": Way(dtype=torch.bfloat16, masters=True),
    "bfloat16, in backward": Way(dtype=torch.bfloat16, in_backward=True),
    "bfloat16, masters, in backward": Way(dtype=torch.bfloat16, masters=True, in_backward=True),
}
BATCHES = (8, 1024)
WIDE, BLOCKS = 800, 10


class Block(nn.Module):
    """A residual block as in a transformer, without its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(WIDE), nn.Linear(WIDE, 4 * WIDE), nn.GELU(), nn.Linear(4 * WIDE, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def make_blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def peak() -> float:
    """The largest resident size so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def plain(model: nn.Module, batches: Batches, window: int = WINDOW, max_norm: float | None = 1.0) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for i, (x, y) in enumerate(batches):
        loss = F.mse_loss(model(x), y) / window
        loss.backward()
        if (i + 1) % window == 0:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()


def folded(model: nn.Module, batches: Batches) -> None:
    step = chain(
        Forward(model, supervised(F.mse_loss)),
        ScaledBackward(),
        Accumulate(every=WINDOW),
        ClipByGlobalNorm(1.0),
        MaybeStep(Optimizer(torch.optim.AdamW, lr=1e-3)),
        EmitEvents(),
    )
    fold(step, init(step, model), batches, monitors=[monitors.MeanLoss(), monitors.GradNorm(), monitors.Throughput()])


def warm_up() -> None:
    """All sides have loaded what torch loads at first use, such as its compiler with the first optimizer."""
    monitors.MeanLoss()
    torch.optim.AdamW(nn.Linear(4, 4).parameters())
    nn.Linear(512, 512)(torch.randn(8, 512)).sum().backward()


def measure(side: str) -> None:
    batches = [(torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)) for _ in range(WINDOW * UPDATES)]
    warm_up()
    before = peak()
    (plain if side == "plain" else folded)(make_model(), batches)
    print(peak() - before)


def measure_way(way: Way, size: int) -> None:
    marks: list[float] = []

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        x, y = torch.randn(size, WIDE, dtype=way.dtype), torch.randn(size, WIDE, dtype=way.dtype)
        for _ in range(UPDATES):
            marks.append(time.process_time())
            yield from zip(x.split(size // way.window), y.split(size // way.window), strict=True)
        marks.append(time.process_time())

    warm_up()
    before = peak()
    way.run(batches())
    print(peak() - before, min(b - a for a, b in itertools.pairwise(marks[1:])))


def in_a_process(*arguments: str) -> list[float]:
    """The numbers that this script prints, given `arguments`, in a process of its own."""
    command = [sys.executable, __file__, *arguments]
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=EXACT).stdout
    return [float(number) for number in out.split()]


def size_of(make: Callable[[], nn.Module]) -> str:
    """How large a model is; made without memory, since the system counts a parent's peak to its children's."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in make().parameters())
    return f"{parameters / 1e6:.1f} million parameters, {parameters * 4 / 2**20:.0f} MiB"


def against_the_loop(rounds: int) -> None:
    peaks: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            peaks[side] += in_a_process("--side", side)
    print(f"{size_of(make_model)} each set")
    for side, values in peaks.items():
        print(f"{side:>6}: {statistics.median(values):8.1f} MiB at the peak ({', '.join(f'{v:.1f}' for v in values)})")
    ratio = statistics.median(peaks["fold"]) / statistics.median(peaks["plain"])
    print(f" ratio: {ratio:.4f} of the plain loop; bar 1.01")


def ways_to_save(rounds: int) -> None:
    """A table of the ways: peak and time of an update, and both as parts of the plain loop's."""
    print(f"{size_of(make_blocks)} each set in float32")
    print(f"{'':>30}  batch  peak MiB  ratio  seconds  ratio")
    for size in BATCHES:
        ways = [name for name, way in WAYS.items() if way.dtype is torch.float32 or size == BATCHES[0]]
        runs: dict[str, list[list[float]]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name in ways:
                runs[name].append(in_a_process("--way", name, "--batch", str(size)))
        found = {name: (statistics.median(p for p, _ in of), min(s for _, s in of)) for name, of in runs.items()}
        for name, (memory, seconds) in found.items():
            more, slower = memory / found["plain loop"][0], seconds / found["plain loop"][1]
            print(f"{name:>30}  {size:5}  {memory:8.1f}  {more:5.2f}  {seconds:7.2f}  {slower:5.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--way", choices=list(WAYS))
    parser.add_argument("--batch", type=int, default=BATCHES[0])
    given = parser.parse_args()
    if given.side:
        measure(given.side)
    elif given.way:
        measure_way(WAYS[given.way], given.batch)
    else:
        against_the_loop(given.rounds)
        ways_to_save(max(1, given.rounds // 5))  # the peaks of two processes differ by about 1 MiB


if __name__ == "__main__":
    main()

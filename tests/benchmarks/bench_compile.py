"""What compiling a step is worth: the compiled fold against the plain loop, and that with `torch.compile(model)`.

An MLP 32-64-10, a small transformer of 290 tensors, and a small GPT; AdamW fused, window 4, clip 1.0, warmup-cosine;
one thread. The three run in turn in one process; medians of the rounds, and the median of the rounds' ratios. Then how
long the first start takes, with an empty cache, and the second, each in a process of its own. CPU seconds count the
compiler's processes too, and not what else runs on the machine.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

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
    chain,
    compiled,
    fold,
    init,
    monitors,
    schedules,
    supervised,
)

WINDOW = 4
SCHEDULE = schedules.warmup_cosine(peak=1e-3, warmup=20, total=5_000)

Batch = tuple[Tensor, Tensor]


class Transformer(nn.Module):
    """24 layers of 12 tensors, and a head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 24, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


class Block(nn.Module):
    """Causal attention and an MLP, each on the normalised stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.before(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class GPT(nn.Module):
    """A small language model, of which every position is predicted."""

    def __init__(self, vocabulary: int = 256, width: int = 128, length: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.places.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(x))).flatten(0, 1)


@attrs.frozen
class Case:
    """A model, batches for it, and how many micro-batches make a round."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    micro_batches: int
    bar: str


CASES = {
    "mlp": Case(
        lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)),
        lambda: (torch.randn(32, 32), torch.randint(0, 10, (32,))),
        200,
        "2.5 of plain",
    ),
    "transformer": Case(
        Transformer,
        lambda: (torch.randn(8, 16, 32), torch.randint(0, 10, (8,))),
        8,
        "2.5 of plain, 1.5 of torch.compile(model)",
    ),
    "gpt": Case(
        GPT,
        lambda: (torch.randint(0, 256, (8, 64)), torch.randint(0, 256, (8 * 64,))),
        8,
        "1 of torch.compile(model)",
    ),
}


def made(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.model()


class Plain:
    """The hand-written loop."""

    def __init__(self, case: Case, *, is_compiled: bool) -> None:
        self.model = made(case)
        self.call: Any = torch.compile(self.model) if is_compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
        self.losses: list[float] = []

    def run(self, batches: list[Batch]) -> None:
        call, optimizer, losses = self.call, self.optimizer, self.losses
        params = list(self.model.parameters())
        total = torch.zeros(())
        for i, (x, y) in enumerate(batches):
            loss = F.cross_entropy(call(x), y) / WINDOW
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


class Compiled:
    """The compiled fold with three monitors."""

    def __init__(self, case: Case) -> None:
        model = made(case)
        self.step = compiled(
            chain(
                Forward(model, supervised(F.cross_entropy)),
                ScaledBackward(),
                Accumulate(every=WINDOW),
                ClipByGlobalNorm(1.0),
                MaybeStep(Optimizer(torch.optim.AdamW, lr=SCHEDULE, weight_decay=0.01)),
                EmitEvents(),
            )
        )
        self.state = init(self.step, model)

    def run(self, batches: list[Batch]) -> None:
        watch = [monitors.MeanLoss(), monitors.GradNorm(), monitors.LearningRate()]
        self.state = fold(self.step, self.state, batches, monitors=watch).state


def compare(name: str, rounds: int) -> None:
    case = CASES[name]
    batches = [case.batch() for _ in range(case.micro_batches)]
    sides = {
        "plain": Plain(case, is_compiled=False),
        "torch.compile(model)": Plain(case, is_compiled=True),
        "compiled(step)": Compiled(case),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds + 3):
        gc.collect()
        for side in sorted(sides, reverse=bool(turn % 2)):
            start = time.process_time()
            sides[side].run(batches)
            if turn >= 3:  # the first are the warm-up
                times[side].append((time.process_time() - start) / len(batches) * 1e6)
    print(f"{name}:")
    for side, values in times.items():
        print(f"  {side:>20}: {statistics.median(values):8.1f} µs a micro-batch")
    for side in ("plain", "torch.compile(model)"):
        ratios = sorted(a / b for a, b in zip(times[side], times["compiled(step)"], strict=True))
        quarter = len(ratios) // 4
        spread = f"middle half {ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}"
        print(f"  compiled(step) is {statistics.median(ratios):.2f} times as fast as {side} ({spread})")
    print(f"  bar: {case.bar}")


def start(name: str) -> None:
    """Two updates in this process, from nothing."""
    began = time.perf_counter()
    side = Compiled(CASES[name])
    side.run([CASES[name].batch() for _ in range(2 * WINDOW)])
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in used)
    graphs = ", ".join(f"{'+'.join(g.parts)} {g.traced:.1f} + {g.compiled:.1f} s" for g in side.step.graphs)
    print(f"{time.perf_counter() - began:.1f} s, {cpu:.1f} s of CPU ({graphs})")


def starts(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for which in ("first", "second"):
            command = [sys.executable, __file__, "--start", name]
            where = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
            said = subprocess.run(command, env=where, check=True, capture_output=True, text=True).stdout.strip()
            print(f"  {which} start: {said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--start", choices=CASES, help="measure a start of this one alone, with the cache as it is")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.start:
        start(given.start)
        return
    for name in given.models:
        compare(name, given.rounds)
        starts(name)


if __name__ == "__main__":
    main()

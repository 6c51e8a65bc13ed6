"""What it costs to look inside every window: a step with each of the measuring transforms against the same without.

A transformer of 9.5 million parameters (two micro-batches of 256 tokens, AdamW, clip), and an MLP of four small
tensors. One update each in turn; medians of the rounds' ratios, with the middle half.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    ClipByGlobalNorm,
    EmitEvents,
    Forward,
    MaybeStep,
    MeasureGradients,
    MeasureNoise,
    MeasureUpdates,
    Optimizer,
    ScaledBackward,
    chain,
    fold,
    init,
    supervised,
)
from pipeline.transform import Chain

WIDTH, TOKENS, WORDS = 256, 256, 64


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(tokens))).mean(1)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def step_of(model: nn.Module) -> Chain:
    return chain(
        Forward(model, supervised(F.cross_entropy)),
        ScaledBackward(),
        Accumulate(2),
        ClipByGlobalNorm(1.0),
        MaybeStep(Optimizer(torch.optim.AdamW, lr=1e-4)),
        EmitEvents(),
    )


def gradients(step: Chain) -> Chain:
    return step.insert_after("Accumulate", MeasureGradients())


def updates(step: Chain) -> Chain:
    return step.replace("MaybeStep", MeasureUpdates(step["MaybeStep"]))


def noise(step: Chain) -> Chain:
    return step.insert_before("Accumulate", MeasureNoise())


SIDES = {"without": chain, "MeasureGradients": gradients, "MeasureUpdates": updates, "MeasureNoise": noise}


def measured(make: Any, batches: list[tuple[Tensor, Tensor]], rounds: int) -> None:
    """Print each side's ratio."""
    started: dict[str, tuple[Chain, Any]] = {}
    for name, changed in SIDES.items():
        torch.manual_seed(0)
        model = make()
        step = changed(step_of(model))
        started[name] = step, init(step, model)
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    for turn in range(rounds + 2):
        for name, (step, state) in started.items():
            began = time.perf_counter()
            started[name] = step, fold(step, state, batches).state
            if turn >= 2:
                times[name].append(time.perf_counter() - began)
    without = times.pop("without")
    print(f"{'without':>18} {1e3 * statistics.median(without) / (len(batches) // 2):.2f} ms an update")
    for name, taken in times.items():
        ratios = sorted(a / b for a, b in zip(taken, without, strict=True))
        low, high = ratios[rounds // 4], ratios[-1 - rounds // 4]
        print(f"{name:>18} {statistics.median(ratios):.3f} (middle half {low:.3f} to {high:.3f})")


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    print("a transformer of 9.5 million parameters")
    tokens = [(torch.randint(0, WORDS, (1, TOKENS)), torch.randint(0, WORDS, (1,))) for _ in range(2)]
    measured(Transformer, tokens, rounds)
    print("an MLP of four small tensors")
    items = [(torch.randn(32, 32), torch.randint(0, 10, (32,))) for _ in range(100)]
    measured(small, items, rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    main(parser.parse_args().rounds)

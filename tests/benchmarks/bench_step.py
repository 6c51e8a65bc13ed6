"""What a step costs: the fold with three monitors against the loop that a careful person would write by hand.

An MLP 32-64-10, a tiny transformer of 290 tensors, and a small GPT; AdamW fused, window 4, clip 1.0, warmup-cosine, the
loss of every update kept; one thread. The two sides run in turn in one process; medians of the rounds, and the median
of the rounds' ratios. Processor time, which leaves out what else runs on the machine.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

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
    fold,
    init,
    monitors,
    schedules,
    supervised,
)

WINDOW, WARM_UP = 4, 3
SCHEDULE = schedules.warmup_cosine(peak=1e-3, warmup=20, total=5_000)

Batches = list[tuple[Tensor, Tensor]]


class Transformer(nn.Module):
    """24 layers of 12 tensors, and a head of two."""

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
class Recipe:
    """A model and batches for it; how many micro-batches make a round, how many rounds, and what the ratio may be."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    micro_batches: int
    rounds: int
    bar: float


RECIPES = {
    "MLP": Recipe(
        lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)),
        lambda: (torch.randn(32, 32), torch.randint(0, 10, (32,))),
        micro_batches=120,
        rounds=201,
        bar=1.00,
    ),
    "transformer of 290 tensors": Recipe(
        Transformer,
        lambda: (torch.randn(8, 16, 32), torch.randint(0, 10, (8,))),
        micro_batches=16,
        rounds=25,
        bar=1.02,
    ),
    "small GPT": Recipe(
        GPT,
        lambda: (torch.randint(0, 256, (8, 64)), torch.randint(0, 256, (8 * 64,))),
        micro_batches=8,
        rounds=41,
        bar=1.01,
    ),
}


def made(recipe: Recipe) -> nn.Module:
    torch.manual_seed(0)
    return recipe.model()


class Plain:
    """The hand-written loop."""

    def __init__(self, recipe: Recipe) -> None:
        self.model = made(recipe)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
        self.losses: list[float] = []

    @property
    def updates(self) -> int:
        return len(self.losses)

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

    def __init__(self, recipe: Recipe) -> None:
        model = made(recipe)
        self.step = chain(
            Forward(model, supervised(F.cross_entropy)),
            ScaledBackward(),
            Accumulate(every=WINDOW),
            ClipByGlobalNorm(1.0),
            MaybeStep(Optimizer(torch.optim.AdamW, lr=SCHEDULE, weight_decay=0.01)),
            EmitEvents(),
        )
        self.state = init(self.step, model)

    @property
    def updates(self) -> int:
        return self.state.progress.updates

    def run(self, batches: Batches) -> None:
        watch = [monitors.MeanLoss(), monitors.GradNorm(), monitors.LearningRate()]
        self.state = fold(self.step, self.state, batches, monitors=watch).state


def compare(name: str, rounds: int | None) -> None:
    recipe = RECIPES[name]
    rounds = rounds or recipe.rounds
    batches = [recipe.batch() for _ in range(recipe.micro_batches)]
    sides = {"plain": Plain(recipe), "fold": Folded(recipe)}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds + WARM_UP):
        gc.collect()
        for side in sorted(sides, reverse=bool(turn % 2)):  # who goes first takes turns
            start = time.process_time()
            sides[side].run(batches)
            if turn >= WARM_UP:
                times[side].append((time.process_time() - start) / len(batches) * 1e6)
    expected = recipe.micro_batches // WINDOW * (rounds + WARM_UP)
    assert [side.updates for side in sides.values()] == [expected, expected]
    print(f"{name}:")
    for side, values in times.items():
        print(f"  {side:>5}: {statistics.median(values):8.1f} µs a micro-batch ({_middle_half(values, '.1f')})")
    ratios = [f / p for p, f in zip(times["plain"], times["fold"], strict=True)]
    spread = f"{_middle_half(ratios, '.3f')}, {rounds} rounds"
    print(f"  ratio: {statistics.median(ratios):8.3f} ({spread}); bar {recipe.bar:.2f}")


def _middle_half(values: list[float], how: str) -> str:
    ordered, quarter = sorted(values), len(values) // 4
    return f"middle half {ordered[quarter]:{how}} to {ordered[-1 - quarter]:{how}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, help="in place of as many as each recipe needs")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.recipes:
        compare(name, given.rounds)


if __name__ == "__main__":
    main()

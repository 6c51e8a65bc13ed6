"""What several benchmarks measure: three models with batches for them, the loop by hand, and the step in its place."""

from __future__ import annotations

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
    schedules,
    supervised,
)
from pipeline.transform import Chain

WINDOW = 4
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
class Job:
    """A model, and batches for it."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]

    def started(self) -> nn.Module:
        """The model, each time with the same weights."""
        torch.manual_seed(0)
        return self.model()


MLP = Job(
    lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)),
    lambda: (torch.randn(32, 32), torch.randint(0, 10, (32,))),
)
TRANSFORMER = Job(Transformer, lambda: (torch.randn(8, 16, 32), torch.randint(0, 10, (8,))))
SMALL_GPT = Job(GPT, lambda: (torch.randint(0, 256, (8, 64)), torch.randint(0, 256, (8 * 64,))))


class Plain:
    """The hand-written loop."""

    def __init__(
        self, model: nn.Module, schedule: Callable[[int], float] = SCHEDULE, *, is_compiled: bool = False
    ) -> None:
        self.model, self.schedule = model, schedule
        self.call: Any = torch.compile(model) if is_compiled else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
        self.losses: list[float] = []

    @property
    def updates(self) -> int:
        return len(self.losses)

    def run(self, batches: Batches) -> None:
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
                    group["lr"] = self.schedule(len(losses))
                optimizer.step()
                optimizer.zero_grad()
                losses.append(total.item())
                total = torch.zeros(())


def step_of(model: nn.Module, lr: Any = SCHEDULE) -> Chain:
    """The same as a chain."""
    return chain(
        Forward(model, supervised(F.cross_entropy)),
        ScaledBackward(),
        Accumulate(every=WINDOW),
        ClipByGlobalNorm(1.0),
        MaybeStep(Optimizer(torch.optim.AdamW, lr=lr, weight_decay=0.01)),
        EmitEvents(),
    )

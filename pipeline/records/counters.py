"""The numbers that a run counts by: its progress, its randomness, its loss scale."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import attrs
from torch.utils import _pytree as pytree

from pipeline._checks import positive, share, whole
from pipeline._splitmix import splitmix64
from pipeline.errors import SettingError
from pipeline.records._quick import Record, positional
from pipeline.records._trees import register

__all__ = ["LossScale", "Progress", "Rng"]


@lru_cache
def _base(seed: int, rank: int, purpose: int) -> int:
    return splitmix64(splitmix64(seed * 4 + purpose) + rank)


@attrs.frozen
class Progress(Record):
    """How far a run is. All counts are whole numbers from the start of training, on this rank.

    `micro_steps` micro-batches processed; `updates` applied; `skipped` windows that ended without an update;
    `epoch` finished passes over the stream; `samples` and `tokens` seen; `skips_in_row` windows skipped since the last
    update.
    """

    micro_steps: int = 0
    updates: int = 0
    skipped: int = 0
    epoch: int = 0
    samples: int = 0
    tokens: int = 0
    skips_in_row: int = 0

    @property
    def windows(self) -> int:
        """Windows that ended, with an update or without."""
        return self.updates + self.skipped


@attrs.frozen
class Rng:
    """The source of all randomness in a step: what micro-step n draws depends on (seed, n, rank) alone."""

    seed: int = 0
    rank: int = 0

    def key(self, n: int, purpose: int = 0) -> int:
        """A 64-bit seed for the generators in micro-step `n`; `purpose` tells other draws at the same n apart."""
        return splitmix64(_base(self.seed, self.rank, purpose) + n)


@attrs.frozen
class LossScale:
    """The factor on the loss that keeps small float16 gradients from rounding to zero, and the rule that moves it.

    After `interval` finite windows in a row the scale grows by `growth`; after a non-finite one it is multiplied by
    `backoff`. It stays within `floor` and `ceiling`. `finite_windows` counts towards the next growth.

    Source: Micikevicius et al. 2018, arXiv:1710.03740; the constants and the rule of `torch.amp.GradScaler`.
    """

    scale: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = 2.0**-14
    ceiling: float = 2.0**24
    finite_windows: int = 0

    def __attrs_post_init__(self) -> None:
        for name in ("scale", "growth", "floor", "ceiling"):
            positive(f"LossScale.{name}", getattr(self, name))
        if not self.floor <= self.scale <= self.ceiling:
            raise SettingError("LossScale.scale", f"within floor {self.floor} and ceiling {self.ceiling}", self.scale)
        if not self.growth > 1:
            raise SettingError("LossScale.growth", "above 1", self.growth)
        share("LossScale.backoff", self.backoff)
        whole("LossScale.interval", self.interval)

    def after(self, finite: bool) -> LossScale:
        """The scale for the window after one whose gradients were `finite` or not."""
        if not finite:
            return attrs.evolve(self, scale=max(_float32(self.scale * self.backoff), self.floor), finite_windows=0)
        if self.finite_windows + 1 < self.interval:
            return attrs.evolve(self, finite_windows=self.finite_windows + 1)
        return attrs.evolve(self, scale=min(_float32(self.scale * self.growth), self.ceiling), finite_windows=0)


def _float32(value: float) -> float:
    """Rounded as a float32 tensor would hold it."""
    return ctypes.c_float(value).value


new_progress = positional(Progress)

register(Progress)
register(LossScale)
pytree.register_pytree_node(Rng, lambda r: ([], (r.seed, r.rank)), lambda _, context: Rng(*context))

"""Torch's default generators: seeded by counter inside a run, put back as they were after it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pipeline.records import TrainState

__all__ = ["default_generators", "isolated", "read", "seed", "write"]

Generators = Sequence[torch.Generator]


def default_generators(state: TrainState) -> Generators:
    """The generators that a step of this state may draw from: the host's, and that of each device in use."""
    cards = sorted({p.device.index or 0 for p in state.params.flat if p.device.type == "cuda"})
    return [torch.default_generator, *(torch.cuda.default_generators[card] for card in cards)]


def seed(generators: Generators, key: int) -> None:
    """Start each generator from `key`."""
    for generator in generators:
        generator.manual_seed(key)


def read(generators: Generators) -> list[Tensor]:
    """Where each generator stands."""
    return [generator.get_state() for generator in generators]


def write(generators: Generators, states: Sequence[Tensor]) -> None:
    """Put each generator where it stood."""
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


@contextmanager
def isolated(generators: Generators) -> Generator[None]:
    """Whatever is drawn inside, the generators are afterwards as they were."""
    before = read(generators)
    try:
        yield
    finally:
        write(generators, before)

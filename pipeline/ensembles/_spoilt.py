"""Which micro-batch has spoilt the window of which member: found on the device, looked at once the window is closed."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from pipeline.ensembles._members import SPOILT
from pipeline.records import TrainState

__all__ = ["with_spoilt"]


def with_spoilt(state: TrainState, spoilt: Tensor, micro_batch: int) -> TrainState:
    """The state that knows of the members whose window this micro-batch has spoilt, if none before it has."""
    first = state.slots[SPOILT]
    now = torch.zeros_like(first) + micro_batch
    first = torch.where(first >= now, -1, first)  # what is told of a window before this one
    slots = {**state.slots, SPOILT: torch.where(spoilt & (first < 0), now, first)}
    return attrs.evolve(state, slots=slots)

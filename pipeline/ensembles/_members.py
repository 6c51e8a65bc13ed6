"""The members of an ensemble: what each is given of its own, and where it stands in the state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipeline.optim import Rate
from pipeline.records import Part, Progress, TrainState

__all__ = [
    "LOSS",
    "SCALES",
    "SPOILT",
    "Member",
    "is_member",
    "kept",
    "members_of",
    "name_of_member",
    "parts_of",
    "precise",
    "row",
]

LOSS = "member loss"
"""The measure that carries each member's own loss: `loss` is what is differentiated, the sum of all."""

SCALES = "member scales"
"""The slot with the loss scales of all members as one tensor; absent where there are none."""

SPOILT = "members spoilt"
"""The slot that tells which micro-batch of the open window has spoilt it for each member, from 0; -1 for none."""

_PREFIX = "member "


@attrs.frozen
class Member:
    """What one member has of its own; None is what the step and the model have.

    `seed` counts from that of the state, and is what the member begins and draws by; `loss_weight` is a factor on its
    loss.
    """

    seed: int | None = None
    rate: Rate | None = None
    weight_decay: Rate | None = None
    loss_weight: float = 1.0


def name_of_member(number: int) -> str:
    """What events and slots call a member."""
    return f"{_PREFIX}{number}"


def members_of(state: TrainState) -> list[int]:
    """The numbers of the members in the state, in the order of their rows."""
    return [int(name.removeprefix(_PREFIX)) for name in state.slots if is_member(name)]


def parts_of(state: TrainState) -> list[Part]:
    """What each member in the state has of its own, in the order of their rows."""
    return [part for name, part in state.slots.items() if is_member(name)]


def is_member(slot: str) -> bool:
    """Whether this is the name of a member, as events and slots have it."""
    return slot.startswith(_PREFIX) and slot.removeprefix(_PREFIX).isdecimal()


def precise(like: Tensor) -> torch.dtype:
    """The dtype in which numbers of members are computed: float64, on devices that have it."""
    return torch.float64 if like.device.type in ("cpu", "cuda") else torch.float32


def row(state: TrainState, place: int, spoilt_by: int | None = None) -> TrainState:
    """The state of the member in this row, but for its seed; its tensors are views.

    `spoilt_by` is the micro-batch that has spoilt its window.
    """
    part, whole = parts_of(state)[place], state.progress
    progress = Progress(
        whole.micro_steps, part.updates, part.skipped, whole.epoch, whole.samples, whole.tokens, part.skips_in_row
    )
    picked = _each(attrs.evolve(state, slots={}), lambda tensor: tensor[place])
    measures = dict(picked.window.measures)
    total, _ = measures.pop(LOSS, (0.0, 0.0))
    loss = total if picked.window.reference is None else total / picked.window.reference
    probes = tuple(math.nan if i == spoilt_by else 0.0 for i in range(picked.window.micro_batches))
    window = attrs.evolve(picked.window, measures=measures, loss=loss, probes=probes)
    return attrs.evolve(picked, window=window, loss_scale=part.loss_scale, progress=progress)


def kept(state: TrainState, places: Sequence[int]) -> TrainState:
    """The state of the members in these rows, in memory of its own."""
    numbers = members_of(state)
    gone = {name_of_member(number) for place, number in enumerate(numbers) if place not in places}
    slots = {name: slot for name, slot in state.slots.items() if name not in gone}
    return _each(attrs.evolve(state, slots=slots), lambda tensor: tensor[list(places)])


def _each(state: TrainState, pick: Callable[[Tensor], Tensor]) -> TrainState:
    """The state with `pick` of every tensor that has a row for each member; trained as before."""

    def picked(tensor: Tensor) -> Any:
        return pick(tensor.detach()).requires_grad_(tensor.requires_grad) if tensor.ndim else tensor

    return pytree.tree_map_only(Tensor, picked, state)

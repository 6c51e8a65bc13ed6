"""Averages of the weights: exponential (EMA) and equal (SWA)."""

from __future__ import annotations

import attrs
import torch

from pipeline._checks import is_number, whole
from pipeline.errors import MissingFieldError, SettingError
from pipeline.records import Frame, TrainState
from pipeline.tensors import Tensors, clone_leaf

__all__ = ["AverageWeights", "averaged"]


@attrs.frozen
class AverageWeights:
    """Keep an average of the parameters beside them.

    Reads:    `applied`, `params`; the average and its count, from its slots.
    Writes:   its slots: `slot`, a `Tensors` in float32 or wider, and `slot` + " count", the updates taken in.
    Edges:    begins as the parameters are at `init`; nothing where no update was made. BatchNorm statistics are not
              averaged: those of the training go with the averaged weights.
    Args:     decay: average = decay × average + (1 − decay) × parameters, with 0 <= decay < 1; None: the equal
              average of the parameters after each update that counts, without those at `init`. start: updates before
              the first that counts; every: which of them from there on; slot: its name.
    Raises:   SettingError, when built, for anything else.
    Source:   Polyak, Juditsky 1992 (exponential as in Kingma, Ba 2015, section 7.2); Izmailov et al. 2018,
              arXiv:1803.05407 (equal, "SWA").
    """

    decay: float | None = 0.999
    start: int = 0
    every: int = 1
    slot: str = "average"

    reads = frozenset({"applied", "params", "slots"})
    writes = frozenset({"slots"})

    def __attrs_post_init__(self) -> None:
        if self.decay is not None and not (is_number(self.decay) and 0 <= self.decay < 1):
            raise SettingError("AverageWeights.decay", "at least 0 and below 1, or None", self.decay)
        whole("AverageWeights.start", self.start, 0)
        whole("AverageWeights.every", self.every)

    @property
    def _count(self) -> str:
        return f"{self.slot} count"

    def init(self, state: TrainState) -> TrainState:
        """The parameters as they are, with nothing taken in."""
        begun = state.params.map(lambda p: clone_leaf(p.to(torch.promote_types(p.dtype, torch.float32))))
        return attrs.evolve(state, slots={**state.slots, self.slot: begun, self._count: 0})

    def __call__(self, frame: Frame) -> Frame:
        state = frame.state
        updates = state.progress.updates - self.start
        if not frame.applied or updates < 1 or updates % self.every:
            return frame
        if self.slot not in state.slots:
            cure = "make the state with `init(step, model)`"
            raise MissingFieldError("AverageWeights", f"state.slots[{self.slot!r}]", cure)
        count: int = state.slots[self._count] + 1
        share = 1.0 / count if self.decay is None else 1.0 - self.decay
        average: Tensors = state.slots[self.slot].writable(state.progress.updates)
        with torch.no_grad():
            for mean, param in zip(average.flat, state.params.flat, strict=True):
                mean.lerp_(param.to(mean.dtype), share)
        slots = {**state.slots, self.slot: average, self._count: count}
        return frame.having(state=attrs.evolve(state, slots=slots))


def averaged(state: TrainState, slot: str = "average") -> TrainState:
    """The state with the averaged weights in place of its parameters, in their dtypes: to evaluate, or to load.

    `averaged(run.state).load_into(model)` puts them into a model. The state itself is left as it is.

    Raises: MissingFieldError where the state has no such average.
    """
    average = state.slots.get(slot)
    if not isinstance(average, Tensors):
        raise MissingFieldError("averaged", f"state.slots[{slot!r}]", "put AverageWeights into the step, then `init`")
    dtypes = [p.dtype for p in state.params.flat]
    cast = [mean if mean.dtype == dtype else mean.to(dtype) for mean, dtype in zip(average.flat, dtypes, strict=True)]
    return attrs.evolve(state.borrowed(), params=Tensors(zip(average, cast, strict=True)))

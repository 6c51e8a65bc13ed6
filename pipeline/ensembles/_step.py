"""The update of each member whose gradients are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import Tensor

from pipeline.ensembles._clip import sum_norms
from pipeline.ensembles._members import SCALES, members_of, name_of_member, parts_of, row
from pipeline.ensembles._optimizers import MemberOptimizers, Step
from pipeline.ensembles._telling import Readings, of_micro_batch, of_skipped, of_updated, read
from pipeline.errors import SettingError
from pipeline.records import Frame, OptimizerState, Part, Progress, TrainState, Window
from pipeline.tensors import Tensors
from pipeline.transforms import EmitEvents, MaybeStep
from pipeline.transforms._clipping import has_something
from pipeline.transforms._norm import normalised

__all__ = ["StepMembers"]


@attrs.frozen(repr=False)
class StepMembers:
    """`MaybeStep` and `EmitEvents` over members: each is updated, or skipped, by its own gradients.

    Reads:    as MaybeStep, and `slots`.
    Writes:   `params`, `optimizer`, an empty `window`; `slots`, each member's counts and loss scale; `progress`, where
              a window counts as an update if any member made one; `applied`; `events`, each member's under its name as
              their `part`.
    Measures: as MaybeStep, for each member.
    Edges:    a member that is skipped keeps its parameters, its optimizer state, its buffers from before the window,
              and its place in the schedule. The host reads one tensor a window: which gradients are finite, and what
              events tell.
    Args:     optimizers: each member's; emit: what says how much is told; None: nothing.
    """

    optimizers: MemberOptimizers
    emit: EmitEvents | None

    name = "MaybeStep"
    reads = MaybeStep.reads | {"slots"}
    writes = MaybeStep.writes | {"slots", "events"}
    uses_up = MaybeStep.uses_up

    def init(self, state: TrainState) -> TrainState:
        """Let each member's optimizer check its settings.

        Raises: SettingError for parameters that are not real numbers, and what an optimizer raises.
        """
        for name, param in state.params.items():
            if param.requires_grad and not param.is_floating_point():
                raise SettingError(f"ensemble(step)'s parameter {name!r}", "of real numbers", param.dtype)
        return self.optimizers.init(state)

    def __call__(self, frame: Frame) -> Frame:
        told = of_micro_batch(frame) if self.emit is not None and self.emit.micro_batches else []
        if not frame.ready:
            return frame.having(events=(*frame.events, *told)) if told else frame
        frame = _with_norms(frame)
        state, numbers, parts = frame.state, members_of(frame.state), parts_of(frame.state)
        readings = _read(frame, len(parts), told=self.emit is not None)
        updated = [0 <= norm < math.inf for norm in readings.norms]
        places = [i for i, is_updated in enumerate(updated) if is_updated]
        progress, counts = _counted(state.progress, bool(places)), [part.updates for part in parts]
        rates = self.optimizers.rates(numbers, counts, state.rate_factor)
        slots = dict(state.slots)
        for i, (number, part) in enumerate(zip(numbers, parts, strict=True)):
            name = name_of_member(number)
            if updated[i]:
                slots[name] = _updated(part)
                told += [] if self.emit is None else of_updated(frame, progress, readings, i, name, rates[i], part)
            else:
                own = self._skipped(frame, i, number, readings.spoilt_by(i))
                slots[name] = _of(own)
                told += [] if self.emit is None else of_skipped(self.emit, own, progress, name)
        if SCALES in slots:
            slots[SCALES] = _scales(slots.values(), slots[SCALES])
        params, buffers, optimizer = self._moved(frame, Step(places, numbers, rates, counts))
        return frame.having(
            state=TrainState(params, buffers, optimizer, Window(), None, progress, state.rng, slots, state.rate_factor),
            ready=False,
            applied=bool(places),
            closed=attrs.evolve(state.window, grads=Tensors(), buffers=None),
            sum_norm=None,
            events=(*frame.events, *told),
        )

    def _moved(self, frame: Frame, step: Step) -> tuple[Tensors, Tensors, OptimizerState]:
        """Parameters, buffers and optimizer state after the step; the rows that do not make it are as before."""
        state, update = frame.state, frame.began.updates
        params, buffers, optimizer = state.params, state.buffers, state.optimizer
        if step.places:
            params, optimizer = self.optimizers.update(
                params, state.window.grads, optimizer, step, frame.update_factor, update
            )
        skipped = sorted({*range(len(step.numbers))} - {*step.places})
        if skipped and state.window.buffers is not None:
            buffers = buffers.writable(update)
            with torch.no_grad():
                for now, then in zip(buffers.flat, state.window.buffers.flat, strict=True):
                    now[skipped] = then[skipped]
        if params.is_owned:  # the sums are let go of
            for param in params.flat:
                param.grad = None
        return params, buffers, optimizer

    def _skipped(self, frame: Frame, place: int, number: int, spoilt_by: int | None) -> Frame:
        """What MaybeStep makes of the window of a member that it skips: counts, loss scale, and why."""

        def own(value: Any) -> Any:
            return value[place] if isinstance(value, Tensor) and value.ndim else value

        alone, known = row(frame.state, place, spoilt_by), frame.sum_norm
        return MaybeStep(self.optimizers.each[number])(
            frame.having(
                state=alone,
                update_factor=own(frame.update_factor),
                facts={name: own(value) for name, value in frame.facts.items()},
                sum_norm=None if known is None else (alone.window.grads, own(known[1])),
            )
        )

    def __repr__(self) -> str:
        told = "" if self.emit is None else f", {self.emit!r}"
        return f"MaybeStep(optimizer={self.optimizers.each[0]!r} …){told}"


def _with_norms(frame: Frame) -> Frame:
    """The frame with the norms of each member's gradients, if nothing before has measured them."""
    if "grad_norm" in frame.facts or not has_something(frame):
        return frame
    raw = sum_norms(frame)
    norms = normalised(raw, frame.update_factor)
    return frame.having(sum_norm=(frame.state.window.grads, raw), facts={**frame.facts, "grad_norm": norms})


def _read(frame: Frame, count: int, *, told: bool) -> Readings:
    """What was measured, with a norm below 0 where no update is wanted."""
    if not has_something(frame):
        return Readings([-1.0] * count)
    norms = normalised(sum_norms(frame), frame.update_factor)
    if frame.skip is not None:
        norms = torch.where(frame.skip & norms.isfinite(), -1.0, norms)
    return read(frame, norms, told=told)


def _counted(p: Progress, applied: bool) -> Progress:
    """The run's counts: a window in which any member was updated is an update."""
    if applied:
        return attrs.evolve(p, updates=p.updates + 1, skips_in_row=0)
    return attrs.evolve(p, skipped=p.skipped + 1, skips_in_row=p.skips_in_row + 1)


def _updated(part: Part) -> Part:
    """What an updated member has of its own."""
    scale = None if part.loss_scale is None else part.loss_scale.after(True)
    return attrs.evolve(part, loss_scale=scale, updates=part.updates + 1, skips_in_row=0)


def _of(frame: Frame) -> Part:
    """What a skipped member has of its own."""
    p = frame.state.progress
    return Part(loss_scale=frame.state.loss_scale, updates=p.updates, skipped=p.skipped, skips_in_row=p.skips_in_row)


def _scales(slots: Iterable[Any], like: Tensor) -> Tensor:
    """The loss scales of all members as one tensor."""
    scales = [slot.loss_scale.scale for slot in slots if isinstance(slot, Part) and slot.loss_scale is not None]
    return torch.tensor(scales, dtype=like.dtype, device=like.device)

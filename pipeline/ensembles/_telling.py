"""What there is to tell of each member: events under its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from pipeline.ensembles._members import LOSS, SPOILT, members_of, name_of_member, precise
from pipeline.events import Event, LossScaleChanged, MicroBatchDone, UpdateDone
from pipeline.records import Frame, Part, Progress, Scalar
from pipeline.transforms import EmitEvents

__all__ = ["Readings", "of_micro_batch", "of_skipped", "of_updated", "read"]


@attrs.frozen
class Readings:
    """What was measured of each member in a window, read to the host at once.

    `norms` are those of the gradients that the optimizer would see; the rest is what events tell: `spoilt` is the
    micro-batch that spoilt the window, or -1.
    """

    norms: Sequence[float]
    spoilt: Sequence[float] = ()
    loss: Sequence[float] = ()
    weight: Sequence[float] = ()
    facts: Mapping[str, Sequence[float]] = attrs.field(factory=dict[str, Sequence[float]])
    measures: Mapping[str, tuple[Sequence[float], Sequence[float]]] = attrs.field(
        factory=dict[str, tuple[Sequence[float], Sequence[float]]]
    )

    def spoilt_by(self, place: int) -> int | None:
        """The micro-batch that spoilt the window of the member in this row, if that was read and there is one."""
        found = int(self.spoilt[place]) if self.spoilt else -1
        return found if found >= 0 else None


def read(frame: Frame, norms: Tensor, *, told: bool) -> Readings:
    """One transfer of what was measured in the window of the frame, or of the `norms` alone."""
    if not told:
        return Readings(norms.tolist())
    window = frame.state.window
    pairs = {name: pair for name, pair in window.measures.items() if name != LOSS}
    total, weight = window.measures[LOSS]
    values = [
        norms,
        frame.state.slots[SPOILT],
        total / weight,
        window.weight,
        *frame.facts.values(),
        *(x for pair in pairs.values() for x in pair),
    ]
    numbers = iter(_to_host(values, norms))
    return Readings(
        next(numbers),
        next(numbers),
        next(numbers),
        next(numbers),
        {name: next(numbers) for name in frame.facts},
        {name: (next(numbers), next(numbers)) for name in pairs},
    )


def _to_host(values: Sequence[Scalar], like: Tensor) -> list[Sequence[float]]:
    """Each of the values for each member; those that lie on a device in one transfer."""
    count, dtype = len(like), precise(like)
    rows = [value.detach().to(dtype).expand(count) for value in values if isinstance(value, Tensor)]
    numbers = iter(torch.stack(rows).tolist())
    return [next(numbers) if isinstance(value, Tensor) else [value] * count for value in values]


def of_micro_batch(frame: Frame) -> list[Event]:
    """That each member went through the micro-batch."""
    if LOSS not in frame.measures:
        return []
    total, weight = frame.measures[LOSS]
    losses: Any = total / weight
    at = {**_at(frame, frame.state.progress), "update": frame.began.updates}  # before the update that it may lead to
    return [
        MicroBatchDone(**at, loss=loss, weight=frame.weight, samples=frame.samples, part=name_of_member(number))
        for number, loss in zip(members_of(frame.state), losses.unbind(), strict=True)
    ]


def of_updated(
    frame: Frame,
    progress: Progress,
    readings: Readings,
    place: int,
    part: str,
    rates: Mapping[str, float],
    before: Part,
) -> list[Event]:
    """That the member in this row was updated, at these counts of the run."""
    at, facts = _at(frame, progress), {name: values[place] for name, values in readings.facts.items()}
    scale = before.loss_scale
    done = UpdateDone(
        **at,
        loss=readings.loss[place],
        weight=readings.weight[place],
        micro_batches=frame.state.window.micro_batches,
        rates=rates,
        grad_norm=facts.pop("grad_norm"),
        clip_factor=facts.pop("clip_factor", 1.0),
        samples=progress.samples,
        tokens=progress.tokens,
        measures={name: (total[place], weight[place]) for name, (total, weight) in readings.measures.items()},
        facts=facts,
        loss_scale=None if scale is None else scale.scale,
        waited=frame.waited,
        part=part,
    )
    if scale is None or scale.after(True).scale == scale.scale:
        return [done]
    return [done, LossScaleChanged(**at, before=scale.scale, after=scale.after(True).scale, part=part)]


def of_skipped(emit: EmitEvents, frame: Frame, progress: Progress, part: str) -> list[Event]:
    """That a member was skipped, by the frame that MaybeStep made of its own, at these counts of the run."""
    own = frame.state.progress
    counts = attrs.evolve(progress, skipped=own.skipped, skips_in_row=own.skips_in_row)
    state = attrs.evolve(frame.state, progress=counts)
    told = emit(frame.having(state=state, loss=None, events=())).events
    return [attrs.evolve(event, part=part) for event in told]


def _at(frame: Frame, progress: Progress) -> dict[str, Any]:
    return {
        "micro_step": progress.micro_steps,
        "update": progress.updates,
        "epoch": progress.epoch,
        "time": frame.time,
    }

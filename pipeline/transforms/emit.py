"""`EmitEvents`: what happened in this pass, as events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor

from pipeline.events import Event, LossScaleChanged, MicroBatchDone, UpdateDone, UpdateSkipped
from pipeline.records import Frame, Scalar, Window

__all__ = ["EmitEvents"]

_TYPED = frozenset({"grad_norm", "clip_factor"})


def _mean_loss(window: Window) -> Scalar:
    weight = window.relative_weight
    if isinstance(weight, (int, float)):
        return window.loss if weight == 1.0 else float("nan") if weight == 0 else window.loss / weight
    return window.loss / weight


def _bare(value: Scalar) -> Scalar:
    return value.detach() if isinstance(value, Tensor) else value


@attrs.frozen
class EmitEvents:
    """Say what happened: an `UpdateDone` or `UpdateSkipped` for each window that ended, then `LossScaleChanged`.

    Reads:    `applied`, `closed`, `rates`, `facts`, `progress`.
    Writes:   `events`. Measured values in them are 0-d tensors without a graph, still on their device.
    Edges:    a window's loss is its weighted mean, whatever the loss scale or the window's size; NaN for no weight.
    Args:     micro_batches: also a `MicroBatchDone` for each micro-batch.
    """

    micro_batches: bool = False

    reads = frozenset({"applied", "closed"})
    writes = frozenset({"events"})

    def __call__(self, frame: Frame) -> Frame:
        if frame.applied is None and not self.micro_batches:
            return frame
        progress = frame.state.progress
        at: Mapping[str, Any] = {
            "micro_step": progress.micro_steps,
            "update": progress.updates,
            "epoch": progress.epoch,
            "time": frame.time,
        }
        events: list[Event] = [*frame.events]
        if self.micro_batches and frame.loss is not None:
            loss = frame.loss.detach()
            # It comes before the update that it may have led to.
            before: Mapping[str, Any] = {**at, "update": frame.began.updates}
            events.append(MicroBatchDone(**before, loss=loss, weight=frame.weight, samples=frame.samples))
        if frame.applied is not None and frame.closed is not None:
            events.append(_of_window(frame, frame.closed, at))
            scale = frame.state.loss_scale
            if scale is not None and frame.scaled_by is not None and scale.scale != frame.scaled_by:
                events.append(LossScaleChanged(**at, before=frame.scaled_by, after=scale.scale))
        return frame.having(events=tuple(events))


def _of_window(frame: Frame, window: Window, at: Mapping[str, Any]) -> Event:
    facts, progress = frame.facts, frame.state.progress
    loss = _mean_loss(window)
    if frame.skipped is not None:
        return UpdateSkipped(
            **at,
            reason=frame.skipped.reason,
            micro_batch=frame.skipped.micro_batch,
            parameter=frame.skipped.parameter,
            skipped=progress.skipped,
            in_row=progress.skips_in_row,
            loss=loss,
            grad_norm=facts["grad_norm"],
            micro_batches=window.micro_batches,
            loss_scale=frame.scaled_by,
        )
    more = {name: _bare(value) for name, value in facts.items() if name not in _TYPED}
    return UpdateDone(
        **at,
        loss=loss,
        weight=window.weight,
        micro_batches=window.micro_batches,
        rates=frame.rates,
        grad_norm=facts["grad_norm"],
        clip_factor=facts.get("clip_factor", 1.0),
        samples=progress.samples,
        tokens=progress.tokens,
        measures=window.measures,
        facts=more,
        loss_scale=frame.scaled_by,
        waited=frame.waited,
    )

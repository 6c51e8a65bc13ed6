"""What happens in a run, as immutable records. This module knows no torch: events travel.

Counts are those after what the event tells of: `micro_step` micro-batches processed, `update` updates applied,
`epoch` epochs finished. `time` is the clock's reading in seconds when the pass began. Measured values are floats
once published; inside a step, and from `scan`, they may be 0-d tensors without a graph, which `float()` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat

import attrs

__all__ = [
    "BatchSkipped",
    "CheckpointSaved",
    "Diagnosis",
    "EpochEnded",
    "EpochStarted",
    "EvalDone",
    "Event",
    "LossScaleChanged",
    "MemoryMeasured",
    "MicroBatchDone",
    "Rewound",
    "RunEnded",
    "RunStarted",
    "UpdateDone",
    "UpdateSkipped",
]

_NOTHING: Mapping[str, Any] = {}


@attrs.frozen(kw_only=True, slots=False)
class Event:
    """What every event carries: where in the run, and when."""

    micro_step: int
    update: int
    epoch: int
    time: float


@attrs.frozen(kw_only=True, slots=False)
class RunStarted(Event):
    """Before the first batch. `until` says when the run will end; `total_updates` at which update, if known."""

    until: str
    total_updates: int | None = None


@attrs.frozen(kw_only=True, slots=False)
class EpochStarted(Event):
    """Before a pass over the stream."""


@attrs.frozen(kw_only=True, slots=False)
class BatchSkipped(Event):
    """The stream gave None in place of a batch: it takes no place in the window."""


@attrs.frozen(kw_only=True, slots=False)
class MicroBatchDone(Event):
    """One micro-batch went through. `loss` is its mean over `weight` items, never scaled or divided."""

    loss: SupportsFloat
    weight: SupportsFloat
    samples: int
    part: str | None = None


@attrs.frozen(kw_only=True, slots=False)
class UpdateDone(Event):
    """The parameters changed, from the `micro_batches` of one window.

    `loss` is the window's mean over its `weight` items;
    `rates` are the learning rates used, by group; `grad_norm` is the global norm of the mean gradient before
    clipping, and `clip_factor` what clipping multiplied it by (1 where nothing clipped); `samples` and `tokens` count
    from the start of training; `measures` map a name to (sum, weight) over the window, so that means over many
    windows are exact; `facts` is what the transforms measured besides; `loss_scale` is
    the one that the window had, None without; `waited` is how many seconds the window's batches kept the loop waiting.
    `part` is the part of the model that was updated, in a step of several, here and in the other events of a window.
    """

    loss: SupportsFloat
    weight: SupportsFloat
    micro_batches: int
    rates: Mapping[str, float]
    grad_norm: SupportsFloat
    clip_factor: SupportsFloat = 1.0
    samples: int = 0
    tokens: int = 0
    measures: Mapping[str, tuple[SupportsFloat, SupportsFloat]] = _NOTHING
    facts: Mapping[str, SupportsFloat] = _NOTHING
    loss_scale: float | None = None
    waited: float = 0.0
    part: str | None = None


@attrs.frozen(kw_only=True, slots=False)
class UpdateSkipped(Event):
    """A window ended without an update, and `reason` says why; `skipped` such windows so far, `in_row` without a break.

    `micro_batch` is the first in the window, from 0, that brought a non-finite value: found by its loss, where there is
    a loss scale by the gradient sums, or where the window has only one. None where without a loss scale every loss was
    finite, and a gradient was not. `parameter` is the first one whose gradient is not finite.
    """

    reason: str
    skipped: int
    in_row: int
    loss: SupportsFloat
    grad_norm: SupportsFloat
    micro_batches: int
    micro_batch: int | None = None
    parameter: str | None = None
    loss_scale: float | None = None
    part: str | None = None


@attrs.frozen(kw_only=True, slots=False)
class LossScaleChanged(Event):
    """The loss scale grew after enough finite windows, or backed off after a non-finite one."""

    before: float
    after: float
    part: str | None = None


@attrs.frozen(kw_only=True, slots=False)
class EvalDone(Event):
    """An evaluation pass ended. `values` are means over its `weight` items, named `<name>_<measure>`: `val_loss`."""

    name: str
    values: Mapping[str, float]
    weight: float
    batches: int


@attrs.frozen(kw_only=True, slots=False)
class MemoryMeasured(Event):
    """How much memory the run holds, in bytes; None where the device or the system does not tell.

    `allocated_peak` and `reserved_peak` are the accelerator's, the most since the measurement before: what tensors
    occupied, and what the allocator held for them. `resident` is the process's memory now, and `resident_peak` the
    most since it started.
    """

    allocated_peak: int | None = None
    reserved_peak: int | None = None
    resident: int | None = None
    resident_peak: int | None = None


@attrs.frozen(kw_only=True, slots=False)
class Diagnosis(Event):
    """Something was found that a person should know: `finding` says what, `cure` what to do about it.

    `subject` is what it was found at (a parameter, a layer, a micro-batch), where there is one.
    """

    finding: str
    cure: str
    subject: str | None = None


@attrs.frozen(kw_only=True, slots=False)
class CheckpointSaved(Event):
    """All that a run needs to go on from here was saved as `path` in its store; `reasons` say why.

    With a store that writes in the background it is on its way there.
    """

    path: str
    reasons: tuple[str, ...]


@attrs.frozen(kw_only=True, slots=False)
class Rewound(Event):
    """The weights, and all that the optimizer keeps, are again those of the checkpoint `path`; `reasons` say why."""

    path: str
    reasons: tuple[str, ...]


@attrs.frozen(kw_only=True, slots=False)
class EpochEnded(Event):
    """A pass over the stream ended, its last window closed, after `batches` batches."""

    batches: int


@attrs.frozen(kw_only=True, slots=False)
class RunEnded(Event):
    """The last event: why the run ended, all reasons kept."""

    reasons: tuple[str, ...]

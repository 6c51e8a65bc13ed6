"""`Accumulate`: the window of micro-batches that make one update, summed by weight and divided once."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from operator import attrgetter, is_
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from pipeline._checks import whole
from pipeline.errors import MissingFieldError, SettingError
from pipeline.records import Frame, Scalar, TrainState, Window
from pipeline.records.counters import new_progress
from pipeline.records.state import new_state
from pipeline.records.window import new_window
from pipeline.tensors import Tensors
from pipeline.transforms._gradients import WIDE, add_grads, backward_into, counts_for_nothing, kept, root_of
from pipeline.transforms._norm import global_norm
from pipeline.transforms.backward import ScaledBackward

__all__ = ["Accumulate"]

_grad, _dtype, _requires_grad = attrgetter("grad"), attrgetter("dtype"), attrgetter("requires_grad")


def _added(a: Scalar, b: Scalar) -> Scalar:
    return b if isinstance(a, float) and a == 0.0 else a + b


def _times(value: Tensor, factor: Scalar) -> Tensor:
    return value if isinstance(factor, float) and factor == 1.0 else value * factor


def _added_measures(
    sums: Mapping[str, tuple[Scalar, Scalar]], more: Mapping[str, tuple[Scalar, Scalar]]
) -> Mapping[str, tuple[Scalar, Scalar]]:
    added = dict(sums)
    for name, (total, weight) in more.items():
        before = sums.get(name, (0.0, 0.0))
        added[name] = (_added(before[0], kept(total)), _added(before[1], kept(weight)))
    return added


@attrs.frozen
class Accumulate:
    """Sum gradients, loss and measures over `every` micro-batches by weight, and divide by the summed weight once.

    Reads:    `grads`, `loss`, `weight`, `measures`, `samples`: of one micro-batch.
    Writes:   `window`, the sums so far, in float32 or wider; `progress`; and when the window is full `ready` and
              `update_factor`, 1 / (summed relative weight × loss scale).
    Edges:    any split of the same items into micro-batches gives the same mean gradient up to rounding. At the end of
              the stream an open window is closed and divided by its own weight ("flush"), forgotten ("drop"), or kept
              open for the next epoch ("carry"). A window whose weight is 0 is not stepped. A parameter that is frozen
              when the window closes is not stepped, and what it had gathered is dropped; released before
              that, it keeps what it had.
    Args:     every: micro-batches in a window, at least 1; at_end: "flush", "drop" or "carry".
    Raises:   SettingError, when built, for anything else.
    """

    every: int = 1
    at_end: Literal["flush", "drop", "carry"] = "flush"

    reads = frozenset({"grads", "loss", "weight", "measures", "samples"})
    writes = frozenset({"window", "window.grads", "ready", "update_factor", "progress", "skip"})
    uses_up = frozenset({"grads"})

    def __attrs_post_init__(self) -> None:
        whole("Accumulate.every", self.every)
        if self.at_end not in ("flush", "drop", "carry"):
            raise SettingError("Accumulate.at_end", "'flush', 'drop' or 'carry'", self.at_end)

    def __call__(self, frame: Frame) -> Frame:
        state = frame.state
        if frame.grads is None:
            raise MissingFieldError("Accumulate", "grads", "put it after ScaledBackward")
        sums = add_grads(state.window.grads, frame.grads, state.params.index, frame.began.updates)
        if state.params.is_owned and not sums.is_owned:
            sums = sums.owned()
        return self.count(frame, sums)

    def count(self, frame: Frame, sums: Tensors) -> Frame:
        """The frame with `sums` in its window, the micro-batch counted, and `ready` when the window is full."""
        state, window, weight = frame.state, frame.state.window, frame.weight
        reference, loss, probe = window.reference, window.loss, 0.0
        if not counts_for_nothing(weight):
            reference = window.reference_with(weight)
            if frame.loss is not None:
                probe = kept(frame.loss)
                loss = _added(loss, _times(probe, weight / reference))
        full = window.micro_batches + 1 >= self.every
        if state.loss_scale is not None and not full:  # the last one needs no probe: it is who is left
            probe = global_norm(sums.flat, 1)
        window = new_window(
            sums,
            _added(window.weight, weight.detach() if isinstance(weight, Tensor) else weight),
            reference,
            loss,
            _added_measures(window.measures, frame.measures) if frame.measures else window.measures,
            window.micro_batches + 1,
            (*window.probes, probe),
            window.buffers,
        )
        p = state.progress
        progress = new_progress(
            p.micro_steps + 1,
            p.updates,
            p.skipped,
            p.epoch,
            p.samples + frame.samples,
            p.tokens + frame.tokens,
            p.skips_in_row,
        )
        state = new_state(
            state.params,
            state.buffers,
            state.optimizer,
            window,
            state.loss_scale,
            progress,
            state.rng,
            state.slots,
            state.rate_factor,
        )
        frame = frame.having(state=state, grads=None, applied=None, skip=None, skipped=None)
        return _closed(frame) if full else frame

    def finish(self, frame: Frame) -> Frame:
        """The pass at the end of the stream: flush, drop or carry the open window."""
        if not frame.state.window.micro_batches or self.at_end == "carry":
            return frame
        if self.at_end == "drop":
            return frame.having(state=attrs.evolve(frame.state, window=Window()))
        return _closed(frame)

    def windows(self, batches: int) -> int | None:
        """How many a pass over so many batches closes; None where they may go on into the next pass."""
        if self.at_end == "carry":
            return None
        return (batches + self.every - 1 if self.at_end == "flush" else batches) // self.every

    def fuse(self, before: Any) -> _AccumulatedBackward | None:
        """One call for this and a ScaledBackward directly before it."""
        return _AccumulatedBackward(before, self) if isinstance(before, ScaledBackward) else None


def _closed(frame: Frame) -> Frame:
    """The frame with a full window, and the factor that makes its sums a mean: 0 where nothing counted."""
    state = frame.state
    if not all(map(_requires_grad, state.params.flat)):
        state = _without_frozen(state)
    weight, scale = state.window.relative_weight, state.loss_scale
    total = weight if scale is None else weight * scale.scale
    if not isinstance(total, Tensor):
        return frame.having(state=state, ready=True, update_factor=1.0 / total if total else 0.0)
    nothing = total == 0
    factor = torch.where(nothing, torch.zeros_like(total), total.reciprocal())
    return frame.having(state=state, ready=True, update_factor=factor, skip=nothing)


def _without_frozen(state: TrainState) -> TrainState:
    """The state without the sums of those parameters that require no gradient now."""
    params, sums = dict(state.params), state.window.grads
    left = {name: total for name, total in sums.items() if name not in params or params[name].requires_grad}
    if len(left) == len(sums):
        return state
    grads = Tensors(left).owned() if sums.is_owned else Tensors(left)
    return attrs.evolve(state, window=attrs.evolve(state.window, grads=grads))


@attrs.frozen
class _AccumulatedBackward:
    """ScaledBackward and Accumulate as one: where the state is the fold's own, autograd adds straight into the window.

    The same bits as the two in a row; no second set of gradients in memory. While a window is open, the parameters'
    `.grad` are its sums.
    """

    backward: ScaledBackward
    accumulate: Accumulate

    def __call__(self, frame: Frame) -> Frame:
        params, sums = frame.state.params, frame.state.window.grads
        flat = params.flat
        tensors = tuple(compress(flat, map(_requires_grad, flat)))
        if not (params.is_owned and (sums.is_owned or not sums) and WIDE.issuperset(map(_dtype, tensors))):
            return self.accumulate(self.backward(frame))
        if counts_for_nothing(frame.weight):
            return self.accumulate.count(frame, sums)
        loss, start = root_of(frame)
        if not sums:
            before = (None,) * len(flat)
        else:
            before = sums.flat if sums.index is params.index else [sums.get(name) for name in params.index]
        if not all(map(is_, map(_grad, flat), before)):  # as a rule they are: looking costs half of writing
            for param, grad in zip(flat, before, strict=True):
                param.grad = grad
        sums = sums.owned(frame.began.updates)  # from here on the window before this micro-batch is stale
        backward_into(loss, start, tensors)
        after = tuple(map(_grad, flat))
        if not (sums.index is params.index and all(map(is_, after, before))):
            sums = params.present(after)
        return self.accumulate.count(frame, sums)

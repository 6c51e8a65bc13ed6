"""`Accumulate`: the window of micro-batches that make one update, summed by weight and divided once."""

from __future__ import annotations

from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from pipeline.errors import MissingFieldError, SettingError
from pipeline.records import Frame, Progress, Scalar, TrainState, Window
from pipeline.tensors import Tensors
from pipeline.transforms._gradients import WIDE, add_grads, counts_for_nothing, root_of, trainable
from pipeline.transforms.backward import ScaledBackward

__all__ = ["Accumulate"]


def _added(a: Scalar, b: Scalar) -> Scalar:
    return b if isinstance(a, float) and a == 0.0 else a + b


@attrs.frozen
class Accumulate:
    """Sum gradients, loss and measures over `every` micro-batches by weight, and divide by the summed weight once.

    Reads:    `grads`, `loss`, `weight`, `measures`, `samples`: of one micro-batch.
    Writes:   `window`, the sums so far, in float32 or wider; `progress`; and when the window is full `ready` and
              `update_factor`, 1 / (summed relative weight × loss scale).
    Edges:    any split of the same items into micro-batches gives the same mean gradient up to rounding. At the end of
              the stream an open window is closed and divided by its own weight ("flush"), forgotten ("drop"), or kept
              open for the next epoch ("carry"). A window whose weight is 0 is not stepped. A parameter that is frozen
              when the window closes is not stepped, and what it had gathered is dropped.
    Args:     every: micro-batches in a window, at least 1; at_end: "flush", "drop" or "carry".
    Raises:   SettingError, when built, for anything else.
    """

    every: int = 1
    at_end: Literal["flush", "drop", "carry"] = "flush"

    reads = frozenset({"grads", "loss", "weight"})
    writes = frozenset({"window.grads", "ready", "update_factor", "progress"})
    uses_up = frozenset({"grads"})

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SettingError("Accumulate.every", "a whole number of micro-batches, 1 or more", self.every)
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
        relative = window.relative(weight)
        loss = window.loss
        if frame.loss is not None and not counts_for_nothing(weight):
            value = frame.loss.detach()
            loss = _added(loss, value if isinstance(relative, float) and relative == 1.0 else value * relative)
        reference = window.reference
        if reference is None and not counts_for_nothing(weight):
            reference = torch.where(weight > 0, weight, 1.0) if isinstance(weight, Tensor) else weight
        measures = window.measures
        if frame.measures:
            zero = (0.0, 0.0)
            before = {name: measures.get(name, zero) for name in {**measures, **frame.measures}}
            measures = {
                name: (
                    _added(s, _detached(frame.measures.get(name, zero)[0])),
                    _added(w, frame.measures.get(name, zero)[1]),
                )
                for name, (s, w) in before.items()
            }
        window = Window(sums, _added(window.weight, relative), reference, loss, measures, window.micro_batches + 1)
        p = state.progress
        progress = Progress(
            p.micro_steps + 1, p.updates, p.skipped, p.epoch, p.samples + frame.samples, p.tokens + frame.tokens
        )
        state = TrainState(
            state.params, state.buffers, state.optimizer, window, state.loss_scale, progress, state.rng, state.slots
        )
        if window.micro_batches < self.every:
            return frame.having(state=state, grads=None)
        return _closed(frame.having(state=state, grads=None))

    def finish(self, frame: Frame) -> Frame:
        """The pass at the end of the stream: flush, drop or carry the open window."""
        if not frame.state.window.micro_batches or self.at_end == "carry":
            return frame
        if self.at_end == "drop":
            return frame.having(state=attrs.evolve(frame.state, window=Window()))
        return _closed(frame)

    def fuse(self, before: Any) -> _AccumulatedBackward | None:
        """One call for this and a ScaledBackward directly before it."""
        return _AccumulatedBackward(before, self) if isinstance(before, ScaledBackward) else None


def _detached(value: Scalar) -> Scalar:
    return value.detach() if isinstance(value, Tensor) else value


def _closed(frame: Frame) -> Frame:
    state = frame.state
    weight, scale = state.window.weight, state.loss_scale
    params, sums = state.params, state.window.grads
    frozen = [n for n in sums.index if n in params.index and not params.flat[params.index[n]].requires_grad]
    if frozen:
        left = Tensors((name, sum_) for name, sum_ in sums.items() if name not in frozen)
        window = attrs.evolve(state.window, grads=left.owned() if sums.is_owned else left)
        state = attrs.evolve(state, window=window)
    total = weight if scale is None else weight * scale.scale
    nothing = not isinstance(total, Tensor) and total == 0
    return frame.having(state=state, ready=True, update_factor=0.0 if nothing else 1.0 / total)


@attrs.frozen
class _AccumulatedBackward:
    """ScaledBackward and Accumulate as one: where the state is the fold's own, autograd adds straight into the window.

    The same bits as the two in a row; no second set of gradients in memory. While a window is open, the parameters'
    `.grad` are its sums.
    """

    backward: ScaledBackward
    accumulate: Accumulate

    def __call__(self, frame: Frame) -> Frame:
        state = frame.state
        params, sums = state.params, state.window.grads
        names, tensors = trainable(params)
        in_place = params.is_owned and (sums.is_owned or not sums) and all(p.dtype in WIDE for p in tensors)
        if not in_place:
            return self.accumulate(self.backward(frame))
        if counts_for_nothing(frame.weight):
            return self.accumulate.count(frame, sums)
        loss, start = root_of(frame)
        before = dict(sums)
        for name, param in zip(names, tensors, strict=True):
            param.grad = before.get(name)
        if sums:
            sums.owned(frame.began.updates)  # from here on the window before this micro-batch is stale
        torch.autograd.backward((loss,), None if start is None else (start,), inputs=tensors)
        found = [(name, p.grad) for name, p in zip(names, tensors, strict=True) if p.grad is not None]
        if len(found) == len(params.index):
            grads = params.replace(grad for _, grad in found)
        else:
            before.update(found)
            grads = Tensors((name, before[name]) for name in params.index if name in before).owned()
        return self.accumulate.count(frame, grads)

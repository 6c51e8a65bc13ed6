"""`MaybeStep`: one update when the window is full and its gradients are finite, and nothing otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol, cast

import attrs
import torch
from torch import Tensor

from pipeline.errors import MissingFieldError, SettingError
from pipeline.records import Frame, OptimizerState, Progress, Scalar, Skipped, TrainState, Window
from pipeline.records.counters import new_progress
from pipeline.records.state import new_state
from pipeline.records.window import new_window
from pipeline.tensors import Tensors
from pipeline.transforms._norm import first_non_finite, normalised, sum_norm

__all__ = ["MaybeStep", "UpdateRule"]

_NO_GRADS = Tensors()


class UpdateRule(Protocol):
    """What MaybeStep asks of an optimizer: a pure function of parameters, gradients, its state and the update count."""

    def init(self, state: TrainState) -> TrainState:
        """Check the settings against the parameters, before the first batch."""
        ...

    def rates(self, count: int) -> Mapping[str, float]:
        """The learning rate of each group in update number `count`, counted from 0."""
        ...

    def update(
        self,
        params: Tensors,
        grads: Tensors,
        state: OptimizerState,
        *,
        rates: Mapping[str, float],
        factor: Scalar,
        count: int,
    ) -> tuple[Tensors, OptimizerState]:
        """Parameters and optimizer state after update number `count` with gradients `grads` × `factor` at these rates.

        In place where the records own their buffers. Parameters without an entry in `grads` are left as they are.
        """
        ...


@attrs.frozen
class MaybeStep:
    """Update the parameters if the window is full and its gradients are finite.

    Reads:    `ready`, `window`, `update_factor`, `skip`; `params`, `optimizer`; `progress.updates`, which the schedule
              counts.
    Writes:   `params`, `optimizer`, an empty `window`, `progress`, `loss_scale`; `applied`, whether an update was
              made, and `skipped`, why not; `closed`, the window that ended, without its gradients; `rates`, group ->
              learning rate used; `scaled_by`.
    Measures: `grad_norm`, in units of the normalised gradient, where nothing before has: finiteness is read from it.
    Edges:    nothing while the window is open. Non-finite gradients, none at all, or a `skip` asked for before:
              parameters, optimizer state and schedule stay as they are, buffers (BatchNorm statistics) go back to
              what they were before the window, and the window counts as skipped.
    Args:     optimizer: `Optimizer(...)`, or anything with the methods of `UpdateRule`.
    Raises:   SettingError, when built, for a torch optimizer or its class in place of `Optimizer(...)`.
    """

    optimizer: UpdateRule

    reads = frozenset({"window.grads", "ready", "update_factor", "params", "optimizer"})
    writes = frozenset(
        {"applied", "closed", "rates", "params", "optimizer", "window", "loss_scale", "facts", "progress"}
    )
    uses_up = frozenset({"window.grads", "ready", "update_factor"})

    def __attrs_post_init__(self) -> None:
        if isinstance(self.optimizer, type) or not hasattr(self.optimizer, "update"):
            expected = "an Optimizer: `Optimizer(torch.optim.AdamW, lr=1e-3)`"
            raise SettingError("MaybeStep.optimizer", expected, self.optimizer)

    def init(self, state: TrainState) -> TrainState:
        """Let the optimizer check its settings against the parameters."""
        return self.optimizer.init(state)

    def __call__(self, frame: Frame) -> Frame:
        if not frame.ready:
            if frame.grads is not None:
                raise MissingFieldError("MaybeStep", "window.grads", "put Accumulate after ScaledBackward")
            return frame
        state, factor = frame.state, frame.update_factor
        counted = bool(state.window.grads) and not (isinstance(factor, float) and factor == 0.0)
        raw, frame = self.measured(frame)
        read = self._read(frame, raw)
        params, optimizer, rates = state.params, state.optimizer, self.rates(state)
        if counted and 0 <= read < math.inf:
            params, optimizer = self.optimizer.update(
                params, state.window.grads, optimizer, rates=rates, factor=factor, count=state.progress.updates
            )
        return self.settled(frame, read, params, optimizer, rates, counted=counted)

    def measured(self, frame: Frame) -> tuple[Tensor, Frame]:
        """The global norm of the window's sums; and the frame with that of the gradient, where no clip has taken it."""
        raw = sum_norm(frame)
        if frame.sum_norm is None or "grad_norm" not in frame.facts:
            frame = frame.having(facts={**frame.facts, "grad_norm": normalised(raw, frame.update_factor)})
        return raw, frame

    def reading(self, frame: Frame, raw: Tensor) -> Tensor:
        """What the host is to read: below 0 where the update is not wanted, the norm of the gradient otherwise."""
        norm, skip = normalised(raw, frame.update_factor), frame.skip
        # What is not finite is that before all else: the loss scale must back off from it.
        return norm if skip is None else torch.where(skip & norm.isfinite(), -1.0, norm)

    def _read(self, frame: Frame, raw: Tensor) -> float:
        factor = frame.update_factor
        if frame.skip is None and raw.is_cpu:  # both lie in the host's memory
            return cast("float", raw.tolist()) * cast(
                "float", factor.tolist() if isinstance(factor, Tensor) else factor
            )
        return float(self.reading(frame, raw))

    def rates(self, state: TrainState) -> Mapping[str, float]:
        """The learning rate of each group in the state's next update."""
        rates = self.optimizer.rates(state.progress.updates)
        if state.rate_factor != 1.0:
            rates = {group: rate * state.rate_factor for group, rate in rates.items()}
        return rates

    def settled(
        self,
        frame: Frame,
        read: float,
        params: Tensors,
        optimizer: OptimizerState,
        rates: Mapping[str, float],
        *,
        counted: bool = True,
    ) -> Frame:
        """The frame once the host has `read` what came of the window, with what the update made, if it was made."""
        state = frame.state
        window, buffers, p, scale = state.window, state.buffers, state.progress, state.loss_scale
        applied = counted and 0 <= read < math.inf
        if not applied:
            buffers = _before(window, buffers, p.updates)
            if params.is_owned:  # the sums are let go of here, and not when the next window starts
                for param in params.flat:
                    param.grad = None
        state = new_state(
            params,
            buffers,
            optimizer,
            Window(),
            scale if scale is None or not counted or read < 0 else scale.after(math.isfinite(read)),
            _counted(p, applied),
            state.rng,
            state.slots,
            state.rate_factor,
        )
        return frame.having(
            state=state,
            ready=False,
            applied=applied,
            skipped=None if applied else _why(frame, window, read, counted),
            closed=_without_tensors(window),
            rates=rates,
            scaled_by=None if scale is None else scale.scale,
            sum_norm=None,
        )


def _counted(p: Progress, applied: bool) -> Progress:
    if applied:
        return new_progress(p.micro_steps, p.updates + 1, p.skipped, p.epoch, p.samples, p.tokens, 0)
    return new_progress(p.micro_steps, p.updates, p.skipped + 1, p.epoch, p.samples, p.tokens, p.skips_in_row + 1)


def _why(frame: Frame, window: Window, read: float, counted: bool) -> Skipped:
    """What the host looks up once it knows that there will be no update."""
    if float(window.weight) == 0:
        return Skipped("no items counted")
    if read < 0:
        return frame.skipped or Skipped("asked for by a transform")
    if not counted:
        return Skipped("no parameter had a gradient")
    first = _first_bad(window, frame.state.loss_scale is not None)
    culprit = first_non_finite(window.grads)
    if culprit is None:  # every gradient is finite, and together they are not
        return Skipped("gradient norm beyond float32", first)
    return Skipped("non-finite gradients", first, culprit)


def _first_bad(window: Window, scaled: bool) -> int | None:
    """The micro-batch that brought the first non-finite value, where that is known."""
    finite = [math.isfinite(probe) for probe in window.probes]
    if False in finite:
        return finite.index(False)
    return window.micro_batches - 1 if scaled or window.micro_batches == 1 else None


def _before(window: Window, buffers: Tensors, update: int) -> Tensors:
    """The buffers as they were before the window: written back where they are owned, the old record otherwise."""
    if window.buffers is None:
        return buffers
    if not buffers.is_owned:
        return window.buffers
    buffers = buffers.owned(update)
    with torch.no_grad():
        for now, then in zip(buffers.flat, window.buffers.flat, strict=True):
            now.copy_(then)
    return buffers


def _without_tensors(window: Window) -> Window:
    """What events tell of a window: all but its gradients and buffers, which are let go of."""
    return new_window(
        _NO_GRADS,
        window.weight,
        window.reference,
        window.loss,
        window.measures,
        window.micro_batches,
        window.probes,
        None,
    )

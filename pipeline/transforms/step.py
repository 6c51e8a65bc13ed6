"""`MaybeStep`: one update when the window is full and its gradients are finite, and nothing otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import attrs

from pipeline.errors import SettingError
from pipeline.records import Frame, OptimizerState, Progress, Scalar, TrainState, Window
from pipeline.tensors import Tensors
from pipeline.transforms._norm import normalised, sum_norm

__all__ = ["MaybeStep", "UpdateRule"]


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

    Reads:    `ready`, `window`, `update_factor`; `params`, `optimizer`; `progress.updates`, which the schedule counts.
    Writes:   `params`, `optimizer`, an empty `window`, `progress`, `loss_scale`; `applied`, whether an update was
              made; `closed`, the window that ended, without its gradients; `rates`, group -> learning rate used.
    Measures: `grad_norm`, in units of the normalised gradient, where nothing before has: finiteness is read from it.
    Edges:    nothing while the window is open. Non-finite gradients, or none at all: parameters, optimizer state and
              schedule stay as they are and the window counts as skipped.
    Args:     optimizer: `Optimizer(...)`, or anything with the methods of `UpdateRule`.
    Raises:   SettingError, when built, for a torch optimizer or its class in place of `Optimizer(...)`.
    """

    optimizer: UpdateRule

    reads = frozenset({"window.grads", "ready", "update_factor", "params"})
    writes = frozenset({"applied", "closed", "rates", "params", "facts", "progress"})
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
            return frame
        state, factor = frame.state, frame.update_factor
        window, p = state.window, state.progress
        counted = bool(window.grads) and not (isinstance(factor, float) and factor == 0.0)
        facts = frame.facts
        if frame.sum_norm is not None and frame.sum_norm[0] is window.grads:
            norm = facts["grad_norm"]
        else:
            norm = normalised(sum_norm(frame), factor)
            facts = {**facts, "grad_norm": norm}
        finite = math.isfinite(norm)
        params, optimizer = state.params, state.optimizer
        rates = self.optimizer.rates(p.updates)
        applied = finite and counted
        if applied:
            params, optimizer = self.optimizer.update(
                params, window.grads, optimizer, rates=rates, factor=factor, count=p.updates
            )
        elif params.is_owned:  # the sums are let go of here, and not when the next window starts
            for param in params.flat:
                param.grad = None
        updates, skipped = (p.updates + 1, p.skipped) if applied else (p.updates, p.skipped + 1)
        scale = state.loss_scale
        state = TrainState(
            params,
            state.buffers,
            optimizer,
            Window(),
            scale if scale is None or not counted else scale.after(finite),
            Progress(p.micro_steps, updates, skipped, p.epoch, p.samples, p.tokens),
            state.rng,
            state.slots,
        )
        closed = Window(
            weight=window.weight,
            reference=window.reference,
            loss=window.loss,
            measures=window.measures,
            micro_batches=window.micro_batches,
        )
        return frame.having(
            state=state,
            ready=False,
            applied=applied,
            closed=closed,
            rates=rates,
            facts=facts,
            sum_norm=None,
        )

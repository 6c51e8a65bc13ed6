"""`UpdateInBackward`: each parameter is updated as soon as its gradient is there, and the gradient let go of."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import Tensor

from pipeline.errors import FrameError, MissingFieldError, SettingError
from pipeline.records import Frame, OptimizerState, Scalar, Skipped, TrainState, Window
from pipeline.tensors import Lease, Tensors
from pipeline.transforms._gradients import WIDE, add_grads, backward_into, counts_for_nothing, root_of, trainable
from pipeline.transforms._norm import norms
from pipeline.transforms.accumulate import Accumulate
from pipeline.transforms.backward import ScaledBackward
from pipeline.transforms.step import MaybeStep, UpdateRule

__all__ = ["UpdateInBackward"]


@attrs.frozen
class UpdateInBackward:
    """Differentiate the loss, and update each parameter as soon as its gradient is complete.

    In place of `ScaledBackward(), Accumulate(), MaybeStep(optimizer)`: the same bits, with one gradient in memory at a
    time instead of all. The optimizer's state is the same too: either way goes on from the other's.

    Reads:    `loss`, 0-d with a graph; `weight`, `measures`, `samples`; `params`, `optimizer`; `progress.updates`,
              which the schedule counts; `window`, which must be empty, and `loss_scale`, which must be None.
    Writes:   `params`, `optimizer`, an empty `window`, `progress`; `applied`, whether an update was made, and
              `skipped`, why not; `closed`, the window of this one micro-batch; `rates`, group -> learning rate used.
    Measures: `grad_norm`, the global norm of the gradient, 0-d, on its device; NaN where the loss was not finite.
    Edges:    a non-finite loss, weight 0, or no gradient at all: nothing changes, as in MaybeStep. The loss is read
              before the backward pass, so the host waits for the forward. A non-finite gradient of a finite loss is
              found too late: it goes into the parameters, and `grad_norm` tells. A parameter without a gradient is left
              as it is, its state too. An error in the backward pass leaves those parameters moved that it had reached.
              Where the state is lent, all gradients are computed first, and copies updated. The ranks of a
              distributed run would each use their own gradients: for one process only.
    Args:     optimizer: `Optimizer(...)` of a class that treats each parameter by itself, as SGD and Adam do, or
              anything with the methods of `UpdateRule`.
    Raises:   SettingError, when built, for a torch optimizer or its class in place of `Optimizer(...)`; by `init`, for
              a loss scale; when used, for an optimizer that keeps state by group. MissingFieldError for an open window.
              FrameError for a gradient that comes in two pieces, out of backward passes within the backward pass.
    Source:   Lv et al. 2023, arXiv:2306.09782 (there for plain SGD).
    """

    optimizer: UpdateRule

    reads = frozenset({"loss", "weight", "measures", "samples", "params", "optimizer", "window", "loss_scale"})
    writes = frozenset({"applied", "closed", "rates", "params", "optimizer", "window", "facts", "progress"})

    def __attrs_post_init__(self) -> None:
        if isinstance(self.optimizer, type) or not hasattr(self.optimizer, "update"):
            expected = "an Optimizer: `Optimizer(torch.optim.AdamW, lr=1e-3)`"
            raise SettingError("UpdateInBackward.optimizer", expected, self.optimizer)

    def init(self, state: TrainState) -> TrainState:
        """Refuse a loss scale, and let the optimizer check its settings against the parameters."""
        _check_unscaled(state)
        return self.optimizer.init(state)

    def windows(self, batches: int) -> int:
        """One for each batch."""
        return batches

    def __call__(self, frame: Frame) -> Frame:
        state, count = frame.state, frame.state.progress.updates
        _check_unscaled(state)
        if frame.grads is not None or state.window.micro_batches:
            cure = "it stands in place of ScaledBackward, Accumulate and MaybeStep; let those close the open window"
            raise MissingFieldError("UpdateInBackward", "an empty window", cure)
        if frame.loss is None:
            raise MissingFieldError("UpdateInBackward", "loss", "put it after Forward")
        counted = Accumulate().count(frame, state.window.grads)
        if counts_for_nothing(frame.weight):
            return self._skipped(counted)
        loss, start = root_of(frame)
        value, weight = _read(loss, frame.weight)
        if weight == 0:
            return self._skipped(counted)
        if not math.isfinite(value):
            skipped = self._skipped(counted)
            facts = {**skipped.facts, "grad_norm": math.nan}
            return skipped.having(skipped=Skipped("non-finite loss", 0), facts=facts)
        rates = {group: rate * state.rate_factor for group, rate in self.optimizer.rates(count).items()}
        update = _Updates(self.optimizer, rates, count, state)
        if update.in_place:
            _as_they_come(loss, start, update)
        else:
            for name, grad in (ScaledBackward()(frame).grads or Tensors()).items():
                update(name, grad)
        counted = counted.having(state=update.applied_to(counted.state))
        if not update.norms:
            return self._skipped(counted)
        return _closed(counted.having(rates=rates, facts={**frame.facts, "grad_norm": update.norm()}))

    def _skipped(self, frame: Frame) -> Frame:
        """The frame as MaybeStep leaves it when a window ends that has no gradients."""
        return MaybeStep(self.optimizer)(frame.having(skip=None))


class _Updates:
    """The updates of one pass, parameter by parameter, and the norms of their gradients."""

    def __init__(self, rule: UpdateRule, rates: Mapping[str, float], count: int, state: TrainState) -> None:
        self.rule, self.rates, self.count = rule, rates, count
        self.in_place = state.params.is_owned
        self.parts, self._generation = _parts_of(state, count)
        self.params = state.params.writable(count)
        self.norms: dict[str, Tensor] = {}

    def __call__(self, name: str, grad: Tensor) -> None:
        if name in self.norms:
            raise FrameError(
                f"UpdateInBackward got the gradient of {name} in two pieces, the second after its update: a backward "
                "pass runs within the backward pass, as in a reversible block. Use MaybeStep."
            )
        if grad.dtype not in WIDE:
            grad = add_grads(Tensors(), Tensors({name: grad}), {}, self.count)[name]
        self.norms[name] = norms([grad])
        self.parts.update(self.rule, name, self.params[name], grad, self.rates, self.count)

    def norm(self) -> Tensor:
        """The global norm, from the norms of the parameters in their order."""
        each = [self.norms[name] for name in self.params.index if name in self.norms]
        return norms([torch.cat([norm.to(each[0].device) for norm in each])])[0]

    def applied_to(self, state: TrainState) -> TrainState:
        """The state with the parameters and the optimizer as they are now."""
        optimizer = OptimizerState(live=self.parts, generation=self._generation, is_owned=self.in_place)
        return attrs.evolve(state, params=self.params, optimizer=optimizer)


class _ByParameter:
    """The state of an optimizer in parts, one for each parameter, so that each can be updated by itself."""

    def __init__(self, given: OptimizerState, count: int) -> None:
        _check_no_group((*given.tensors, *given.numbers))
        self.lease = Lease()
        numbers, tensors = given.numbers, given.tensors.owned(count)
        found: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {}
        for place, entries in enumerate((tensors, numbers)):
            for key, value in entries.items():
                found.setdefault(key.rpartition("/")[0], ({}, {}))[place][key] = value
        self.parts = {
            owner: OptimizerState(Tensors(own).owned(), rest, is_owned=True) for owner, (own, rest) in found.items()
        }

    def update(
        self, rule: UpdateRule, name: str, param: Tensor, grad: Tensor, rates: Mapping[str, float], count: int
    ) -> None:
        """One update of `param` in place, by a gradient that may be written to."""
        before = self.parts.get(name, OptimizerState(is_owned=True))
        params, grads = Tensors({name: param}).owned(), Tensors({name: grad}).owned()
        _, self.parts[name] = rule.update(params, grads, before, rates=rates, factor=1.0, count=count)
        if before.live is None:
            _check_no_group(self.parts[name].numbers)

    def tensors(self) -> dict[str, Tensor]:
        """The parts' tensors, by `parameter/key`."""
        return {key: tensor for part in self.parts.values() for key, tensor in part.tensors.items()}

    def numbers(self) -> dict[str, Any]:
        """The parts' numbers, by `parameter/key`."""
        return {key: number for part in self.parts.values() for key, number in part.numbers.items()}


def _check_unscaled(state: TrainState) -> None:
    if state.loss_scale is not None:
        cure = "A scale backs off before anything moves: use bfloat16, which needs none, or MaybeStep."
        raise SettingError("The loss scale under UpdateInBackward", "None", state.loss_scale, cure)


def _check_no_group(keys: Iterable[str]) -> None:
    for key in keys:
        if key.startswith("group "):
            cure = "Parameters that are updated one by one share no counts: use MaybeStep."
            raise SettingError("UpdateInBackward.optimizer", "one that keeps its state by parameter", key, cure)


def _parts_of(state: TrainState, count: int) -> tuple[_ByParameter, int]:
    """The optimizer's state by parameter, to be written to, and the generation of its next record."""
    given = state.optimizer
    if not (state.params.is_owned and given.is_owned):
        return _ByParameter(given.copy(), count), 0
    if isinstance(given.live, _ByParameter):
        return given.live, given.live.lease.renew(given.generation, count)
    return _ByParameter(given, count), 0


def _read(loss: Tensor, weight: Scalar) -> tuple[float, float]:
    """Loss and weight on the host, in one transfer."""
    if not isinstance(weight, Tensor):
        return float(loss.detach()), weight
    value, counted = torch.stack([loss.detach(), weight.to(loss.device)]).tolist()
    return value, counted


def _as_they_come(loss: Tensor, start: Tensor | None, update: _Updates) -> None:
    """Go back from the loss, and hand each gradient on as soon as it is complete."""

    def take(name: str, param: Tensor) -> None:
        grad, param.grad = param.grad, None
        if grad is not None:
            update(name, grad)

    names, tensors = trainable(update.params)
    with ExitStack() as hooks:
        for name, param in zip(names, tensors, strict=True):
            param.grad = None
            hooks.callback(param.register_post_accumulate_grad_hook(functools.partial(take, name)).remove)
        backward_into(loss, start, tensors)


def _closed(frame: Frame) -> Frame:
    """The window of this one micro-batch, ended by an update."""
    window, progress = frame.state.window, frame.state.progress
    progress = attrs.evolve(progress, updates=progress.updates + 1, skips_in_row=0)
    state = attrs.evolve(frame.state, window=Window(), progress=progress)
    return frame.having(state=state, ready=False, applied=True, closed=attrs.evolve(window, buffers=None))

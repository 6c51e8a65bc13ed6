"""The step in a graph: the update is computed in any case, and where it is not to be made, nothing is changed by it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from pipeline.compilation._lifting import Lifting
from pipeline.compilation._numbers import Number, Untraceable
from pipeline.optim import Group, Optimizer
from pipeline.records import Frame, OptimizerState
from pipeline.tensors import Tensors
from pipeline.transforms import MaybeStep, UpdateRule

__all__ = ["NotYetError", "Stepping", "has_its_own_kernel", "with_plain_optimizer"]

_MANY = 32
"""Parameters up to which a graph of the optimizer is faster than its fused kernel; each makes it slower to compile."""


class NotYetError(Exception):
    """The optimizer has no state yet for a parameter that is to be updated."""


def has_its_own_kernel(rule: UpdateRule, parameters: int) -> bool:
    """Whether the optimizer is better left as it is: compiled by itself, or fused and with many parameters."""
    if type(rule) is not Optimizer:
        return False
    ways = {"fused", "foreach", "differentiable", "capturable"} & rule.settings.keys()
    fused = rule.settings.get("fused") or (issubclass(rule.cls, (torch.optim.Adam, torch.optim.AdamW)) and not ways)
    return bool(rule.compiled) or (bool(fused) and parameters > _MANY)


class _Rates:
    """The learning rates of a frame's update; those of one frame are computed once."""

    def __init__(self, step: MaybeStep) -> None:
        self._step = step
        self._last: tuple[Frame, Mapping[str, float]] | None = None

    def __call__(self, frame: Frame) -> Mapping[str, float]:
        if self._last is None or self._last[0] is not frame:
            self._last = (frame, self._step.rates(frame.state))
        return self._last[1]


class Stepping:
    """MaybeStep as it is traced; `settled` is the rest of it, which is the host's."""

    def __init__(self, step: MaybeStep) -> None:
        self._step, self._rates = step, _Rates(step)

    def __call__(self, lifting: Lifting, frame: Frame) -> tuple[Frame, Tensor]:
        """The frame with the parameters and the optimizer's state after the update, and what the host is to read."""
        raw, frame = self._step.measured(frame)
        read = self._step.reading(frame, raw)
        is_made = (read >= 0) & read.isfinite()
        state = frame.state
        params, optimizer = self._updated(lifting, frame)
        params = _where(is_made, params, state.params)
        tensors = _where(is_made, optimizer, state.optimizer.tensors)
        state = attrs.evolve(state, params=params, optimizer=OptimizerState(tensors, state.optimizer.numbers))
        return frame.having(state=state), read

    def settled(self, before: Frame, frame: Frame, read: Tensor) -> Frame:
        """The frame after the step, once the host has `read` what came of it."""
        state = frame.state
        if state.params.is_owned:
            for param in state.params.flat:
                param.grad = None
        return self._step.settled(frame, read.item(), state.params, state.optimizer, self._rates(before))

    def _updated(self, lifting: Lifting, frame: Frame) -> tuple[Tensors, Tensors]:
        state, rule = frame.state, self._step.optimizer
        updates: Any = state.progress.updates
        if state.optimizer.numbers:
            raise Untraceable("the optimizer keeps numbers on the host")
        rates = lifting.source.name(self._rates)
        now = rule.rates(updates.value)
        given: dict[str, Any] = {
            group: Number(lifting.ledger, f"{rates}(f)[{group!r}]", rate).exact() for group, rate in now.items()
        }
        params, after = _as_traced(rule, lifting, updates).update(
            state.params,
            state.window.grads,
            _counting_in_double(state.optimizer),
            rates=given,
            factor=frame.update_factor,
            count=1 if type(rule) is Optimizer else updates,
        )
        tensors = after.tensors
        if {*tensors} - {f"group {group}/lr" for group in given} != {*state.optimizer.tensors}:
            raise NotYetError
        return params, tensors


def _where(is_made: Tensor, new: Tensors, old: Tensors) -> Tensors:
    """`new`, in the order and the precision of `old`, where the update is made."""
    pairs = [(new[name], tensor) for name, tensor in old.items()]
    return old.replace(torch.where(is_made, after.detach().to(before.dtype), before) for after, before in pairs)


def _counting_in_double(state: OptimizerState) -> OptimizerState:
    """With counts of updates in float64: 1 - 0.999**2 has three digits fewer in float32."""

    def wide(name: str, tensor: Tensor) -> Tensor:
        return tensor.double() if name.endswith("/step") and tensor.dtype is torch.float32 else tensor

    return OptimizerState(Tensors((name, wide(name, tensor)) for name, tensor in state.tensors.items()))


def _as_traced(rule: UpdateRule, lifting: Lifting, updates: Any) -> UpdateRule:
    """The rule in the form that reads nothing on the host, with what is scheduled as numbers of the trace."""
    if type(rule) is not Optimizer:
        return rule
    taken = inspect.signature(rule.cls).parameters
    ways = {name: value for name, value in (("foreach", True), ("fused", False), ("capturable", True)) if name in taken}

    def traced(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: _scheduled(lifting, value, updates) if callable(value) and not isinstance(value, type) else value
            for name, value in settings.items()
        }

    groups = [Group(g.match, lr=g.lr, name=g.name, **traced(g.settings)) for g in rule.groups]
    settings = {**traced(rule.settings), **ways}
    return Optimizer(rule.cls, rule.lr, groups=groups, masters=rule.masters, **settings)


def _scheduled(lifting: Lifting, schedule: Callable[[int], Any], updates: Any) -> Callable[[int], Any]:
    """A schedule that gives what `schedule` gives in each update, as a number of the trace."""
    code, now = f"{lifting.source.name(schedule)}({updates.code})", schedule(updates.value)
    if not isinstance(now, (int, float)):
        raise Untraceable(f"a setting of the optimizer is scheduled as a {type(now).__name__}, not as a number")
    if not lifting.ledger.decide(f"math.isfinite({code})", math.isfinite(now)):
        raise Untraceable("a setting of the optimizer is scheduled as a number that is not finite")
    number = Number(lifting.ledger, code, now)
    return lambda _: number


def with_plain_optimizer(frame: Frame) -> Frame:
    """The frame with the optimizer's state as tensors alone, with no optimizer at work on them."""
    state, optimizer = frame.state, frame.state.optimizer
    if optimizer.live is None:
        return frame
    tensors, numbers = optimizer.tensors, optimizer.numbers
    if optimizer.is_owned:
        tensors = tensors.owned(frame.began.updates)
    plain = OptimizerState(tensors, numbers, is_owned=optimizer.is_owned)
    return frame.having(state=attrs.evolve(state, optimizer=plain))

"""A step taken apart, and put together again for one member and for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from pipeline.ensembles._clip import ClipMembers
from pipeline.ensembles._forward import Batches, ForwardMembers, Initialiser
from pipeline.ensembles._members import Member
from pipeline.ensembles._optimizers import MemberOptimizers
from pipeline.ensembles._step import StepMembers
from pipeline.ensembles._window import UnscaleMembers
from pipeline.errors import SettingError
from pipeline.optim import Optimizer
from pipeline.records import Loss
from pipeline.transform import Chain, Transform, chain
from pipeline.transforms import Accumulate, ClipByGlobalNorm, EmitEvents, Forward, MaybeStep, ScaledBackward

__all__ = ["for_all", "for_one", "taken_apart"]

Parts = dict[type[Any], Any]
"""The transforms of a step, by class."""

_NEEDED = (Forward, ScaledBackward, Accumulate, MaybeStep)
_SHAPE = (Forward, ScaledBackward, Accumulate, ClipByGlobalNorm, MaybeStep, EmitEvents)


def taken_apart(step: Transform) -> Parts:
    """The step's transforms by class.

    Raises: SettingError for a step of any other shape.
    """
    parts: Parts = {type(transform): transform for transform in chain(step).transforms}
    strange = [transform for cls, transform in parts.items() if cls not in _SHAPE]
    places = [_SHAPE.index(cls) for cls in parts if cls in _SHAPE]
    if strange or places != sorted(places) or not parts.keys() >= set(_NEEDED):
        names = ", ".join(cls.__name__ for cls in _SHAPE)
        expected = f"a chain of {names}, in this order (the clip and EmitEvents may be left out)"
        cure = "What else a step does has no form for several members at once: train them one after another."
        raise SettingError("ensemble(step)", expected, strange[0] if strange else step, cure)
    if parts[Forward].recompute:
        raise SettingError("ensemble(step)'s Forward.recompute", "left out", parts[Forward].recompute)
    return parts


@attrs.frozen
class _Weighted:
    """A loss function times a member's factor."""

    loss: Callable[[Any, Any], Any]
    factor: float

    def __call__(self, model: Any, batch: Any) -> Any:
        found = self.loss(model, batch)
        if isinstance(found, Loss):
            return attrs.evolve(found, value=found.value * self.factor)
        return found * self.factor


def for_one(parts: Parts, member: Member) -> Chain:
    """The step of a member by itself."""
    own = dict(parts)
    if member.loss_weight != 1.0:
        forward: Forward = parts[Forward]
        weighted = _Weighted(forward.loss, member.loss_weight)
        own[Forward] = Forward(forward.model, weighted, autocast=forward.autocast)
    if member.rate is not None or member.weight_decay is not None:
        rule = parts[MaybeStep].optimizer
        own[MaybeStep] = MaybeStep(_with(rule, member))
    return chain(*own.values())


def _with(rule: Optimizer, member: Member) -> Optimizer:
    """The optimizer at a member's rate and weight decay."""
    settings = dict(rule.settings)
    if member.weight_decay is not None:
        settings["weight_decay"] = member.weight_decay
    rate = rule.lr if member.rate is None else member.rate
    return Optimizer(rule.cls, rate, groups=rule.groups, masters=rule.masters, compiled=rule.compiled, **settings)


def for_all(
    parts: Parts,
    members: tuple[Member, ...],
    steps: Sequence[Chain],
    initialiser: Initialiser,
    batches: Batches,
    draws: bool | None,
) -> Chain:
    """The step of all members at once."""
    optimizers = MemberOptimizers(tuple(_rule(step) for step in steps))
    return chain(
        ForwardMembers(parts[Forward], members, initialiser, batches, draws),
        parts[ScaledBackward],
        parts[Accumulate],
        UnscaleMembers(),
        *([ClipMembers(parts[ClipByGlobalNorm])] if ClipByGlobalNorm in parts else []),
        StepMembers(optimizers, parts.get(EmitEvents)),
    )


def _rule(step: Chain) -> Optimizer:
    """The optimizer of a step."""
    found: Any = step["MaybeStep"]
    if type(found.optimizer) is not Optimizer:
        raise SettingError("ensemble(step)'s optimizer", "an `Optimizer`", found.optimizer)
    return found.optimizer

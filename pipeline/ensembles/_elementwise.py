"""The optimizers that work element by element, over parameters whose first dimension is the member.

Each is the rule of its class in torch (`torch.optim`, lion-pytorch), with a rate and a weight decay for each member in
the place of one for all, and a count of updates for each. Lists of tensors are walked by torch, as in its own.
"""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from pipeline.errors import SettingError
from pipeline.optim import Optimizer

__all__ = ["Elementwise", "Kept", "Values", "elementwise", "over", "settings_of"]

Kept = Mapping[str, list[Tensor]]
"""What the optimizer keeps, by key, for each parameter."""


@attrs.frozen(eq=False)
class Values:
    """The settings in one update, the same for all members but for the `rate` and the `decay` of each.

    `rate` has an entry for each member, as precise as the device allows; `decay` likewise, or is None where all are 0.
    """

    rate: Tensor
    decay: Tensor | None
    others: Mapping[str, Any]


def over(members: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """A number for each member, so that it meets the member's row of each parameter.

    Of two dimensions, a row of such numbers for each parameter.
    """
    cast = {dtype: members.to(dtype) for dtype in {param.dtype for param in params}}
    if members.ndim == 2:
        rows = {dtype: numbers.unbind() for dtype, numbers in cast.items()}
        return [rows[param.dtype][i].view(-1, *[1] * (param.ndim - 1)) for i, param in enumerate(params)]
    return [cast[param.dtype].view(-1, *[1] * (param.ndim - 1)) for param in params]


def _with_decay(params: list[Tensor], grads: list[Tensor], values: Values) -> None:
    """Add the gradient of an L2 penalty."""
    if values.decay is not None:
        torch._foreach_addcmul_(grads, params, over(values.decay, params))


def _shrink(params: list[Tensor], values: Values) -> None:
    """Weight decay apart from the gradient."""
    if values.decay is not None:
        torch._foreach_mul_(params, over(1 - values.rate * values.decay, params))


def _sgd(params: list[Tensor], grads: list[Tensor], kept: Kept, values: Values) -> None:
    _with_decay(params, grads, values)
    momentum = values.others["momentum"]
    if momentum:
        moments = kept["momentum_buffer"]
        torch._foreach_mul_(moments, momentum)
        torch._foreach_add_(moments, grads)
        if values.others["nesterov"]:
            torch._foreach_add_(grads, moments, alpha=momentum)
        else:
            grads = moments
    torch._foreach_addcmul_(params, grads, over(values.rate, params), -1)


def _adam(params: list[Tensor], grads: list[Tensor], kept: Kept, values: Values) -> None:
    if values.others["decoupled_weight_decay"]:
        _shrink(params, values)
    else:
        _with_decay(params, grads, values)
    beta1, beta2 = values.others["betas"]
    counts = _counted(kept, values)
    torch._foreach_lerp_(kept["exp_avg"], grads, 1 - beta1)
    squares = kept["exp_avg_sq"]
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
    if values.others["amsgrad"]:
        torch._foreach_maximum_(kept["max_exp_avg_sq"], squares)
        squares = kept["max_exp_avg_sq"]
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, over((1 - beta2**counts).sqrt_(), params))
    torch._foreach_add_(roots, values.others["eps"])
    directions = torch._foreach_div(kept["exp_avg"], roots)
    torch._foreach_addcmul_(params, directions, over(values.rate / (1 - beta1**counts), params), -1)


def _rmsprop(params: list[Tensor], grads: list[Tensor], kept: Kept, values: Values) -> None:
    _with_decay(params, grads, values)
    _counted(kept, values)
    alpha, squares = values.others["alpha"], kept["square_avg"]
    torch._foreach_mul_(squares, alpha)
    torch._foreach_addcmul_(squares, grads, grads, 1 - alpha)
    if values.others["centered"]:
        torch._foreach_lerp_(kept["grad_avg"], grads, 1 - alpha)
        squares = torch._foreach_addcmul(squares, kept["grad_avg"], kept["grad_avg"], -1)
    _over_root(grads, squares, values)
    if values.others["momentum"]:
        torch._foreach_mul_(kept["momentum_buffer"], values.others["momentum"])
        torch._foreach_add_(kept["momentum_buffer"], grads)
        grads = kept["momentum_buffer"]
    torch._foreach_addcmul_(params, grads, over(values.rate, params), -1)


def _adagrad(params: list[Tensor], grads: list[Tensor], kept: Kept, values: Values) -> None:
    _with_decay(params, grads, values)
    counts = _counted(kept, values)
    torch._foreach_addcmul_(kept["sum"], grads, grads)
    _over_root(grads, kept["sum"], values)
    rates = values.rate / (1 + (counts - 1) * values.others["lr_decay"])
    torch._foreach_addcmul_(params, grads, over(rates, params), -1)


def _lion(params: list[Tensor], grads: list[Tensor], kept: Kept, values: Values) -> None:
    beta1, beta2 = values.others["betas"]
    _shrink(params, values)
    signs = torch._foreach_mul(kept["exp_avg"], beta1)
    torch._foreach_add_(signs, grads, alpha=1 - beta1)
    torch._foreach_sign_(signs)
    torch._foreach_addcmul_(params, signs, over(values.rate, params), -1)
    torch._foreach_mul_(kept["exp_avg"], beta2)
    torch._foreach_add_(kept["exp_avg"], grads, alpha=1 - beta2)


def _counted(kept: Kept, values: Values) -> Tensor:
    """Each member's count of updates with this one, a row for each parameter."""
    torch._foreach_add_(kept[_COUNT], 1)
    return torch.stack(kept[_COUNT]).to(values.rate.dtype)


def _over_root(grads: list[Tensor], squares: list[Tensor] | tuple[Tensor, ...], values: Values) -> None:
    """Divide by the root of these."""
    roots = torch._foreach_sqrt(squares)
    torch._foreach_add_(roots, values.others["eps"])
    torch._foreach_div_(grads, roots)


_COUNT = "step"


@attrs.frozen
class Elementwise:
    """One such optimizer: its step, and the entries that it keeps, each with the setting that it hangs on, if any.

    `only` are settings that must have this one value here, `fixed` what the class says beyond its signature, and
    `start` the settings that say what entries start at, where that is not 0.
    """

    step: Callable[[list[Tensor], list[Tensor], Kept, Values], None]
    keeps: Mapping[str, str | None]
    only: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    fixed: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    start: Mapping[str, str] = attrs.field(factory=dict[str, str])

    def keys(self, values: Values) -> list[str]:
        """What is kept for a parameter under these settings."""
        return [key for key, setting in self.keeps.items() if setting is None or values.others[setting]]

    def begin(self, key: str, param: Tensor, values: Values) -> Tensor:
        """An entry before the first update of its parameter."""
        if key == _COUNT:
            return torch.zeros(len(param), dtype=torch.float32, device=param.device)
        return torch.full_like(param, values.others[self.start[key]] if key in self.start else 0.0, requires_grad=False)

    def update(self, params: list[Tensor], grads: list[Tensor], kept: Kept, values: Values) -> None:
        """One update of `params` and of what is kept, in place; `grads` may be written to."""
        if values.others.get("maximize"):
            torch._foreach_neg_(grads)
        self.step(params, grads, kept, values)


_MOMENTS: Mapping[str, str | None] = {"step": None, "exp_avg": None, "exp_avg_sq": None, "max_exp_avg_sq": "amsgrad"}
_PLAIN: Mapping[str, Any] = {"capturable": False, "differentiable": False}

_KNOWN: Mapping[str, Elementwise] = {
    "torch.optim.sgd.SGD": Elementwise(_sgd, {"momentum_buffer": "momentum"}, {**_PLAIN, "dampening": 0}),
    "torch.optim.adam.Adam": Elementwise(_adam, _MOMENTS, _PLAIN),
    "torch.optim.adamw.AdamW": Elementwise(_adam, _MOMENTS, _PLAIN, {"decoupled_weight_decay": True}),
    "torch.optim.rmsprop.RMSprop": Elementwise(
        _rmsprop, {"step": None, "square_avg": None, "momentum_buffer": "momentum", "grad_avg": "centered"}, _PLAIN
    ),
    "torch.optim.adagrad.Adagrad": Elementwise(
        _adagrad, {"step": None, "sum": None}, _PLAIN, start={"sum": "initial_accumulator_value"}
    ),
    "lion_pytorch.lion_pytorch.Lion": Elementwise(
        _lion, {"exp_avg": None}, {"use_triton": False, "decoupled_weight_decay": False}
    ),
}
"""By the name of the class, so that none has to be installed. A subclass may do anything, and is not meant."""


def elementwise(rule: Optimizer) -> Elementwise:
    """The rule of an optimizer's class.

    Raises: SettingError for a class that is not on the list, and for settings that have no form here.
    """
    cls = rule.cls
    found = _KNOWN.get(f"{cls.__module__}.{cls.__qualname__}")
    if found is None:
        names = ", ".join(name.rpartition(".")[2] for name in _KNOWN)
        cure = "Another may mix the members, which lie in one tensor: train them one after another."
        raise SettingError("ensemble(step)'s optimizer", f"one of {names}", cls.__name__, cure)
    for setting in ("masters", "compiled"):
        if getattr(rule, setting):
            raise SettingError(f"ensemble(step)'s Optimizer.{setting}", "left out", getattr(rule, setting))
    for given in (rule.settings, *(group.settings for group in rule.groups)):
        for key, value in given.items():
            if key in found.only and value != found.only[key]:
                raise SettingError(f"ensemble(step)'s Optimizer setting {key!r}", f"{found.only[key]!r}", value)
            if callable(value) and key != "weight_decay":
                expected = "a constant: only the rate and the weight decay are scheduled member by member"
                raise SettingError(f"ensemble(step)'s Optimizer setting {key!r}", expected, value)
    return found


def settings_of(rule: Optimizer, found: Elementwise) -> dict[str, Any]:
    """All settings of an optimizer: what its class takes for granted, what it says itself, and what was given."""
    taken = inspect.signature(rule.cls).parameters.values()
    defaults = {p.name: p.default for p in taken if p.default is not inspect.Parameter.empty}
    return {**defaults, **rule.settings, **found.fixed}

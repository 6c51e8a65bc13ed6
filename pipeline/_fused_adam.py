"""The fused kernel of Adam and AdamW on the CPU, called over lists that are put together once."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import attrs
import torch
from torch import Tensor, nn

_grad = attrgetter("grad")


@attrs.frozen(eq=False)
class _Lists:
    """The tensors of one group, in its order."""

    group: Mapping[str, Any]
    kernel: Any
    params: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]
    steps: list[Tensor]


@attrs.frozen(eq=False)
class FusedAdam:
    """What `step` of torch's own fused Adam and AdamW comes down to, where every parameter has a gradient.

    Torch gathers the same lists at each step, and sorts them by device and dtype: as long as the update itself of a
    small model, and in Python, parameter by parameter.
    """

    lists: tuple[_Lists, ...]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> FusedAdam | None:
        """None where torch's own way is the only one: another class or device, or parameters without a state yet."""
        groups = optimizer.param_groups
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or not all(g.get("fused") for g in groups):
            return None
        found = [_lists(optimizer, group) for group in groups]
        lists = tuple(of_group for of_group in found if of_group is not None)
        return cls(lists) if len(lists) == len(found) else None

    def step(self, grad_scale: Tensor | None) -> bool:
        """One update by each `.grad` divided by `grad_scale`.

        False, and none, where a parameter has no dense gradient, or where `amsgrad` is not as it was.
        """
        if any(bool(of_group.group["amsgrad"]) != bool(of_group.max_exp_avg_sqs) for of_group in self.lists):
            return False
        grads = [list(map(_grad, of_group.params)) for of_group in self.lists]
        if any(grad is None or grad.layout is not torch.strided for of_group in grads for grad in of_group):
            return False
        with torch.no_grad():
            for of_group, its in zip(self.lists, grads, strict=True):
                group, (beta1, beta2) = of_group.group, of_group.group["betas"]
                torch._foreach_add_(of_group.steps, 1)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
                of_group.kernel(
                    of_group.params,
                    its,
                    of_group.exp_avgs,
                    of_group.exp_avg_sqs,
                    of_group.max_exp_avg_sqs,
                    of_group.steps,
                    lr=group["lr"],
                    beta1=beta1,
                    beta2=beta2,
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    amsgrad=group["amsgrad"],
                    maximize=group["maximize"],
                    grad_scale=grad_scale,
                    found_inf=None,
                )
        return True


def _lists(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> _Lists | None:
    params: list[Tensor] = group["params"]
    states = [optimizer.state.get(param, {}) for param in params]
    plain = all(type(param) in (Tensor, nn.Parameter) and param.is_cpu for param in params)
    alike = plain and len({param.dtype for param in params}) == 1
    settings = (*group["betas"], group["weight_decay"], group["eps"])
    if not alike or not all(states) or any(isinstance(value, Tensor) for value in settings):
        return None
    decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
    return _Lists(
        group,
        torch._fused_adamw_ if decoupled else torch._fused_adam_,  # type: ignore[attr-defined]
        params,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states if group["amsgrad"]],
        [state["step"] for state in states],
    )

"""What an optimizer keeps for its parameters, found out from a step of twins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from pipeline.tensors import Tensors

__all__ = ["missing_entry"]

Build = Callable[[Tensors], tuple[torch.optim.Optimizer, list[str]]]
Step = Callable[[torch.optim.Optimizer], object]


def missing_entry(kept: Mapping[str, Collection[str]], stepped: Tensors, build: Build, step: Step) -> str | None:
    """An entry that a new optimizer makes in its first step and that is not among those `kept` for the parameter.

    Asked of the smallest parameter of each rank, as some classes keep other things for matrices than for vectors. The
    parameters, their gradients and the random generators stay as they are.
    """
    asked: dict[int, str] = {}
    for name, param in sorted(stepped.items(), key=lambda item: item[1].numel()):
        if param.grad is not None and kept.get(name):
            asked.setdefault(param.dim(), name)
    twins = Tensors({name: _twin(stepped[name]) for name in asked.values()})
    if not twins:
        return None
    optimizer, names = build(twins)
    with torch.random.fork_rng(sorted({twin.device.index for twin in twins.flat if twin.is_cuda})):
        step(optimizer)
    for name in names:
        made = optimizer.state.get(twins[name], {})
        missing = [key for key, value in made.items() if value is not None and key not in kept[name]]
        if missing:
            return missing[0]
    return None


def _twin(param: Tensor) -> Tensor:
    twin = param.detach().clone().requires_grad_()
    twin.grad = None if param.grad is None else param.grad.clone()
    return twin

"""Random numbers in a forward that runs for all members at once: each member's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import _randomness as randomness
from pipeline.errors import SettingError

__all__ = ["MemberDraws", "draws"]

_SEEDED: Any = torch.Tag.nondeterministic_seeded


def draws(model: nn.Module) -> bool:
    """Whether the model has modules that draw random numbers in train mode, and is in it."""
    return any(module.training and _has_dropout(module) for module in model.modules())


def _has_dropout(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):  # pyright: ignore[reportPrivateUsage]
        return module.p > 0
    return isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and module.dropout > 0


class MemberDraws(TorchDispatchMode):
    """While it is entered, whatever is drawn for all members at once is drawn for one after another.

    Each draws from the generators as its own key has seeded them: on the CPU what it would draw by itself, to the bit.
    Operators below `vmap` with `randomness="different"` have the member as the first dimension of what they draw, and
    of the tensors that they draw by.
    """

    def __init__(self, generators: Sequence[torch.Generator], keys: Sequence[int]) -> None:
        super().__init__()
        self._generators = generators
        self._places: list[list[Tensor]] = []
        for key in keys:
            randomness.seed(generators, key)
            self._places.append(randomness.read(generators))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _SEEDED not in func.tags:
            return func(*args, **(kwargs or {}))
        if not any(self._is_of_members(arg) for arg in args):
            expected = "one that draws for all members at once, such as dropout, torch.rand or Tensor.normal_"
            raise SettingError("A random operator in an ensemble's forward", expected, str(func))
        drawn = [self._drawn(place, func, args, kwargs or {}) for place in range(len(self._places))]
        if func._schema.is_mutable:  # the members' rows of the tensor itself were written to
            return args[0]
        return pytree.tree_map(lambda *rows: torch.stack(rows), *drawn)

    def _drawn(self, place: int, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What one member draws, going on from where it has left off."""
        randomness.write(self._generators, self._places[place])
        rows = [
            arg if not self._is_of_members(arg) else arg[place] if isinstance(arg, Tensor) else arg[1:] for arg in args
        ]
        drawn = func(*rows, **kwargs)
        self._places[place] = randomness.read(self._generators)
        return drawn

    def _is_of_members(self, arg: Any) -> bool:
        """Whether it is a tensor with a row for each member, or such a shape."""
        shape: Sequence[int] = arg.shape if isinstance(arg, Tensor) else arg if isinstance(arg, (list, tuple)) else ()
        return bool(shape) and shape[0] == len(self._places)

"""The state of an optimizer, by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import attrs
from torch import Tensor
from torch.utils import _pytree as pytree

from pipeline.records._trees import clone_tree
from pipeline.tensors import Lease, Tensors

__all__ = ["LiveOptimizer", "OptimizerState"]

_EMPTY = Tensors()
_NOTHING: Mapping[str, Any] = {}


class LiveOptimizer(Protocol):
    """What a running optimizer keeps of its own, read through `OptimizerState`."""

    lease: Lease

    def tensors(self) -> dict[str, Tensor]: ...
    def numbers(self) -> dict[str, Any]: ...


@attrs.frozen(eq=False, repr=False)
class OptimizerState:
    """The state of an optimizer, by name: `tensors["0.weight/exp_avg"]`, `numbers["group default/k"]`.

    Empty before the first update. A running optimizer (`live`) is read when asked for, not copied at every update;
    the generation says whether this record is still the newest one.
    """

    _tensors: Tensors = _EMPTY
    _numbers: Mapping[str, Any] = _NOTHING
    live: LiveOptimizer | None = None
    generation: int = 0
    is_owned: bool = False

    @property
    def tensors(self) -> Tensors:
        """Moments, step counts and whatever else the optimizer keeps in tensors, as `parameter/key`."""
        if self.live is None:
            return self._tensors
        self.live.lease.check(self.generation)
        return Tensors.bound(self.live.tensors(), self.live.lease)

    @property
    def numbers(self) -> Mapping[str, Any]:
        """What the optimizer keeps in plain numbers, as `parameter/key` or `group name/key`."""
        if self.live is None:
            return self._numbers
        self.live.lease.check(self.generation)
        return self.live.numbers()

    @property
    def is_stale(self) -> bool:
        """Whether a later record has taken the entries over."""
        return self._tensors.is_stale if self.live is None else self.generation != self.live.lease.generation

    def of(self, name: str) -> dict[str, Any]:
        """The state of one parameter: `state.optimizer.of("0.weight")["exp_avg"]`."""
        entries: dict[str, Any] = {**self.tensors, **self.numbers}
        return {key.removeprefix(f"{name}/"): value for key, value in entries.items() if key.startswith(f"{name}/")}

    def copy(self) -> OptimizerState:
        """The same values in memory of their own."""
        return OptimizerState(self.tensors.copy(), clone_tree(dict(self.numbers)))

    def owned(self, update: int | None = None) -> OptimizerState:
        """Take it over: this record goes stale, the returned one may be written to in place."""
        if self.live is None:
            return OptimizerState(self._tensors.owned(update), self._numbers, is_owned=True)
        lease = self.live.lease
        return attrs.evolve(self, generation=lease.renew(self.generation, update), is_owned=True)

    def borrowed(self) -> OptimizerState:
        """The same in a record that transforms do not write to."""
        if self.live is None:
            return OptimizerState(self._tensors.borrowed(), self._numbers)
        self.live.lease.check(self.generation)
        return attrs.evolve(self, is_owned=False)

    def renewed(self) -> OptimizerState:
        """The newest record of these entries, whoever wrote to them since."""
        if self.live is None:
            return OptimizerState(self._tensors.renewed(), self._numbers, is_owned=self.is_owned)
        return attrs.evolve(self, generation=self.live.lease.generation)

    def __reduce__(self) -> tuple[Any, ...]:
        return OptimizerState, (self.tensors, dict(self.numbers))

    def __repr__(self) -> str:
        if self.is_stale:
            return "OptimizerState(stale)"
        return f"OptimizerState({self.tensors!r}, {len(self.numbers)} numbers)"


pytree.register_pytree_node(
    OptimizerState,
    lambda o: ([o.tensors, dict(o.numbers)], None),
    lambda children, _: OptimizerState(*children),
)

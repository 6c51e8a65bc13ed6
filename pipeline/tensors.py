"""`Tensors`, an immutable mapping name -> tensor, and the lease that makes donation safe.

Nothing that a caller holds may change behind its back, and nothing may be copied that need not be. Both hold by
*donation*: the record that owns its buffers may let the next one reuse them. Each reuse raises the generation of
the lease that they share, and a record of an older generation is stale: reading it raises `StaleStateError`.
The check compares two integers; nothing is scanned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor

from pipeline.errors import SettingError, StaleStateError

__all__ = ["Lease", "Tensors", "clone_leaf"]


def clone_leaf(tensor: Tensor) -> Tensor:
    """A copy of `tensor` in memory of its own: no graph, the same `requires_grad`."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class Lease:
    """Who may write to a set of buffers: the record whose generation is the lease's own.

    All records bound to one module share its lease, so that training through one of them makes the others stale.
    """

    __slots__ = ("__weakref__", "_module", "generation", "update")

    def __init__(self, module: torch.nn.Module | None = None) -> None:
        self.generation = 0
        self.update: int | None = None
        self._module = None if module is None else weakref.ref(module)

    @classmethod
    def of(cls, module: torch.nn.Module, kind: Literal["params", "buffers"]) -> Lease:
        """The one lease on the module's parameters or buffers."""
        return _LEASES.setdefault(module, {}).setdefault(kind, cls(module))

    def holds(self, module: torch.nn.Module) -> bool:
        """Whether these buffers are the very tensors of `module`."""
        return self._module is not None and self._module() is module

    def check(self, generation: int) -> None:
        """Raise StaleStateError unless `generation` is the newest."""
        if generation != self.generation:
            raise StaleStateError(self.update)

    def renew(self, generation: int, update: int | None) -> int:
        """Hand the buffers on: the record of `generation` goes stale; the new generation is returned."""
        self.check(generation)
        self.generation = generation + 1
        self.update = update
        return self.generation


# Keyed weakly: a module's lease lives as long as the module, and keeps nothing alive itself.
_LEASES: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, Lease]] = weakref.WeakKeyDictionary()


class Tensors(Mapping[str, Tensor]):
    """An immutable mapping name -> tensor: parameters, buffers, gradients, optimizer moments.

    Built by hand, `Tensors({"w": w})`, it owns nothing: transforms leave the tensors untouched. Records that
    `fold` and `scan` work on own theirs and are updated in place; see `writable`.

    Raises: StaleStateError on any access once a later record has taken the buffers over.
    """

    __slots__ = ("_generation", "_index", "_lease", "_owned", "_values")

    _index: Mapping[str, int]
    _values: tuple[Tensor, ...]
    _lease: Lease
    _generation: int
    _owned: bool

    def __init__(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] = ()) -> None:
        items = dict(tensors)
        for name, tensor in items.items():
            if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise SettingError(f"Tensors[{name!r}]", "a torch.Tensor", tensor)
        object.__setattr__(self, "__class__", _Unfinished)
        index = {name: i for i, name in enumerate(items)}
        cast("_Unfinished", self).finished(index, tuple(items.values()), Lease(), 0, False)

    @staticmethod
    def _make(
        index: Mapping[str, int], values: tuple[Tensor, ...], lease: Lease, generation: int, owned: bool
    ) -> Tensors:
        return object.__new__(_Unfinished).finished(index, values, lease, generation, owned)

    @classmethod
    def over(cls, names: Iterable[str], values: Iterable[Any]) -> Tensors:
        """Names and values as they are, unchecked: a pytree may hold anything in a tensor's place for a while."""
        return cls._make({name: i for i, name in enumerate(names)}, tuple(values), Lease(), 0, False)

    @classmethod
    def bound(cls, tensors: Mapping[str, Tensor], lease: Lease) -> Tensors:
        """These very tensors, shared with whoever holds them and with every record of that lease."""
        index = {name: i for i, name in enumerate(tensors)}
        return cls._make(index, tuple(tensors.values()), lease, lease.generation, False)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Tensors is immutable: use `replace` for a record with another {name.lstrip('_')}")

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """The tensors in order."""
        if self._generation != self._lease.generation:
            raise StaleStateError(self._lease.update)
        return self._values

    @property
    def index(self) -> Mapping[str, int]:
        """Name -> place in `flat`; shared by all records of the same names."""
        return self._index

    @property
    def lease(self) -> Lease:
        """Who may write to these tensors."""
        return self._lease

    @property
    def is_owned(self) -> bool:
        """Whether a transform may write to these tensors in place."""
        return self._owned

    @property
    def is_stale(self) -> bool:
        """Whether a later record has taken the buffers over."""
        return self._generation != self._lease.generation

    def __getitem__(self, name: str) -> Tensor:
        return self.flat[self._index[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    __eq__ = object.__eq__  # by identity: `==` on tensors has no single answer; pipeline.testing compares

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        if self.is_stale:
            return f"Tensors({len(self)} tensors, stale)"
        if not self._values:
            return "Tensors()"
        kinds = sorted({str(t.dtype).removeprefix("torch.") for t in self._values})
        if len(self) <= 3:
            shapes = ", ".join(f"{name}: {'×'.join(map(str, self[name].shape)) or '0-d'}" for name in self)
            return f"Tensors({shapes}; {', '.join(kinds)})"
        return f"Tensors({len(self)} tensors, {sum(t.numel() for t in self._values):,} elements, {', '.join(kinds)})"

    # -- making others ------------------------------------------------------------------------------------------

    def replace(self, values: Iterable[Tensor]) -> Tensors:
        """The same names over other tensors, in a record that shares nothing with this one but its ownership."""
        return Tensors._make(self._index, tuple(values), Lease(), 0, self._owned)

    def present(self, values: Iterable[Tensor | None]) -> Tensors:
        """Those of the names that have a value, in a record that shares nothing with this one but its ownership."""
        values = tuple(values)
        there = tuple([value for value in values if value is not None])
        if len(there) == len(values):
            return self.replace(there)
        names = [name for name, value in zip(self._index, values, strict=True) if value is not None]
        return Tensors._make({name: i for i, name in enumerate(names)}, there, Lease(), 0, self._owned)

    def rebound(self, values: Iterable[Tensor]) -> Tensors:
        """The same record over other tensors, under the same lease: for a module that put new ones in place."""
        return Tensors._make(self._index, tuple(values), self._lease, self._generation, self._owned)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Tensors:
        """The same names over `fn(tensor)`, owned by nobody."""
        return Tensors._make(self._index, tuple(fn(t) for t in self.flat), Lease(), 0, False)

    def copy(self) -> Tensors:
        """The same values in memory of its own; bound to no module, owned by nobody."""
        return self.map(clone_leaf)

    def owned(self, update: int | None = None) -> Tensors:
        """Take the buffers over: this record goes stale, the returned one may be written to in place."""
        if not self._values:  # nothing to take, and the empty record is shared by all
            return Tensors._make(self._index, (), Lease(), 0, True)
        return Tensors._make(self._index, self._values, self._lease, self._lease.renew(self._generation, update), True)

    def hand_on(self, update: int | None = None) -> None:
        """Let the buffers go to a record that is made elsewhere: this one goes stale."""
        if self._values:
            self._lease.renew(self._generation, update)

    def renewed(self) -> Tensors:
        """The same tensors as they are now, whoever wrote to them since."""
        return Tensors._make(self._index, self._values, self._lease, self._lease.generation, self._owned)

    def borrowed(self) -> Tensors:
        """The same tensors in a record that transforms do not write to."""
        self._lease.check(self._generation)
        return Tensors._make(self._index, self._values, self._lease, self._generation, False)

    def writable(self, update: int | None = None) -> Tensors:
        """The same values where they may be written to now.

        In place when this record owns its buffers (it goes stale), in a copy when it does not.
        """
        return self.owned(update) if self._owned else self.copy()

    def __copy__(self) -> Tensors:
        return self

    def __deepcopy__(self, memo: Any) -> Tensors:
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return Tensors, (dict(self),)  # a copy owns nothing and is bound to nothing


class _Unfinished(Tensors):
    """A record that still lets its fields be written. Going around a refusal takes twice as long: a call a field."""

    __slots__ = ()
    __setattr__ = object.__setattr__  # type: ignore[assignment]

    def finished(
        self, index: Mapping[str, int], values: tuple[Tensor, ...], lease: Lease, generation: int, owned: bool
    ) -> Tensors:
        """The record with these fields, which are not to be written any more."""
        self._index = index
        self._values = values
        self._lease = lease
        self._generation = generation
        self._owned = owned
        self.__class__ = Tensors  # pyright: ignore[reportAttributeAccessIssue]
        return self

"""From device to host: the measured values of many events in one transfer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipeline.errors import LossError
from pipeline.events import Event

__all__ = ["settle", "to_host"]


def to_host(values: Sequence[Tensor]) -> list[float]:
    """The values of 0-d tensors as numbers: one transfer for each dtype and device, usually one in all."""
    kinds = {(value.dtype, value.device) for value in values}
    if len(kinds) == 1:
        return torch.stack(tuple(values)).tolist()
    numbers: list[float] = [0.0] * len(values)
    for kind in kinds:
        places = [i for i, value in enumerate(values) if (value.dtype, value.device) == kind]
        for place, number in zip(places, torch.stack([values[i] for i in places]).tolist(), strict=True):
            numbers[place] = number
    return numbers


def settle(events: Sequence[Event]) -> list[Event]:
    """The same events with every 0-d tensor in them as a number."""
    found: list[Tensor] = []

    def note(value: Any) -> Any:
        if isinstance(value, Tensor):
            found.append(value.detach() if value.requires_grad else value)
        return value

    held: list[list[tuple[str, Any]]] = []
    for event in events:
        before = [(name, getattr(event, name)) for name in _measured(type(event))]
        held.append([(name, value) for name, value in before if _map(value, note) is not None])
    if not found:
        return list(events)
    if any(value.ndim for value in found):
        raise _not_0d(events)
    numbers = iter(to_host(found))

    def number(value: Any) -> Any:
        return next(numbers) if isinstance(value, Tensor) else value

    return [
        _with(event, {name: _map(value, number) for name, value in values}) if values else event
        for event, values in zip(events, held, strict=True)
    ]


def _not_0d(events: Sequence[Event]) -> LossError:
    """The error that names the first measured value which is no single number."""
    for event in events:
        for name in _measured(type(event)):
            for leaf in pytree.tree_leaves({name: getattr(event, name)}):
                if isinstance(leaf, Tensor) and leaf.ndim:
                    where, got = f"{type(event).__name__}.{name}", f"a tensor of shape {tuple(leaf.shape)}"
                    return LossError(where, "0-d where it is measured", got, "reduce it, or take it out of the facts")
    raise AssertionError("called without such a value")


def _map(value: Any, fn: Callable[[Any], Any]) -> Any:
    """`fn` over a value, the values of a mapping, and the pairs in one."""
    if isinstance(value, dict):
        entries: dict[str, Any] = value
        return {key: _map(entry, fn) for key, entry in entries.items()} if entries else value
    if isinstance(value, tuple):
        parts: tuple[Any, ...] = value
        return tuple([fn(part) for part in parts])
    return fn(value)


def _with(event: Event, changed: dict[str, Any]) -> Event:
    """`attrs.evolve`, at a tenth of its cost where the event keeps all its fields in its dictionary."""
    cls = type(event)
    if len(vars(event)) != len(attrs.fields(cls)):  # a subclass with slots
        return attrs.evolve(event, **changed)
    new = object.__new__(cls)
    vars(new).update(vars(event), **changed)
    return new


_PLAIN = frozenset({"int", "int | None", "str", "str | None", "bool", "float | None", "Mapping[str, float]"})


@lru_cache
def _measured(cls: type[Event]) -> tuple[str, ...]:
    """The fields that may hold a measured value: all but those annotated as counts, names, rates and times."""
    plain = {*_PLAIN, "tuple[str, ...]", int, str, bool}
    return tuple(f.name for f in attrs.fields(cls) if f.type not in plain and f.name != "time")

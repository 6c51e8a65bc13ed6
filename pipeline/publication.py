"""From device to host: the measured values of many events in one transfer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

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
            found.append(value)
        return value

    for event in events:
        _map(event, note)
    if not found:
        return list(events)
    numbers = iter(to_host([value.detach() for value in found]))
    return [_map(event, lambda value: next(numbers) if isinstance(value, Tensor) else value) for event in events]


def _map(event: Event, fn: Callable[[Any], Any]) -> Event:
    """`event` with `fn` over its values, and over those of the mappings in it."""
    changed: dict[str, Any] = {}
    for name in _names(type(event)):
        value = getattr(event, name)
        if isinstance(value, Tensor):
            changed[name] = fn(value)
        elif isinstance(value, Mapping) and value:
            items: Mapping[str, Any] = value
            changed[name] = {key: fn(entry) for key, entry in items.items()}
    return attrs.evolve(event, **changed) if changed else event


_CACHE: dict[type[Event], tuple[str, ...]] = {}


def _names(cls: type[Event]) -> tuple[str, ...]:
    names = _CACHE.get(cls)
    if names is None:
        names = _CACHE[cls] = tuple(field.name for field in attrs.fields(cls))
    return names

"""From device to host: the measured values of many events in one transfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
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
    places: list[tuple[int, str, str | None]] = []
    for i, event in enumerate(events):
        for name in _measured(type(event)):
            value = getattr(event, name)
            if isinstance(value, Tensor):
                found.append(value.detach() if value.requires_grad else value)
                places.append((i, name, None))
            elif isinstance(value, Mapping) and value:
                entries: Mapping[str, Any] = value
                for key, entry in entries.items():
                    if isinstance(entry, Tensor):
                        found.append(entry.detach())
                        places.append((i, name, key))
    if not found:
        return list(events)
    changes: dict[int, dict[str, Any]] = {}
    for (i, name, key), number in zip(places, to_host(found), strict=True):
        changed = changes.setdefault(i, {})
        if key is None:
            changed[name] = number
        else:
            changed.setdefault(name, dict(getattr(events[i], name)))[key] = number
    return [_with(event, changes[i]) if i in changes else event for i, event in enumerate(events)]


def _with(event: Event, changed: dict[str, Any]) -> Event:
    """`attrs.evolve`, which looks its class up anew at every call."""
    cls = type(event)
    return cls(**{name: changed[name] if name in changed else getattr(event, name) for name in _fields(cls)})


@lru_cache
def _fields(cls: type[Event]) -> tuple[str, ...]:
    return tuple(field.name for field in attrs.fields(cls))


@lru_cache
def _measured(cls: type[Event]) -> tuple[str, ...]:
    """The fields that may hold a measured value: all but those annotated as counts, names and times."""
    plain = {"int", "int | None", "str", "bool", int, str, bool}
    return tuple(f.name for f in attrs.fields(cls) if f.type not in plain and f.name != "time")

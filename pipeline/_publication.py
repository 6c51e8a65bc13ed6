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

__all__ = ["Transfer", "settle", "to_host"]


def to_host(values: Sequence[Tensor]) -> list[float]:
    """The values of 0-d tensors as numbers: one transfer for each dtype and device, usually one in all."""
    return _start(values)()


def _start(values: Sequence[Tensor]) -> Callable[[], list[float]]:
    """Start the transfer, and return what waits for it."""
    kinds = {(value.dtype, value.device) for value in values}
    if len(kinds) == 1:
        return _copied(torch.stack(tuple(values)))
    places = {kind: [i for i, v in enumerate(values) if (v.dtype, v.device) == kind] for kind in kinds}
    copies = {kind: _copied(torch.stack([values[i] for i in of_kind])) for kind, of_kind in places.items()}

    def numbers() -> list[float]:
        found: list[float] = [0.0] * len(values)
        for kind, of_kind in places.items():
            for place, number in zip(of_kind, copies[kind](), strict=True):
                found[place] = number
        return found

    return numbers


def _copied(values: Tensor) -> Callable[[], list[float]]:
    """A copy in the host's memory, begun without waiting where the device can."""
    if not values.is_cuda:
        return values.tolist
    here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def numbers() -> list[float]:
        done.synchronize()
        return here.tolist()

    return numbers


class Transfer:
    """Events whose measured values are on their way to the host, without anyone waiting; `events()` waits for them."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._given = events
        self._found: list[Tensor] = []
        self._held: list[list[tuple[str, Any]]] = []
        for event in events:
            held: list[tuple[str, Any]] = []
            for name in _measured(type(event)):
                value, before = getattr(event, name), len(self._found)
                if not isinstance(value, float):
                    _map(value, self._note)
                if len(self._found) > before:
                    held.append((name, value))
            self._held.append(held)
        if any(value.ndim for value in self._found):
            raise _not_0d(events)
        self._numbers = _start(self._found)

    def _note(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._found.append(value.detach() if value.requires_grad else value)
        return value

    def events(self) -> list[Event]:
        """The same events with every 0-d tensor in them as a number."""
        if not self._found:
            return list(self._given)
        numbers = iter(self._numbers())

        def number(value: Any) -> Any:
            return next(numbers) if isinstance(value, Tensor) else value

        return [
            _with(event, {name: _map(value, number) for name, value in values}) if values else event
            for event, values in zip(self._given, self._held, strict=True)
        ]


def settle(events: Sequence[Event]) -> list[Event]:
    """The same events with every 0-d tensor in them as a number, now."""
    return Transfer(events).events()


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

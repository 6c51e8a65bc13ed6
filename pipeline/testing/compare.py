"""Records compared by value: `==` on tensors has no single answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from pipeline.errors import LawError
from pipeline.records import OptimizerState

__all__ = ["assert_records_equal"]


def assert_records_equal(actual: Any, expected: Any, *, rtol: float = 0.0, what: str = "record") -> None:
    """Raise LawError, naming the place, unless the two records hold the same values.

    Value for value by default, NaN equal to NaN and -0 to 0, dtype, shape and `requires_grad` included. With `rtol`,
    tensors may differ by `rtol` times the largest finite magnitude in the expected one. Works on records, tensors,
    events, and on tuples, lists and mappings of them.
    """
    ours, theirs = dict(_leaves(actual, what)), dict(_leaves(expected, what))
    if ours.keys() != theirs.keys():
        lacks = ", ".join(sorted(theirs.keys() - ours.keys())) or "nothing"
        more = ", ".join(sorted(ours.keys() - theirs.keys())) or "nothing"
        raise LawError(f"{what}: the records differ in form: the first lacks {lacks} and has besides {more}")
    for place, leaf in theirs.items():
        problem = _difference(ours[place], leaf, rtol)
        if problem:
            raise LawError(f"{place}: {problem}")


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, OptimizerState):
        yield from _leaves(value.tensors, place)
        yield from _leaves(value.numbers, f"{place}.numbers")
    elif isinstance(value, Mapping):
        entries: Mapping[Any, Any] = value
        yield f"{place} (its names)", sorted(map(str, entries))
        for name, entry in entries.items():
            yield from _leaves(entry, f"{place}[{name!r}]")
    elif isinstance(value, (tuple, list)):
        items: list[Any] = list(value)  # pyright: ignore[reportUnknownArgumentType]
        yield f"{place} (its length)", len(items)
        for i, entry in enumerate(items):
            yield from _leaves(entry, f"{place}[{i}]")
    elif attrs.has(type(value)) and not isinstance(value, type):
        yield f"{place} (its class)", type(value).__name__
        for field in attrs.fields(type(value)):
            yield from _leaves(getattr(value, field.name.lstrip("_")), f"{place}.{field.name}")
    else:
        yield place, value


def _difference(actual: Any, expected: Any, rtol: float) -> str:
    """What sets two leaves apart; empty where they are equal."""
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        both_nan = (
            isinstance(actual, float) and isinstance(expected, float) and math.isnan(actual) and math.isnan(expected)
        )
        same = isinstance(actual, Tensor) == isinstance(expected, Tensor) and (both_nan or actual == expected)
        return "" if same else f"{actual!r} is not {expected!r}"
    kinds = [(tuple(t.shape), t.dtype, t.requires_grad) for t in (actual, expected)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} is not {kinds[1]} (shape, dtype, requires_grad)"
    ours, theirs = actual.detach(), expected.detach()
    if ours.layout is not torch.strided:
        ours, theirs = ours.to_dense(), theirs.to_dense()
    finite = theirs[theirs.isfinite()]
    tolerance = rtol * float(finite.abs().max()) if rtol and finite.numel() else 0.0
    near = torch.isclose(ours, theirs, rtol=0.0, atol=tolerance, equal_nan=True)
    if bool(near.all()):
        return ""
    where = tuple(int(i) for i in (~near).nonzero()[0])
    a, b = ours[where].item(), theirs[where].item()
    return f"{int((~near).sum())} of {near.numel()} elements differ, first at {where}: {a!r} is not {b!r}"

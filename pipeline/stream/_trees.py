"""Batches in whatever container: the same container with other tensors, and cut into pieces."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, cast

import attrs
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from pipeline.transforms._batches import samples_in


def rebuilt(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same containers with `change(tensor)` for each tensor, and everything else the same object.

    Containers that torch knows, other mappings, attrs records and dataclasses. A tensor that is there twice is changed
    once, and is there twice afterwards.
    """
    changed: dict[int, Tensor] = {}

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in changed:
                changed[id(value)] = change(value)
            return changed[id(value)]
        if isinstance(value, PackedSequence):
            order = [None if part is None else leaf(part) for part in (value.sorted_indices, value.unsorted_indices)]
            return PackedSequence(leaf(value.data), value.batch_sizes, *order)  # the sizes belong on the host
        if isinstance(value, Mapping):
            return _mapping(cast("Mapping[Any, Any]", value), walk)
        return _record(value, walk) if _is_record(value) else value

    def walk(value: Any) -> Any:
        return pytree.tree_map(leaf, value, is_leaf=lambda part: isinstance(part, PackedSequence))

    return walk(tree)


def _mapping(mapping: Mapping[Any, Any], walk: Callable[[Any], Any]) -> Any:
    entries = {name: walk(entry) for name, entry in mapping.items()}
    if not isinstance(mapping, MutableMapping):
        return type(mapping)(entries)  # pyright: ignore[reportCallIssue]
    other: Any = copy.copy(mapping)
    other.update(entries)
    return other


def _is_record(value: object) -> bool:
    kind = type(value)
    return hasattr(kind, "__attrs_attrs__") or hasattr(kind, "__dataclass_fields__")


def _record(record: Any, walk: Callable[[Any], Any]) -> Any:
    names: Any = getattr(record, "__dataclass_fields__", None) or [a.name for a in attrs.fields(type(record))]
    other = copy.copy(record)
    for name in names:
        object.__setattr__(other, name, walk(getattr(record, name)))
    return other


def pieces(batch: Any, size: int) -> list[Any]:
    """A batch in pieces of at most `size` samples; see `split`."""
    samples = 1 if batch is None else samples_in(batch)
    if samples <= size:
        return [batch]
    return [_piece(batch, samples, start, start + size) for start in range(0, samples, size)]


def _piece(batch: Any, samples: int, start: int, stop: int) -> Any:
    def is_cut(value: Any) -> bool:
        return isinstance(value, list) and len(cast("list[Any]", value)) == samples and not _holds_tensors(value)

    def cut(value: Any) -> Any:
        return value[start:stop] if isinstance(value, list) and is_cut(value) else value

    lists_cut = pytree.tree_map(cut, batch, is_leaf=is_cut)
    return rebuilt(lists_cut, lambda t: t[start:stop] if t.ndim and len(t) == samples else t)


def _holds_tensors(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(tree))

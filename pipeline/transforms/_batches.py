"""What is in a batch, whatever container it comes in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from torch import Tensor
from torch.utils import _pytree as pytree


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor in a batch: containers that torch knows, other mappings, attrs records and dataclasses."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            entries: Mapping[Any, Any] = leaf
            for entry in entries.values():
                yield from tensors_in(entry)
        elif hasattr(leaf, "__attrs_attrs__") or hasattr(leaf, "__dataclass_fields__"):
            names = getattr(leaf, "__dataclass_fields__", None) or [a.name for a in attrs.fields(type(leaf))]
            for name in names:
                yield from tensors_in(getattr(leaf, name))


def samples_in(batch: Any) -> int:
    """How many samples a batch holds: the first dimension of its first tensor that has one; 1 where there is none."""
    if isinstance(batch, (tuple, list)) and batch:
        first: Any = batch[0]  # pyright: ignore[reportUnknownVariableType]
        if isinstance(first, Tensor) and first.ndim:
            return first.shape[0]
    return next((t.shape[0] for t in tensors_in(batch) if t.ndim), 1)

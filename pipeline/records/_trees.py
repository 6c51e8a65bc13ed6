"""Records as pytrees, and their tensors copied."""

from __future__ import annotations

from typing import Any

import attrs
from torch import Tensor
from torch.utils import _pytree as pytree  # torch.utils.pytree is public only from torch 2.8 on

from pipeline.tensors import Tensors, clone_leaf


def clone_tree(tree: Any) -> Any:
    """The same tree with every tensor in memory of its own, without a graph."""
    return pytree.tree_map_only(Tensor, clone_leaf, tree)


def register(cls: type[Any]) -> None:
    """Make an attrs class a pytree: its fields are the children, in order."""
    names = [field.name.lstrip("_") for field in attrs.fields(cls)]

    def flatten(record: Any) -> tuple[list[Any], None]:
        return [getattr(record, name) for name in names], None

    def unflatten(children: Any, _: None) -> Any:
        return cls(*children)

    pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=f"pipeline.{cls.__name__}")


pytree.register_pytree_node(
    Tensors,
    lambda t: (list(t.flat), tuple(t)),
    lambda values, names: Tensors.over(names, values),
)

"""A tree of records taken apart into named tensors and plain JSON, and put together again.

No pickle: what JSON and safetensors have no form for is refused when it is taken apart, and only the records listed
here are made when it is put together.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from functools import lru_cache
from types import UnionType
from typing import Any, TypeGuard, Union, get_args, get_origin, get_type_hints

import attrs
import torch
from torch import Tensor

from pipeline.errors import CheckpointError
from pipeline.records import LossScale, OptimizerState, Part, Progress, Rng, TrainState, Window
from pipeline.tensors import Tensors

__all__ = ["put_together", "taken_apart"]

_RECORDS: dict[str, type[Any]] = {cls.__name__: cls for cls in (LossScale, Part, Progress, Rng, TrainState, Window)}
_KIND = "is"  # the key that tells what an object of the JSON stands for

Shelf = dict[str, Tensor]


def taken_apart(value: Any, name: str, shelf: Shelf) -> Any:
    """`value` as plain JSON, its tensors laid on the `shelf` under names that begin with `name`.

    Raises: CheckpointError for what has no form there, with the name of the place.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_KIND: "float", "value": repr(value)}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        return _tensor_apart(value, name, shelf)
    if isinstance(value, list):
        return [taken_apart(part, f"{name}/{i}", shelf) for i, part in enumerate(value)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if type(value) is tuple:
        return {_KIND: "tuple", "items": taken_apart(list(value), name, shelf)}
    if isinstance(value, Tensors):
        return {_KIND: "tensors", "items": _items_apart(value, name, shelf)}
    if isinstance(value, OptimizerState):
        tensors, numbers = _items_apart(value.tensors, name, shelf), _items_apart(value.numbers, name, shelf)
        return {_KIND: "optimizer", "tensors": tensors, "numbers": numbers}
    if type(value).__name__ in _RECORDS and type(value) is _RECORDS[type(value).__name__]:
        fields = {field.name: getattr(value, field.name) for field in attrs.fields(type(value))}
        return {_KIND: type(value).__name__, "items": _items_apart(fields, name, shelf)}
    if _is_plain(value):
        return {_KIND: "dict", "items": _items_apart(value, name, shelf)}
    cure = "Keep numbers, strings and tensors, in tuples, lists and dicts with names for keys."
    raise CheckpointError(f"{name or 'the state'} has no form in a checkpoint: it is a {type(value).__name__}. {cure}")


def _is_plain(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a dict of names can stand for it: that of a `Counter` would not make up what is missing."""
    if not isinstance(value, Mapping) or hasattr(type(value), "__missing__"):  # pyright: ignore[reportUnknownArgumentType]
        return False
    return all(isinstance(key, str) for key in value)  # pyright: ignore[reportUnknownVariableType]


def _items_apart(items: Mapping[str, Any], name: str, shelf: Shelf) -> dict[str, Any]:
    return {key: taken_apart(value, f"{name}/{key}" if name else key, shelf) for key, value in items.items()}


def _tensor_apart(tensor: Tensor, name: str, shelf: Shelf) -> dict[str, Any]:
    trained, tensor = tensor.requires_grad, tensor.detach()
    if tensor.layout is torch.sparse_coo:
        whole = tensor.is_coalesced()
        indices, values = (tensor.indices(), tensor.values()) if whole else (tensor._indices(), tensor._values())
        return {
            _KIND: "sparse",
            "indices": _tensor_apart(indices, f"{name}/indices", shelf),
            "values": _tensor_apart(values, f"{name}/values", shelf),
            "shape": list(tensor.shape),
            "coalesced": whole,
        }
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        marks = ["quantized"] * tensor.is_quantized + ["nested"] * tensor.is_nested + ["meta"] * tensor.is_meta
        kind = ", ".join(marks or [f"layout {tensor.layout}"])
        cure = "Keep dense or sparse COO tensors."
        raise CheckpointError(f"{name} has no form in a checkpoint: a tensor of another kind ({kind}). {cure}")
    if tensor.is_complex():
        parts = torch.view_as_real(tensor.resolve_conj())
        return {_KIND: "complex", "parts": _tensor_apart(parts, name, shelf)}
    if name in shelf:
        raise CheckpointError(f"two tensors of the state would be called {name!r}: rename one of them")
    shelf[name] = tensor
    return {_KIND: "tensor", "name": name, **({"requires_grad": True} if trained else {})}


def put_together(form: Any, shelf: Mapping[str, Tensor]) -> Any:
    """The value that was taken apart.

    Raises: whatever comes of a form that is none, KeyError for a tensor that is not on the shelf.
    """
    if isinstance(form, list):
        return [put_together(part, shelf) for part in form]
    if not isinstance(form, dict):
        return form
    kind = form[_KIND]
    if kind == "float":
        return float(form["value"])
    if kind == "bytes":
        return base64.b64decode(form["value"], validate=True)
    if kind == "tensor":
        return shelf[form["name"]].requires_grad_(form.get("requires_grad", False))
    if kind == "complex":
        return torch.view_as_complex(put_together(form["parts"], shelf))
    if kind == "sparse":
        indices, values = put_together(form["indices"], shelf), put_together(form["values"], shelf)
        return torch.sparse_coo_tensor(
            indices, values, form["shape"], is_coalesced=form["coalesced"], check_invariants=True
        )
    if kind == "tuple":
        return tuple(put_together(form["items"], shelf))
    if kind == "optimizer":
        return OptimizerState(Tensors(_items(form["tensors"], shelf)), _items(form["numbers"], shelf))
    items = _items(form["items"], shelf)
    if kind == "dict":
        return items
    return Tensors(items) if kind == "tensors" else _record(_RECORDS[kind], items)


def _items(form: Mapping[str, Any], shelf: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: put_together(value, shelf) for name, value in form.items()}


def _record(cls: type[Any], items: Mapping[str, Any]) -> Any:
    for name, kind in _kinds(cls).items():
        if name in items and not _is_a(items[name], kind):
            raise TypeError(f"{cls.__name__}.{name} is a {type(items[name]).__name__}")
    return cls(**items)


@lru_cache
def _kinds(cls: type[Any]) -> dict[str, Any]:
    """The annotations of a record, by field."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in attrs.fields(cls)}


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value is of the annotated class, or of one of several; what it holds is not looked at."""
    origin = get_origin(kind) or kind
    if origin in (Union, UnionType):
        return any(_is_a(value, one) for one in get_args(kind))
    return isinstance(value, (int, float) if origin is float else origin)

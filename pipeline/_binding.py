"""Parameters and buffers of a module as records that share them, and records written into a module."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pipeline.errors import StateMismatchError
from pipeline.tensors import Lease, Tensors

__all__ = ["bind", "load", "tied_names"]


def tied_names(model: nn.Module) -> dict[str, str]:
    """The further names of tied parameters and shared buffers, each with the first name of the same tensor."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if first.setdefault(id(tensor), name) != name:
                found[name] = first[id(tensor)]
    return found


def bind(model: nn.Module) -> tuple[Tensors, Tensors]:
    """The module's own parameters and buffers; a tied parameter is one entry, under its first name."""
    return (
        Tensors.bound(dict(model.named_parameters()), Lease.of(model, "params")),
        Tensors.bound(dict(model.named_buffers()), Lease.of(model, "buffers")),
    )


def load(params: Tensors, buffers: Tensors, model: nn.Module, update: int) -> tuple[Tensors, Tensors]:
    """Write the values into the module, by name; returns its own tensors as `bind` does.

    Raises: StateMismatchError naming what is missing, unexpected, of another shape, or tied there and of two values
            here; nothing is written then.
    """
    tied = tied_names(model)
    targets = (dict(model.named_parameters()), dict(model.named_buffers()))
    problems: dict[str, list[str]] = {"missing": [], "unexpected": [], "differing": []}
    matched = [_match(given, there, tied, problems) for given, there in zip((params, buffers), targets, strict=True)]
    if any(problems.values()):
        raise StateMismatchError(
            type(model).__name__, problems["missing"], problems["unexpected"], problems["differing"]
        )
    with torch.no_grad():
        for values, there, kind in zip(matched, targets, ("params", "buffers"), strict=True):
            changed = [name for name, tensor in values.items() if there[name] is not tensor]
            if changed:  # what else was bound to this model no longer has the values it had
                lease = Lease.of(model, "params" if kind == "params" else "buffers")
                lease.renew(lease.generation, update)
            for name in changed:
                there[name].copy_(values[name])
    return bind(model)


def _match(
    given: Mapping[str, Tensor], there: Mapping[str, Tensor], tied: Mapping[str, str], problems: dict[str, list[str]]
) -> dict[str, Tensor]:
    """The given values by the module's names; what does not fit goes into `problems`."""
    values: dict[str, Tensor] = {}
    for name, tensor in given.items():
        home = tied.get(name, name)
        if home not in there:
            problems["unexpected"].append(name)
        elif tensor.shape != there[home].shape:
            problems["differing"].append(f"{name} ({tuple(tensor.shape)}, there {tuple(there[home].shape)})")
        elif home in values and not torch.equal(values[home], tensor):
            problems["differing"].append(f"{name} (tied to {home} there, of another value here)")
        else:
            values[home] = tensor
    different = {text.split(" ")[0] for text in problems["differing"]}
    problems["missing"] += [name for name in there if name not in values and name not in different]
    return values

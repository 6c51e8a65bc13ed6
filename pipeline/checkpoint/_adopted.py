"""A state that was read, taken over by the run that goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipeline.errors import StateMismatchError
from pipeline.records import OptimizerState, TrainState
from pipeline.tensors import Tensors

__all__ = ["Problems", "adopted", "check_names"]

_CURE = "For a part of a checkpoint's weights: `load_weights(path, state, match=...)`."


def adopted(template: TrainState, loaded: TrainState) -> TrainState:
    """`loaded` in the place of `template`: the state of the same step and model before the first batch.

    Where the template owns its buffers, the values are written into them, and so into the module that it is bound to;
    elsewhere it is left as it is. Names match, whatever their order.

    Raises: StateMismatchError that lists names which are missing, unexpected, or of another shape or dtype; nothing is
            changed then.
    """
    check_names(template, loaded)
    places = {**template.params, **template.buffers}
    params = _written(template.params, loaded.params)
    buffers = _written(template.buffers, loaded.buffers)
    rest = _moved(attrs.evolve(loaded, params=Tensors(), buffers=Tensors()), places)
    return attrs.evolve(rest.owned() if template.params.is_owned else rest, params=params, buffers=buffers)


def _written(place: Tensors, values: Tensors) -> Tensors:
    """The values under the names, and in the order, of `place`: in its very tensors where it owns them."""
    if not place.is_owned:
        return place.replace([_copied(values[name], tensor.device) for name, tensor in place.items()])
    with torch.no_grad():
        for name, tensor in place.items():
            tensor.copy_(values[name])
            tensor.requires_grad_(values[name].requires_grad)
    return place


def _moved(tree: Any, places: Mapping[str, Tensor]) -> Any:
    """The tree in copies, so that nothing hangs on a file, where the parameters lie.

    What is there by the names of `places` comes in their order and on their devices, the rest on the first one's. The
    optimizer's entries stay where they are: it knows itself where it wants them.
    """
    order = {name: i for i, name in enumerate(places)}
    first = next((tensor.device for tensor in places.values()), torch.device("cpu"))

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, OptimizerState):
            return leaf.copy()
        if isinstance(leaf, Tensors):
            names = sorted(leaf, key=order.__getitem__) if leaf.index.keys() <= order.keys() else list(leaf)
            devices = [places[name].device if name in places else first for name in names]
            return Tensors({name: _copied(leaf[name], device) for name, device in zip(names, devices, strict=True)})
        return _copied(leaf, first) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(moved, tree, is_leaf=lambda node: isinstance(node, (OptimizerState, Tensors)))


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)


def check_names(template: TrainState, loaded: TrainState) -> None:
    """Raise StateMismatchError unless the two are states of one step and model."""
    problems = Problems()
    problems.compare(template.params, loaded.params)
    problems.compare(template.buffers, loaded.buffers)
    problems.compare(_scaled(template), _scaled(loaded))
    problems.compare(dict.fromkeys(template.slots), dict.fromkeys(loaded.slots), "slot ")
    for name, slot in template.slots.items():
        if isinstance(slot, Tensors):  # others are their transforms' own, and may grow
            other = loaded.slots.get(name)
            problems.compare(slot, other if isinstance(other, Tensors) else {}, f"slot {name}/")
    problems.raise_for("this model and step", _CURE)


def _scaled(state: TrainState) -> dict[str, None]:
    return {} if state.loss_scale is None else {"loss scale": None}


@attrs.define
class Problems:
    """What sets the tensors that are given apart from those that are asked for, by name."""

    missing: list[str] = attrs.field(factory=list[str])
    unexpected: list[str] = attrs.field(factory=list[str])
    differing: list[str] = attrs.field(factory=list[str])

    def compare(self, asked: Mapping[str, Any], given: Mapping[str, Any], what: str = "") -> None:
        """Note what is missing in `given`, what is in it besides, and what is of another shape or dtype."""
        self.missing += [what + name for name in asked if name not in given]
        self.unexpected += [what + name for name in given if name not in asked]
        for name in asked.keys() & given.keys():
            mine, other = _kind(asked[name]), _kind(given[name])
            if mine != other:
                self.differing.append(f"{what}{name} ({other}, here {mine})")

    def raise_for(self, owner: str, cure: str) -> None:
        """Raise StateMismatchError if there are any."""
        if self.missing or self.unexpected or self.differing:
            raise StateMismatchError(owner, self.missing, self.unexpected, sorted(self.differing), cure)


def _kind(value: Any) -> str:
    """What has to agree."""
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}" if isinstance(value, Tensor) else ""

"""The trained weights alone: for other programs, and for the start of another run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeline._binding import tied_names
from pipeline._patterns import as_patterns, places
from pipeline.checkpoint._adopted import Problems
from pipeline.checkpoint._disk import flush, partial, remove
from pipeline.checkpoint._folder import write_tensors
from pipeline.checkpoint.record import Checkpoint
from pipeline.checkpoint.store import load_checkpoint
from pipeline.errors import CheckpointError, SettingError
from pipeline.records import TrainState
from pipeline.tensors import Tensors, clone_leaf
from pipeline.transforms import averaged

__all__ = ["export", "load_weights", "weights"]


def weights(
    source: TrainState | Checkpoint, model: nn.Module | None = None, *, average: str | None = None
) -> dict[str, Tensor]:
    """Parameters and buffers as a dict that `model.load_state_dict` takes, in memory of their own.

    Args:   source: a state, or a checkpoint; model: give exactly the names of its `state_dict()`, all names of tied
            parameters among them; without it each tensor has one name. average: the slot of `AverageWeights` whose
            averages stand in for the parameters.
    Raises: StateMismatchError for a model of other names; MissingFieldError where the state has no such average.
    """
    found = _found(source, average)
    names = _homes(found, model) if model is not None else {name: name for name in found}
    return {name: found[home].detach().clone() for name, home in names.items()}


def export(
    source: TrainState | Checkpoint,
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    average: str | None = None,
) -> None:
    """Write parameters and buffers to the file `path`, as safetensors and nothing else; each tensor has one name.

    What reads such files reads this one: `safetensors.torch.load_model(model, path)`, and libraries for inference. A
    file that is there already is replaced, once the new one is whole.

    Args:   source, average: as for `weights`; model: leave out what its `state_dict()` leaves out.
    Raises: CheckpointError where it cannot be written, and what `weights` raises.
    """
    found = _found(source, average)
    if model is not None:
        kept = set(_homes(found, model).values())
        found = {name: tensor for name, tensor in found.items() if name in kept}
    path = Path(path)
    unfinished = partial(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(unfinished, found, {"format": "pt"})
        flush(unfinished)
        unfinished.replace(path)
        flush(path.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the weights could not be written to {path}: {error}.") from error
    finally:
        if unfinished.exists():
            remove(unfinished)


def load_weights(
    path: str | os.PathLike[str],
    state: TrainState,
    match: str | Sequence[str] = "*",
    *,
    average: str | None = None,
) -> TrainState:
    """The state with weights and buffers from a checkpoint's folder, or from a file of safetensors: to fine-tune.

    The state is taken over, as by a fold, and so the module that it is bound to gets the values. An average of the
    weights that nothing was taken into yet begins with them. All else is left as it is, the optimizer's state too.

    Args:   match: which of them, a pattern on names as in `fnmatch`, or several: `"encoder.*"`; both sides must have
            the same names that match. average: a slot of the checkpoint's `AverageWeights` to take them from.
    Raises: StateMismatchError that lists names which are missing, unexpected, or of another shape or dtype, and
            SettingError where nothing matches; nothing is changed then. CheckpointError where there is no such file.
    """
    path = Path(path)
    patterns = as_patterns("load_weights(match)", match, of="tensor")
    found = _read(path, average)
    asked, given = _matching(patterns, {**state.params, **state.buffers}), _matching(patterns, found)
    if not asked and not given:
        known = ", ".join([*state.params][:8])
        raise SettingError(
            "load_weights(match)", "a pattern that some name matches", match, f"There is {known or 'none'}."
        )
    problems = Problems()
    problems.compare(asked, given)
    problems.raise_for(f"what {path} has by the names {', '.join(patterns)}", "Name those that both have: `match`.")
    slots = {name: _followed(slot, state.params, given) for name, slot in state.slots.items()}
    params, buffers = _filled(state.params, given), _filled(state.buffers, given)
    return attrs.evolve(state, params=params, buffers=buffers, slots=slots)


def _matching(patterns: tuple[str, ...], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names match one of the patterns."""
    first = places(patterns, tuple(tensors))
    return {name: tensor for (name, tensor), place in zip(tensors.items(), first, strict=True) if place < len(patterns)}


def _found(source: TrainState | Checkpoint, average: str | None) -> dict[str, Tensor]:
    state = source.state if isinstance(source, Checkpoint) else source
    if average is not None:
        state = averaged(state, average)
    return {**state.params, **state.buffers}


def _homes(found: Mapping[str, Tensor], model: nn.Module) -> dict[str, str]:
    """The names of the model's `state_dict()`, each with the name that a state has for the same tensor."""
    tied = tied_names(model)
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    homes = {name: tied.get(name, name) for name in tensors}
    problems = Problems()
    problems.missing = [name for name, home in homes.items() if home not in found]
    own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    problems.unexpected = [name for name in found if name not in own]
    problems.raise_for(type(model).__name__, "Give the model that was trained.")
    return homes


def _read(path: Path, average: str | None) -> dict[str, Tensor]:
    if path.is_dir():
        return _found(load_checkpoint(path), average)
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint and no file {path}")
    if average is not None:
        raise SettingError("load_weights(average)", "left out for a file, which has one set of weights", average)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}.") from error


def _filled(place: Tensors, values: Mapping[str, Tensor]) -> Tensors:
    """The record, which is taken over, with the values that there are for it."""
    if not any(name in values for name in place):
        return place
    own = place.owned()
    with torch.no_grad():
        for name, tensor in own.items():
            if name in values:
                tensor.copy_(values[name])
    return own if place.is_owned else own.borrowed()


def _followed(slot: Any, params: Tensors, values: Mapping[str, Tensor]) -> Any:
    """A slot that holds the parameters as they were, with those that are given instead; any other as it is."""
    if not isinstance(slot, Tensors) or slot.index.keys() != params.index.keys():
        return slot

    def followed(name: str, tensor: Tensor) -> Tensor:
        if name in values and torch.equal(tensor, params[name].to(tensor.dtype)):
            return values[name].to(tensor, copy=True).requires_grad_(tensor.requires_grad)
        return clone_leaf(tensor)

    return slot.replace([followed(name, tensor) for name, tensor in slot.items()])

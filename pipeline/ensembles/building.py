"""`ensemble`: several models trained at once by one step, each member with what it has of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from pipeline import initialisation
from pipeline._checks import not_negative, whole
from pipeline._declared import show
from pipeline._groups import check_rate
from pipeline.ensembles._conversion import for_all, for_one, taken_apart
from pipeline.ensembles._forward import Batches, Initialiser
from pipeline.ensembles._members import Member
from pipeline.ensembles.together import Ensemble
from pipeline.errors import SettingError
from pipeline.optim import Rate
from pipeline.transform import Transform

__all__ = ["ensemble"]


def _initialised(model: nn.Module, seed: int) -> object:
    return initialisation.initialise(model, seed=seed)


def ensemble(
    step: Transform,
    members: int | None = None,
    *,
    seeds: Sequence[int] | None = None,
    rates: Sequence[Rate] | None = None,
    weight_decays: Sequence[Rate] | None = None,
    loss_weights: Sequence[float] | None = None,
    initialiser: Initialiser = _initialised,
    batches: Batches = "shared",
    draws: bool | None = None,
) -> Ensemble:
    """`step` for several models at once: one forward through `torch.func.vmap`, one backward, one update of all.

    Member i is trained as `fold` with `steps[i]` would train it alone, up to rounding: clipped, skipped and scaled by
    its own gradients. `init(ensemble, model)` makes the state, with a row for each member in every tensor.

    Give a number of members, or sequences with an entry for each of them. A number alone stands for the seeds 0, 1, …;
    where only rates, weight decays or loss weights are given, all begin as the model is, and draw alike.

    Args:   step: a chain of Forward, ScaledBackward, Accumulate, ClipByGlobalNorm, MaybeStep, EmitEvents, in this
            order, with an optimizer that works element by element: SGD, Adam, AdamW, RMSprop, Adagrad, Lion. The clip
            and EmitEvents may be left out; seeds: what each member is initialised and draws by, counted from the seed
            of `init`; rates: learning rates or schedules, which count the member's own updates; weight_decays: numbers
            or schedules; loss_weights: factors on the loss; initialiser: `f(model, seed)`, which sets a model's
            parameters in place: `initialise(model, seed=seed)` by default; batches: "shared", every member sees the
            same, or "own", each tensor of a batch has a row for each member; draws: whether the forward draws random
            numbers, where that is not to be told by its modules.
    Raises: SettingError for a step of another shape, an optimizer that does not work element by element, settings that
            it does not take here, and sequences of different lengths.
    """
    given = {"seeds": seeds, "rates": rates, "weight_decays": weight_decays, "loss_weights": loss_weights}
    everyone = _members(members, given)
    if batches not in ("shared", "own"):
        raise SettingError("ensemble(batches)", "'shared' or 'own'", batches)
    parts = taken_apart(step)
    steps = tuple(for_one(parts, member) for member in everyone)
    whole_step = for_all(parts, everyone, steps, initialiser, batches, draws)
    shown = [show(step)] + ([] if members is None else [f"members={members}"])
    shown += [f"{name}={list(values)}" for name, values in given.items() if values is not None]
    return Ensemble(whole_step.transforms, everyone, steps, f"ensemble({', '.join(shown)})")


def _members(members: int | None, given: dict[str, Sequence[Any] | None]) -> tuple[Member, ...]:
    """What each member has of its own."""
    count, none = _number(members, given), all(values is None for values in given.values())
    each = {name: [None] * count if values is None else list(values) for name, values in given.items()}
    seeds = list(range(count)) if none else each["seeds"]
    for place in range(count):
        if seeds[place] is not None:
            whole(f"ensemble(seeds)[{place}]", seeds[place], 0)
        if each["rates"][place] is not None:
            check_rate(f"ensemble(rates)[{place}]", each["rates"][place])
        for name in ("weight_decays", "loss_weights"):
            value = each[name][place]
            if value is not None and not (callable(value) and name == "weight_decays"):
                not_negative(f"ensemble({name})[{place}]", value)
    factors = [1.0 if factor is None else factor for factor in each["loss_weights"]]
    return tuple(map(Member, seeds, each["rates"], each["weight_decays"], factors))


def _number(members: int | None, given: dict[str, Sequence[Any] | None]) -> int:
    """How many members there are, as all that was given agrees."""
    if members is not None:
        whole("ensemble(members)", members)
    lengths = {name: len(values) for name, values in given.items() if values is not None}
    lengths |= {} if members is None else {"members": members}
    if not lengths or 0 in lengths.values():
        raise SettingError("ensemble(members)", "a number, or left out where something is given for each", members)
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise SettingError("ensemble's sequences", "of one length, an entry for each member", told)
    return next(iter(lengths.values()))

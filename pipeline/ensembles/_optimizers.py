"""The optimizers of all members as one: every member's rule is the same, its rate and its weight decay are its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from pipeline._groups import GroupSettings
from pipeline.ensembles._elementwise import Elementwise, Values, elementwise, over, settings_of
from pipeline.ensembles._members import precise, row
from pipeline.errors import OptimizerMismatchError
from pipeline.optim import Optimizer
from pipeline.records import OptimizerState, Scalar, TrainState
from pipeline.tensors import Tensors

__all__ = ["MemberOptimizers", "Step"]

_DEFAULT = "default"


@attrs.frozen(eq=False)
class Step:
    """One update: the rows that make it; and of every row the member's number, its rates by group, and its count."""

    places: Sequence[int]
    numbers: Sequence[int]
    rates: Sequence[Mapping[str, float]]
    counts: Sequence[int]


@attrs.frozen(init=False)
class MemberOptimizers:
    """An `Optimizer` for each member, alike but for rates and weight decays, run on the tensors of all at once.

    State is kept as torch keeps it, by `parameter/key`, with a row for each member: the count of updates too.
    """

    each: tuple[Optimizer, ...]
    _rule: Elementwise = attrs.field(eq=False)
    _settings: tuple[Mapping[str, GroupSettings], ...] = attrs.field(eq=False)

    def __init__(self, each: tuple[Optimizer, ...]) -> None:
        rule = elementwise(each[0])
        self.__attrs_init__(each, rule, tuple(_by_group(one, rule) for one in each))  # pyright: ignore[reportAttributeAccessIssue]

    def init(self, state: TrainState) -> TrainState:
        """Let each check its settings against the parameters of a member."""
        alone = row(state, 0)
        for optimizer in self.each:
            optimizer.init(alone)
        return state

    def rates(self, numbers: Sequence[int], counts: Sequence[int], factor: float) -> list[dict[str, float]]:
        """Each member's rate of each group in its update of this count, times `factor`."""
        found = [self.each[number].rates(count) for number, count in zip(numbers, counts, strict=True)]
        if factor == 1.0:
            return found
        return [{group: rate * factor for group, rate in rates.items()} for rates in found]

    def update(
        self, params: Tensors, grads: Tensors, state: OptimizerState, step: Step, factor: Scalar, update: int
    ) -> tuple[Tensors, OptimizerState]:
        """Parameters and optimizer state after the step, with gradients `grads` × `factor`, a number for each member.

        In place where the records own their buffers. Rows that do not make the step are left as they are.
        """
        keep = params.is_owned
        params, grads = params.writable(update), grads.writable(update)
        groups = self._by_values(params, grads, step)
        kept = self._begun(params, state.tensors.writable(update), groups)
        rows = _Rows(step.places, params.flat[0])
        with torch.no_grad():
            for values, names in groups:
                given = [grads[name] for name in names]
                _scale(given, factor)
                whole = [params[name] for name in names]
                own = {key: [kept[f"{name}/{key}"] for name in names] for key in self._rule.keys(values)}
                some, moments = rows.taken(whole), {key: rows.taken(entries) for key, entries in own.items()}
                narrow = [g.to(p.dtype) for g, p in zip(rows.taken(given), whole, strict=True)]
                self._rule.update(some, narrow, moments, values)
                rows.put(some, whole)
                for key, entries in own.items():
                    rows.put(moments[key], entries)
        return params, OptimizerState(kept if kept.is_owned or not keep else kept.owned(update), is_owned=keep)

    def _by_values(self, params: Tensors, grads: Tensors, step: Step) -> list[tuple[Values, list[str]]]:
        """The parameters that have gradients, by group, each group with its settings in this step."""
        names: dict[str, list[str]] = {}
        for name in grads:
            first = next((g.name for g in self.each[0].groups if g.matches(name, params[name][0])), _DEFAULT)
            names.setdefault(first, []).append(name)
        return [(self._values(group, step, params.flat[0]), those) for group, those in names.items()]

    def _values(self, group: str, step: Step, like: Tensor) -> Values:
        settings = [self._settings[step.numbers[i]][group] for i in step.places]
        decays = [
            {**own.constant, **own.scheduled(step.counts[i])}["weight_decay"]
            for own, i in zip(settings, step.places, strict=True)
        ]

        def vector(values: Sequence[Any]) -> Tensor:
            return torch.tensor(values, dtype=precise(like), device=like.device)

        rates = vector([step.rates[i][group] for i in step.places])
        return Values(rates, vector(decays) if any(decays) else None, settings[0].constant)

    def _begun(self, params: Tensors, kept: Tensors, groups: Sequence[tuple[Values, list[str]]]) -> Tensors:
        """What is kept, with the entries of parameters that are updated for the first time."""
        new: dict[str, Tensor] = {}
        for values, names in groups:
            for name in names:
                missing = [key for key in self._rule.keys(values) if f"{name}/{key}" not in kept]
                if missing and any(key.startswith(f"{name}/") for key in kept):
                    raise OptimizerMismatchError(self.each[0].cls.__name__, missing[0])
                new |= {f"{name}/{key}": self._rule.begin(key, params[name], values) for key in missing}
        return Tensors({**kept, **new}) if new else kept


def _by_group(optimizer: Optimizer, rule: Elementwise) -> dict[str, GroupSettings]:
    """All settings of each group."""
    given = settings_of(optimizer, rule)
    found = {_DEFAULT: GroupSettings.of("Optimizer", optimizer.lr, given)}
    for group in optimizer.groups:
        lr = optimizer.lr if group.lr is None else group.lr
        found[group.name] = GroupSettings.of(f"Group {group.name!r}", lr, {**given, **group.settings})
    return found


class _Rows:
    """Some rows of tensors, as tensors of their own while they are worked on; all of them as they are."""

    def __init__(self, places: Sequence[int], like: Tensor) -> None:
        whole = len(places) == len(like)
        self._places = None if whole else torch.tensor(places, device=like.device)

    def taken(self, tensors: list[Tensor]) -> list[Tensor]:
        """These rows of each."""
        return tensors if self._places is None else [tensor[self._places] for tensor in tensors]

    def put(self, rows: list[Tensor], tensors: list[Tensor]) -> None:
        """Put them back."""
        if self._places is not None:
            for own, tensor in zip(rows, tensors, strict=True):
                tensor[self._places] = own


def _scale(grads: list[Tensor], factor: Scalar) -> None:
    """Multiply the gradients by a factor, or by one for each member."""
    if isinstance(factor, Tensor):
        torch._foreach_mul_(grads, over(factor, grads))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    elif factor != 1.0:
        torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

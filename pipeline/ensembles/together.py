"""`Ensemble`: a step that trains several members at once, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from pipeline.ensembles._evaluation import EvaluateMembers
from pipeline.ensembles._members import SPOILT, Member, kept, members_of, name_of_member, row
from pipeline.errors import SettingError, UnknownNameError
from pipeline.evaluation import Evaluation
from pipeline.records import Rng, TrainState
from pipeline.transform import Chain, Transform
from pipeline.transforms import Forward

__all__ = ["Ensemble"]


class Ensemble(Chain):
    """A step that trains several members at once: a chain like any other. Made by `ensemble`.

    Its state has a row for each member in every tensor, and each one's counts and loss scale in
    `state.slots["member 3"]`. Members keep their numbers, whichever of them are kept. `steps` are those of each member
    by itself.
    """

    __slots__ = ("_text", "members", "steps")

    members: tuple[Member, ...]
    steps: tuple[Chain, ...]
    _text: str

    def __init__(
        self, transforms: tuple[Transform, ...], members: tuple[Member, ...], steps: tuple[Chain, ...], text: str
    ) -> None:
        super().__init__(transforms)
        for name, value in (("members", members), ("steps", steps), ("_text", text)):
            object.__setattr__(self, name, value)  # frozen, as every chain

    def member(self, state: TrainState, number: int) -> TrainState:
        """The state of one member, an ordinary one in memory of its own: `steps[number]` goes on from it by itself.

        Raises: UnknownNameError for a member that the state does not have.
        """
        place = self._row(state, number)
        own = row(state, place, int(state.slots[SPOILT][place])).copy()
        return attrs.evolve(own, rng=Rng(state.rng.seed + (self.members[number].seed or 0), state.rng.rank))

    def keep(self, state: TrainState, numbers: Iterable[int]) -> TrainState:
        """The state of these members alone: the others have stopped. The same step goes on from it.

        Raises: UnknownNameError for a member that the state does not have; SettingError where none is kept.
        """
        places = sorted({self._row(state, number) for number in numbers})
        if not places:
            raise SettingError("Ensemble.keep(numbers)", "of at least one member", [])
        return kept(state, places)

    def evaluation(self, evaluation: Evaluation) -> Evaluation:
        """An evaluation of one model as one of all members at once.

        It reports the means over them, and each member's own: `val_loss` and `val_loss/member 3`.

        Raises: SettingError for one whose step is more than a Forward.
        """
        inner = evaluation.step.transforms if isinstance(evaluation.step, Chain) else (evaluation.step,)
        if len(inner) != 1 or type(inner[0]) is not Forward:
            raise SettingError("Ensemble.evaluation(evaluation)'s step", "a Forward alone", evaluation.step)
        plain = tuple(attrs.evolve(member, loss_weight=1.0) for member in self.members)
        forward: Any = self["Forward"]
        forward = attrs.evolve(forward, inner=inner[0], members=plain, batches="shared")
        return attrs.evolve(evaluation, step=EvaluateMembers(forward))

    def _row(self, state: TrainState, number: int) -> int:
        numbers = members_of(state)
        if number not in numbers:
            raise UnknownNameError(
                "This ensemble's state", name_of_member(number), [name_of_member(i) for i in numbers]
            )
        return numbers.index(number)

    def __repr__(self) -> str:
        return self._text

"""An evaluation of all members at once."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from torch import Tensor

from pipeline.ensembles._forward import ForwardMembers
from pipeline.ensembles._members import LOSS, members_of, name_of_member
from pipeline.records import Frame, Scalar

__all__ = ["EvaluateMembers"]


@attrs.frozen
class EvaluateMembers:
    """The loss and the measures of all members in one pass: the means over them, and each member's own.

    Reads:  as Forward, and `slots`.
    Writes: as Forward; `loss` is the mean over members, and `measures` also has `loss/member 3` and the like.
    """

    inner: ForwardMembers

    reads = ForwardMembers.reads
    writes = ForwardMembers.writes

    def __call__(self, frame: Frame) -> Frame:
        frame = self.inner(frame)
        measures = dict(frame.measures)
        if LOSS not in measures:  # nothing counted
            return frame
        total, weight = measures["loss"] = measures.pop(LOSS)
        names = [name_of_member(number) for number in members_of(frame.state)]
        each: dict[str, tuple[Scalar, Scalar]] = {}
        for measure, pair in measures.items():
            totals, weights = (_rows(value, len(names)) for value in pair)
            each |= {f"{measure}/{name}": (totals[i], weights[i]) for i, name in enumerate(names)}
        means = {measure: (_mean(a), _mean(b)) for measure, (a, b) in measures.items() if measure != "loss"}
        return frame.having(loss=_mean(total) / weight, measures={**means, **each})


def _rows(value: Scalar, count: int) -> Sequence[Scalar]:
    """What each member has of a value that may be the same for all."""
    return value.unbind() if isinstance(value, Tensor) and value.ndim else [value] * count


def _mean(value: Scalar) -> Scalar:
    return value.mean() if isinstance(value, Tensor) else value

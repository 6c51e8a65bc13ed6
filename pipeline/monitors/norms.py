"""Global norms: of the gradients, the parameters and the updates."""

from __future__ import annotations

import math

import attrs

from pipeline.events import Event, UpdateDone
from pipeline.monitors import _spread as spread
from pipeline.monitors._readings import by_layer
from pipeline.monitors._written import Written

__all__ = ["GradNorm", "ParamNorm", "UpdateNorm"]


class _Norm(Written):
    """What they share: all but where the norm is read."""

    __slots__ = ()

    def _norm(self, event: UpdateDone) -> float | None:
        raise NotImplementedError

    def init(self) -> spread.Spread:
        """(last, sum, count, largest) of nothing."""
        return spread.NONE

    def reduce(self, accumulator: spread.Spread, event: Event) -> spread.Spread:
        """Take an update's norm in."""
        norm = self._norm(event) if isinstance(event, UpdateDone) else None
        return accumulator if norm is None else spread.joined(accumulator, spread.one(norm))

    def result(self, accumulator: spread.Spread) -> dict[str, float] | None:
        """Last, mean and largest so far."""
        return spread.shown(accumulator)

    def merge(self, a: spread.Spread, b: spread.Spread) -> spread.Spread:
        """Two logs, the second after the first."""
        return spread.joined(a, b)


@attrs.frozen(repr=False)
class GradNorm(_Norm):
    """The global gradient norm before clipping: last, mean over the updates, and largest.

    Reads:  `UpdateDone.grad_norm`.
    Result: {"last", "mean", "max"}, floats; None before the first update.
    Edges:  NaN is never the largest, and makes the mean NaN.
    Merge:  two logs, the second after the first.
    """

    name: str = "GradNorm"

    def _norm(self, event: UpdateDone) -> float:
        return float(event.grad_norm)


def _global(event: UpdateDone, kind: str) -> float | None:
    norms = by_layer(event, kind).values()
    return math.hypot(*norms) if norms else None


@attrs.frozen(repr=False)
class ParamNorm(_Norm):
    """The global norm of the parameters: last, mean over the updates that tell it, and largest.

    Reads:  `UpdateDone.facts["param_norm/<layer>"]`, all layers together.
    Result: {"last", "mean", "max"}, floats; None before the first update that tells.
    Edges:  NaN is never the largest, and makes the mean NaN.
    Merge:  two logs, the second after the first.
    """

    name: str = "ParamNorm"

    def _norm(self, event: UpdateDone) -> float | None:
        return _global(event, "param_norm")


@attrs.frozen(repr=False)
class UpdateNorm(_Norm):
    """The global norm of what the updates added to the parameters: last, mean over those that tell it, and largest.

    Reads:  `UpdateDone.facts["update_norm/<layer>"]`, all layers together.
    Result: {"last", "mean", "max"}, floats; None before the first update that tells.
    Edges:  NaN is never the largest, and makes the mean NaN.
    Merge:  two logs, the second after the first.
    """

    name: str = "UpdateNorm"

    def _norm(self, event: UpdateDone) -> float | None:
        return _global(event, "update_norm")

"""Layer by layer: how large the gradients are, and how far an update moves the weights."""

from __future__ import annotations

import math
from typing import Literal

import attrs

from pipeline._checks import one_of, positive
from pipeline.errors import SettingError
from pipeline.events import Event, UpdateDone
from pipeline.monitors import _spread as spread
from pipeline.monitors import _table as table
from pipeline.monitors._readings import by_layer
from pipeline.monitors._written import Written

__all__ = ["LayerGradNorms", "UpdateRatios"]

Judged = tuple[float, str, int, int, int]
"""The last norm, its verdict, how often it vanished and exploded, and how often it was told."""


@attrs.frozen(repr=False)
class LayerGradNorms(Written):
    """The gradient norm of each layer, and whether it vanishes or explodes.

    A norm vanishes at `vanishing` × the median layer's or below, and explodes above `exploding` × it. The median is
    that of the same update, over the layers whose norm is finite and not 0; of an even number, the larger one in the
    middle. With `threshold_mode="absolute"` the thresholds are norms themselves.

    Reads:  `UpdateDone.facts["grad_norm/<layer>"]`; updates without such facts pass by.
    Result: {layer: {"norm", "verdict", "vanishing", "exploding"}}: the last norm, "healthy", "vanishing" or "exploding"
            for it, and the shares of the updates that had the other two; None before the first update that tells.
    Edges:  a norm of 0 vanishes, one that is NaN or infinite explodes. A single layer is its own median.
    Merge:  two logs, the second after the first.
    Args:   vanishing, exploding: positive, the first below the second; three orders of magnitude from the median by
            default, far beyond how layers of one healthy network differ; threshold_mode: "relative" or "absolute".
    Raises: SettingError, when built.
    """

    vanishing: float = 1e-3
    exploding: float = 1e3
    threshold_mode: Literal["relative", "absolute"] = "relative"
    name: str = "LayerGradNorms"

    def __attrs_post_init__(self) -> None:
        positive("LayerGradNorms.vanishing", self.vanishing)
        positive("LayerGradNorms.exploding", self.exploding)
        if self.vanishing >= self.exploding:
            raise SettingError("LayerGradNorms.vanishing", f"below exploding, {self.exploding}", self.vanishing)
        one_of("LayerGradNorms.threshold_mode", self.threshold_mode, "relative", "absolute")

    def init(self) -> tuple[tuple[str, Judged], ...]:
        """No layer."""
        return ()

    def reduce(self, accumulator: tuple[tuple[str, Judged], ...], event: Event) -> tuple[tuple[str, Judged], ...]:
        """Judge the layers of an update, against each other."""
        norms = by_layer(event, "grad_norm") if isinstance(event, UpdateDone) else {}
        if not norms:
            return accumulator
        unit = _median(list(norms.values())) if self.threshold_mode == "relative" else 1.0
        judged = [(layer, norm, self._verdict(norm, unit)) for layer, norm in norms.items()]
        return self.merge(
            accumulator,
            tuple(
                (layer, (norm, verdict, int(verdict == "vanishing"), int(verdict == "exploding"), 1))
                for layer, norm, verdict in judged
            ),
        )

    def _verdict(self, norm: float, unit: float) -> str:
        if not norm <= self.exploding * unit:  # so is NaN
            return "exploding"
        return "vanishing" if norm <= self.vanishing * unit else "healthy"

    def result(self, accumulator: tuple[tuple[str, Judged], ...]) -> dict[str, dict[str, float | str]] | None:
        """Each layer's last norm, its verdict, and the shares."""
        return {
            layer: {"norm": norm, "verdict": verdict, "vanishing": vanished / count, "exploding": exploded / count}
            for layer, (norm, verdict, vanished, exploded, count) in accumulator
        } or None

    def merge(
        self, a: tuple[tuple[str, Judged], ...], b: tuple[tuple[str, Judged], ...]
    ) -> tuple[tuple[str, Judged], ...]:
        """Two logs, the second after the first."""
        return table.joined(a, b, lambda x, y: (y[0], y[1], x[2] + y[2], x[3] + y[3], x[4] + y[4]))


def _median(norms: list[float]) -> float:
    telling = sorted(norm for norm in norms if 0 < norm < math.inf)
    return telling[len(telling) // 2] if telling else 0.0


@attrs.frozen(repr=False)
class UpdateRatios(Written):
    """How far the updates move each layer: the norm of the update over the norm of the parameters.

    About 1e-3 is usual for Adam and SGD at a good rate; far below a layer hardly learns, far above it is thrown about.

    Reads:  `UpdateDone.facts["update_norm/<layer>"]`, `facts["param_norm/<layer>"]`, where an update has both.
    Result: {layer: {"last", "mean", "max"}}, floats; None before the first update that tells.
    Edges:  a layer whose parameters are all 0 passes by: nothing is a share of it. NaN is never the largest, and makes
            the mean NaN.
    Merge:  two logs, the second after the first.
    """

    name: str = "UpdateRatios"

    def init(self) -> tuple[tuple[str, spread.Spread], ...]:
        """No layer."""
        return ()

    def reduce(
        self, accumulator: tuple[tuple[str, spread.Spread], ...], event: Event
    ) -> tuple[tuple[str, spread.Spread], ...]:
        """Take the ratios of an update in."""
        if not isinstance(event, UpdateDone):
            return accumulator
        params, moved = by_layer(event, "param_norm"), by_layer(event, "update_norm")
        ratios = ((layer, norm / params[layer]) for layer, norm in moved.items() if params.get(layer))
        return self.merge(accumulator, tuple((layer, spread.one(ratio)) for layer, ratio in ratios))

    def result(self, accumulator: tuple[tuple[str, spread.Spread], ...]) -> dict[str, dict[str, float] | None] | None:
        """Each layer's last, mean and largest ratio."""
        return {layer: spread.shown(ratios) for layer, ratios in accumulator} or None

    def merge(
        self, a: tuple[tuple[str, spread.Spread], ...], b: tuple[tuple[str, spread.Spread], ...]
    ) -> tuple[tuple[str, spread.Spread], ...]:
        """Two logs, the second after the first."""
        return table.joined(a, b, spread.joined)

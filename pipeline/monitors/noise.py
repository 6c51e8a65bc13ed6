"""How noisy the gradients are, and so how large a batch is worth its cost."""

from __future__ import annotations

import math

import attrs

from pipeline._checks import share
from pipeline.events import Event, UpdateDone
from pipeline.monitors import _fading as fading
from pipeline.monitors._written import Written

__all__ = ["GradNoiseScale"]


@attrs.frozen(repr=False)
class GradNoiseScale(Written):
    """The gradient noise scale tr(Σ) / |G|², and the batch size that it suggests.

    G is the true gradient and Σ the covariance of one item's. Each window is measured at two batch sizes, as a whole (B
    items) and in its micro-batches (b = B / n items, of which g is the mean gradient), without bias in either:

        |G|² = (B |g_B|² − b |g_b|²) / (B − b)        tr(Σ) = (|g_b|² − |g_B|²) / (1/b − 1/B)

    Both are noisy, so that each is averaged over the updates before one is divided by the other. Well below the noise
    scale twice the batch saves half of the updates; well above it hardly any. At the noise scale itself a run takes
    twice the fewest updates and twice the fewest items.

    Reads:  `UpdateDone.measures["micro_grad_square"]`: the sum over the micro-batches of the squared norm of their own
            mean gradients, and their number; `grad_norm`, `weight`. Updates without that measure pass by.
    Result: {"noise_scale", "batch_size", "grad_square", "trace"}, the first two in items: the batch size is the noise
            scale as a whole number, at least 1; both are None while the average of |G|² is not above 0, too noisy to
            tell, and the noise scale is at least 0. None before the first update that tells.
    Edges:  windows of one micro-batch, of no weight, or with a value that is not finite pass by. Items are what the
            loss weighs by (tokens of one text are not independent; where losses carry no weight, an item is a
            micro-batch). Micro-batches of unequal weight count as of their mean weight, so that tr(Σ) comes out too
            large.
    Merge:  two logs, the second after the first.
    Args:   decay: how much an update counts against the one after it, above 0 and at most 1, where all count alike.
    Raises: SettingError, when built.
    Source: McCandlish, Kaplan, Amodei 2018, arXiv:1812.06162, section 2.2 and appendix A.1.
    """

    decay: float = 0.99
    name: str = "GradNoiseScale"

    def __attrs_post_init__(self) -> None:
        share("GradNoiseScale.decay", self.decay, up_to_one=True)

    def init(self) -> fading.Sums:
        """(sum of |G|², sum of tr(Σ), sum of weights, count) of nothing."""
        return 0.0, 0.0, 0.0, 0

    def reduce(self, accumulator: fading.Sums, event: Event) -> fading.Sums:
        """Estimate both from one window."""
        if not isinstance(event, UpdateDone) or "micro_grad_square" not in event.measures:
            return accumulator
        total, count = map(float, event.measures["micro_grad_square"])
        whole = float(event.weight)
        if not count > 1 or not whole > 0:
            return accumulator
        part, part_square, norm = whole / count, total / count, float(event.grad_norm)
        whole_square = norm * norm
        square = (whole * whole_square - part * part_square) / (whole - part)
        trace = (part_square - whole_square) / (1 / part - 1 / whole)
        finite = math.isfinite(square) and math.isfinite(trace)
        return self.merge(accumulator, (square, trace, 1.0, 1)) if finite else accumulator

    def result(self, accumulator: fading.Sums) -> dict[str, float | None] | None:
        """The ratio of the averages, and the averages."""
        square, trace, weight, count = accumulator
        if not count:
            return None
        scale = max(trace, 0.0) / square if square > 0 else math.inf
        known = math.isfinite(scale)
        return {
            "noise_scale": scale if known else None,
            "batch_size": max(1, round(scale)) if known else None,
            "grad_square": square / weight,
            "trace": trace / weight,
        }

    def merge(self, a: fading.Sums, b: fading.Sums) -> fading.Sums:
        """Two logs, the second after the first."""
        return fading.joined(a, b, self.decay)

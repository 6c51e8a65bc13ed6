"""The loss scale along a run."""

from __future__ import annotations

from typing import Any

import attrs

from pipeline._checks import whole
from pipeline.events import Event, LossScaleChanged, UpdateDone, UpdateSkipped
from pipeline.monitors._written import Written

__all__ = ["LossScaleHistory"]

Scales = tuple[float | None, float, int, int, tuple[tuple[int, float], ...]]
"""The scale now, its sum over updates, their count, the changes, and the last of these."""


@attrs.frozen(repr=False)
class LossScaleHistory(Written):
    """The loss scale: now, on average over the updates, how often it changed, and how.

    Reads:  `UpdateDone.loss_scale`, `UpdateSkipped.loss_scale`, `LossScaleChanged.after`.
    Result: {"current", "mean", "changes", "history"}: the mean is over the updates, None before the first; the history
            the last `keep` changes, as pairs of the update and the scale from then on. None before the first scale.
    Edges:  windows without a loss scale pass by. Where each part of a model has its own, `filter` by part.
    Merge:  two logs, the second after the first.
    Args:   keep: changes to remember, a whole number, 0 or more.
    Raises: SettingError, when built.
    """

    keep: int = 100
    name: str = "LossScaleHistory"

    def __attrs_post_init__(self) -> None:
        whole("LossScaleHistory.keep", self.keep, 0)

    def init(self) -> Scales:
        """No scale."""
        return None, 0.0, 0, 0, ()

    def reduce(self, accumulator: Scales, event: Event) -> Scales:
        """Take a window's scale, or a change, in."""
        if isinstance(event, LossScaleChanged):
            return self.merge(accumulator, (event.after, 0.0, 0, 1, ((event.update, event.after),)))
        if not isinstance(event, (UpdateDone, UpdateSkipped)) or event.loss_scale is None:
            return accumulator
        updated = isinstance(event, UpdateDone)
        return self.merge(accumulator, (event.loss_scale, event.loss_scale if updated else 0.0, int(updated), 0, ()))

    def result(self, accumulator: Scales) -> dict[str, Any] | None:
        """The scale so far."""
        current, total, count, changes, history = accumulator
        if current is None:
            return None
        return {
            "current": current,
            "mean": total / count if count else None,
            "changes": changes,
            "history": history,
        }

    def merge(self, a: Scales, b: Scales) -> Scales:
        """Two logs, the second after the first."""
        history = a[4] + b[4]
        return (
            a[0] if b[0] is None else b[0],
            a[1] + b[1],
            a[2] + b[2],
            a[3] + b[3],
            history[max(0, len(history) - self.keep) :],
        )

"""Parts behind Accumulate as graphs, the step among them."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline._declared import fields
from pipeline.compilation._graphs import Graphs, Listener, Settings
from pipeline.compilation._stepping import NotYetError, Stepping, with_plain_optimizer
from pipeline.records import Frame, Scalar
from pipeline.transform import Transform
from pipeline.transforms import MaybeStep

__all__ = ["OfUpdates", "OfWindows"]


class OfWindows(Graphs):
    """Parts behind Accumulate: a graph for full windows, whatever their batches were like."""

    unseen = frozenset({"batch", "loss", "measures", "optimizer", "output"})

    def __init__(self, parts: Sequence[Transform], settings: Settings, listener: Listener) -> None:
        super().__init__(parts, settings, listener)
        self._waits = all("ready" in fields(part, "reads") for part in parts)

    def __call__(self, frame: Frame) -> Frame:
        if frame.ready:
            return self._through(frame)
        return frame if self._waits else self._as_they_are(frame)


class OfUpdates(OfWindows):
    """Parts behind Accumulate that end with the step."""

    unseen = OfWindows.unseen - {"optimizer"}

    def __init__(self, parts: Sequence[Transform], step: MaybeStep, settings: Settings, listener: Listener) -> None:
        super().__init__(parts, settings, listener)
        self._ending = self._stepping = Stepping(step)

    def __call__(self, frame: Frame) -> Frame:
        state = frame.state
        if not frame.ready:
            return super().__call__(frame)
        nothing = not state.window.grads or _is_zero(frame.update_factor)
        if nothing or not (state.progress.updates or state.optimizer.tensors):
            return self._as_they_are(frame)  # the first update makes the optimizer's state
        frame = with_plain_optimizer(frame)
        try:
            made = self._through(frame)
        except NotYetError:
            return self._as_they_are(frame)
        return made if isinstance(made, Frame) else self._stepping.settled(frame, *made)

    def _to_trace(self) -> Sequence[Transform]:
        return self.parts[:-1]


def _is_zero(factor: Scalar) -> bool:
    return isinstance(factor, float) and factor == 0.0

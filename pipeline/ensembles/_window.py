"""Each member's loss scale in the window of all."""

from __future__ import annotations

import attrs

from pipeline.ensembles._clip import member_norms
from pipeline.ensembles._members import SCALES
from pipeline.ensembles._spoilt import with_spoilt
from pipeline.records import Frame
from pipeline.transforms._clipping import has_something

__all__ = ["UnscaleMembers"]


@attrs.frozen
class UnscaleMembers:
    """Behind Accumulate: take each member's loss scale out of its gradients.

    Reads:  `window.grads`, `ready`, `update_factor`; `slots`, for the loss scales.
    Writes: `update_factor`, with a row for each member; `slots`: whose sums have overflowed, while the window is open.
    Edges:  nothing where there are no loss scales.
    """

    reads = frozenset({"window.grads", "ready", "update_factor", "slots"})
    writes = frozenset({"update_factor", "slots"})

    def __call__(self, frame: Frame) -> Frame:
        scales, window = frame.state.slots.get(SCALES), frame.state.window
        if scales is None or not has_something(frame):
            return frame
        if frame.ready:
            return frame.having(update_factor=frame.update_factor / scales)
        overflowed = ~member_norms(window.grads.flat, 1).isfinite()
        return frame.having(state=with_spoilt(frame.state, overflowed, window.micro_batches - 1))

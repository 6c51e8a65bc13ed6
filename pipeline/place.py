"""`Place`: where a run stands beside its state, so that another process can go on as if nothing had happened."""

from __future__ import annotations

import attrs

from pipeline.records import Progress

__all__ = ["Place"]


@attrs.frozen
class Place:
    """Where a run stands between two micro-batches.

    `in_epoch`, whether a pass over the stream has begun and not ended; `read`, how many items the stream has given in
    it, and `batches`, how many of these were not None; `began`, the progress when it began; `waited`, seconds for data
    since the last window; `seconds` of the run so far; `until`, the limit that it was given; `rate_base`, the factor on
    the rates before any monitor asked for one.
    """

    in_epoch: bool = False
    read: int = 0
    batches: int = 0
    began: Progress = attrs.field(factory=Progress)
    waited: float = 0.0
    seconds: float = 0.0
    until: str = ""
    rate_base: float = 1.0

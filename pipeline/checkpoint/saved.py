"""`Saved`: a checkpoint in a list, and which of them a store keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import attrs

from pipeline._checks import one_of, whole
from pipeline.checkpoint._manifest import read_manifest

__all__ = ["Keeping", "Saved"]


@attrs.frozen
class Saved:
    """A checkpoint in a list: where it is, at which counts it was saved, when, why, what was measured then, by whom."""

    path: Path
    micro_step: int
    update: int
    epoch: int
    time: float
    reasons: tuple[str, ...]
    measures: Mapping[str, float]
    run: str
    size: int
    """Bytes."""

    @classmethod
    def at(cls, path: Path) -> Saved:
        """The checkpoint in the folder `path`, as its manifest tells; its other files are not looked at.

        Raises: CheckpointError, DamagedCheckpointError, CheckpointFormatError.
        """
        manifest = read_manifest(path)
        head = manifest.head
        return cls(
            path,
            head.micro_step,
            head.update,
            head.epoch,
            head.time,
            head.reasons,
            head.measures,
            head.run,
            manifest.size,
        )


@attrs.frozen
class Keeping:
    """Which checkpoints are kept: the `last` ones, the `best` ones by a measure, and those at multiples of an update.

    Args:   last: how many; measure, mode, best: by which measure of an evaluation, "min" or "max", and how many;
            every_updates: those whose update is a multiple of it.
    Raises: SettingError, when built.
    """

    last: int = 3
    measure: str | None = None
    best: int = 1
    mode: Literal["min", "max"] = "min"
    every_updates: int | None = None

    def __attrs_post_init__(self) -> None:
        whole("CheckpointStore.keep_last", self.last)
        whole("CheckpointStore.keep_best", self.best)
        if self.every_updates is not None:
            whole("CheckpointStore.keep_every", self.every_updates)
        one_of("CheckpointStore.mode", self.mode, "min", "max")

    def kept(self, found: Sequence[Saved]) -> list[Saved]:
        """Those of `found`, the oldest first, that stay."""
        chosen = [*found[-self.last :], *self.ranked(found)[: self.best]]
        if self.every_updates is not None:
            chosen += [saved for saved in found if saved.update % self.every_updates == 0]
        return [saved for saved in found if saved in chosen]

    def ranked(self, found: Iterable[Saved]) -> list[Saved]:
        """Those with the measure, the best first, of equal ones the earliest; NaN is never best."""
        nan, sign = float("nan"), 1 if self.mode == "min" else -1
        valued = [(sign * saved.measures.get(self.measure or "", nan), saved) for saved in found]
        return [saved for _, saved in sorted((pair for pair in valued if pair[0] == pair[0]), key=lambda pair: pair[0])]

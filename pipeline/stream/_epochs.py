"""Datasets that want to know which epoch comes."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


def tell_epoch(data: object, epoch: int) -> None:
    """Tell a dataset that wants to know it which epoch comes."""
    if hasattr(data, "set_epoch"):
        data.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]


class Told:
    """A dataset that is told its epoch, and read by several threads: those of another epoch wait until nobody reads."""

    def __init__(self, dataset: object) -> None:
        self._dataset = dataset
        self._epoch: int | None = None
        self._readers = 0
        self._changed = threading.Condition()

    @contextmanager
    def of(self, epoch: int) -> Generator[None]:
        """Inside, the dataset is in that epoch."""
        with self._changed:
            self._changed.wait_for(lambda: self._epoch == epoch or not self._readers)
            if self._epoch != epoch:
                self._epoch = None
                tell_epoch(self._dataset, epoch)
                self._epoch = epoch
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def __reduce__(self) -> tuple[Any, ...]:
        return Told, (self._dataset,)

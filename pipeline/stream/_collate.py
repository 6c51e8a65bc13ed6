"""Items into one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate

Collate = Callable[[list[Any]], Any]


def collated(collate: Collate, items: list[Any]) -> Any:
    """One batch."""
    there = [item for item in items if item is not None]
    try:
        return collate(there) if there else None
    except Exception as error:
        if isinstance(error, StopIteration):
            raise RuntimeError("A collate function raised StopIteration") from error
        cure = "; for items of several sizes give a `collate` that pads them" if collate is default_collate else ""
        error.add_note(f"in the collate function of a batch of {len(there)}{cure}")
        raise

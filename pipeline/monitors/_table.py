"""An immutable table: pairs of a key and a value, in the order in which the keys came."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def joined(
    a: tuple[tuple[K, V], ...], b: tuple[tuple[K, V], ...], join: Callable[[V, V], V]
) -> tuple[tuple[K, V], ...]:
    """Both tables in one; what both have is `join`ed, first `a`'s."""
    entries = dict(a)
    for key, value in b:
        entries[key] = join(entries[key], value) if key in entries else value
    return tuple(entries.items())

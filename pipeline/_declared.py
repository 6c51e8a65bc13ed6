"""What a transform says of itself: its name, how it was written, what it reads and writes."""

from __future__ import annotations


def name_of(transform: object) -> str:
    """The name by which a chain is edited: given by `named`, or that of the function or class."""
    name = getattr(transform, "name", None) or getattr(transform, "__name__", None)
    return name if isinstance(name, str) else type(transform).__name__


def fields(transform: object, kind: str) -> frozenset[str]:
    """What `transform` declares to `reads`, `writes` or `uses_up`; empty where it declares nothing."""
    return frozenset(getattr(transform, kind, ()))


def is_declared(transform: object) -> bool:
    """Whether the transform says what it reads and writes, so that its order can be checked."""
    return hasattr(transform, "reads") or hasattr(transform, "writes")


def show(transform: object) -> str:
    """How a transform was written."""
    return transform.__qualname__ if hasattr(transform, "__qualname__") else repr(transform)  # type: ignore[attr-defined]

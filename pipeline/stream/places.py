"""Where any stream stands, a node or not, and the way back there."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, cast, runtime_checkable

from pipeline.errors import PlaceError, StreamError
from pipeline.stream._noted import number
from pipeline.stream.node import Node

__all__ = ["go_to", "is_read_once", "place_of"]

_VERSION = 1


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None: ...


def is_read_once(stream: Iterable[Any]) -> bool:
    """Whether `stream` has one epoch only, as a generator has; a node has many, though it is an iterator too."""
    return isinstance(stream, Iterator) and not isinstance(stream, Node)


def place_of(stream: Iterable[Any], read: int) -> dict[str, Any]:
    """Where `stream` stands, `read` items into its present epoch: what `go_to` goes to.

    A node, and whatever else has `state_dict` and `load_state_dict` (a `StatefulDataLoader`), tells so itself; of any
    other iterable the place is the number of items. The value is plain, and JSON can hold it if such a state can.
    """
    state = copy.deepcopy(stream.state_dict()) if isinstance(stream, _Stateful) else None
    return {"version": _VERSION, "read": read, "state": state}


def go_to(stream: Iterable[Any], place: Mapping[str, Any]) -> int:
    """Go to a place that `place_of` told of, and return how many items the reader has still to pass over.

    None for a stream that keeps its own place. The others are read up to it: a list at no cost, a `DataLoader` at that
    of the items.

    Raises: StreamError for a generator, unless it is at the beginning; PlaceError for the place of another stream, and
            for what is none.
    """
    try:
        version, read, state = place["version"], number(place, "read"), place["state"]
    except (KeyError, TypeError) as error:
        raise PlaceError(type(stream).__name__, "that `place_of` told of", place) from error
    if version != _VERSION:
        raise PlaceError(type(stream).__name__, f"with version {_VERSION}", version)
    if state is not None and isinstance(stream, _Stateful):
        stream.load_state_dict(state)
        return 0
    if read and is_read_once(stream):
        raise StreamError(
            f"A {type(cast('object', stream)).__name__} has no way back to its item {read}: give the fold a stream "
            "that knows its place, `stream.source(lambda epoch: make())` of the function that makes it, or a list."
        )
    return read

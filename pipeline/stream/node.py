"""`Node`: a stream of items, and a place in it."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Mapping
from types import TracebackType
from typing import Any, ClassVar, Self

from torchdata.nodes import BaseNode

from pipeline._checks import whole
from pipeline.errors import PlaceError, SettingError

__all__ = ["Node"]

_VERSION = 1
_HEADER = ("node", "version", "world", "order")
_CURES = {
    "world": "The world size may change only where nothing but batch, map, prefetch stand behind `shard`.",
    "order": "The order of this epoch is another one now: `begin(epoch)` goes to the start of an epoch.",
}


class Node(BaseNode[Any]):
    """A stream of items, and a place in it.

    A `for` loop gives the rest of the present epoch from where the node stands, and the next loop is the next epoch. A
    loop that is left in the middle leaves the node where it stood: another one goes on from there.

    `state_dict()` is that place, a plain value for JSON, after the last item that was given out, whatever was read
    ahead. `load_state_dict(state)` goes there, at any moment, and `begin(epoch)` goes to the start of an epoch. Where a
    read fails, or is interrupted, the node stays where it was: asking again asks for the same item again.

    Threads and processes that read ahead end with the loop that is left in the middle, with an error, with `close()`,
    at the end of a `with` block, and with the node itself. The place stays.

    A node of torchdata: `reset`, `next` and `get_state` are what torchdata's own nodes ask for. One of your own takes
    its sources to `super().__init__` and defines `next`, `get_state`, `load` and `to_epoch`.
    """

    name: ClassVar[str] = "node"
    """The function that makes such a node, for the repr."""
    kind: ClassVar[str] = "node"
    """What a place of this kind of node is called; nodes of one kind can take over from each other."""
    steady: ClassVar[bool] = False
    """Whether a failed read leaves the node and all before it where they were."""
    purpose: ClassVar[int] = 0
    """What it draws numbers for, if it does; see `depth`."""

    def __init__(self, *sources: Node) -> None:
        super().__init__()
        self.sources = tuple(source.joined() for source in sources)
        self.defaults_seed: int = sources[0].defaults_seed if sources else 0  # of what items draw by themselves
        self._is_joined = self._is_over = False
        self._undo: dict[str, Any] | None = None

    # -- for a node to define -------------------------------------------------------------------------------------

    def next(self) -> Any:
        """The next item. StopIteration at the end of the epoch, and the node then stands at the start of the next."""
        raise NotImplementedError

    def get_state(self) -> dict[str, Any]:
        """Where the node stands after the last item, as a new plain value that JSON can hold."""
        raise NotImplementedError

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to a place that `get_state` told of."""
        raise NotImplementedError

    def to_epoch(self, epoch: int) -> None:
        """Go to the start of that epoch: what `begin` does."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The present epoch, from 0."""
        return self.sources[0].epoch

    def address(self, epoch: int, index: int) -> tuple[int, int]:
        """What tells item `index` of that epoch from all others, on all ranks: what its randomness is keyed by."""
        return self.sources[0].address(epoch, index) if self.sources else (epoch, index)

    def skip(self, n: int) -> int:
        """Pass over n items; how many there were. Fewer than n means that the epoch has ended."""
        for passed in range(n):
            try:
                self.next()
            except StopIteration:
                return passed
        return n

    @property
    def ranks(self) -> int:
        """Over how many ranks the data is shared out before this node."""
        return self.sources[0].ranks if self.sources else 1

    @property
    def world(self) -> int:
        """The ranks that there must be for a place of this node to mean the same."""
        return self.ranks

    @property
    def order(self) -> str:
        """What its order follows from, besides that of its sources: a place in one order is none in another."""
        return ""

    def depth(self, purpose: int) -> int:
        """How many nodes in a row draw for that purpose, up to this one: with one seed, each draws other numbers."""
        return max((source.depth(purpose) for source in self.sources), default=0) + (self.purpose == purpose)

    @property
    def is_endless(self) -> bool:
        """Whether no epoch ever ends."""
        return any(source.is_endless for source in self.sources)

    def __len__(self) -> int:
        raise TypeError(f"{self!r} does not know its length")

    # -- for users ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the node stands, as a plain value that JSON can hold and that nothing changes later."""
        if self._undo is not None:
            return copy.deepcopy(self._undo)
        return self._noted()

    def _noted(self) -> dict[str, Any]:
        return {**self._header(), **self.get_state()}

    def _header(self) -> dict[str, Any]:
        return {"node": self.kind, "version": _VERSION, "world": self.world, "order": self.order}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a place that `state_dict` told of, of this stream or of one that is composed alike.

        Raises: PlaceError for a place of another stream; this one is then where it was.
        """
        if not isinstance(state_dict, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlaceError(repr(self), "that is a mapping", state_dict)
        before = self.state_dict()
        try:
            self.reset(state_dict)
        except BaseException:
            self.reset(before)
            raise

    def begin(self, epoch: int = 0) -> None:
        """Go to the start of that epoch.

        Raises: SettingError for what is no number of an epoch.
        """
        whole("begin(epoch)", epoch, 0)
        self._undo, self._is_over = None, False
        self.to_epoch(epoch)

    def reset(self, initial_state: Mapping[str, Any] | None = None) -> None:
        """As torchdata has it: go to a place, or with None to the beginning of the present epoch."""
        super().reset(None)
        self._undo, self._is_over = None, False
        if initial_state is None:
            self.to_epoch(self.epoch)
        else:
            self._go(copy.deepcopy(dict(initial_state)))

    def _go(self, state: dict[str, Any]) -> None:
        self._check(state)
        try:
            self.load({name: value for name, value in state.items() if name not in _HEADER})
        except PlaceError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise PlaceError(repr(self), "with what such a node notes down", state) from error

    def _check(self, state: Mapping[str, Any]) -> None:
        for name, value in self._header().items():
            if state.get(name) != value:
                raise PlaceError(repr(self), f"with {name} {value!r}", state.get(name), _CURES.get(name, ""))

    @property
    def skipped(self) -> int:
        """Items that were skipped for an error since the stream was built, where it is told to skip."""
        return sum(source.skipped for source in self.sources)

    def close(self) -> None:
        """End the threads and processes that read ahead; the place stays, and reading on starts them anew."""
        for source in self.sources:
            source.close()

    def __next__(self) -> Any:
        if self._is_over:  # as iterators have it, until there is a loop or a `reset`
            raise StopIteration
        try:
            return self._give()
        except StopIteration:
            self._is_over = True
            raise

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._rest()

    def _rest(self) -> Generator[Any]:
        """What is left of the epoch."""
        ended = self._is_over = False
        try:
            while True:
                try:
                    item = self._give()
                except StopIteration:
                    ended = True
                    return
                yield item
        finally:
            if not ended:
                self.close()

    def _give(self) -> Any:
        """The next item; where there is none for an error or an interruption, the place stays."""
        before = self._undo
        try:
            if before is not None:
                self.reset(before)
            elif not self.steady:
                before = self.state_dict()
            return self.next()
        except StopIteration:
            raise
        except BaseException:
            self._undo = before
            raise

    def joined(self) -> Node:
        """This node as the source of another, which then moves it: it can be part of one stream only."""
        if self._is_joined:
            cure = "Build it anew for each."
            raise SettingError(f"A source {self!r}", "part of one stream only", "a second one", cure)
        self._is_joined = True
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __bool__(self) -> bool:
        return True  # not its length, which it may not know

    def settings(self) -> tuple[str, ...]:
        """The settings as they were written, for the repr."""
        return ()

    def __repr__(self) -> str:
        return f"{self.name}({', '.join((*map(repr, self.sources), *self.settings()))})"

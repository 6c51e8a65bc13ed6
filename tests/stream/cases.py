"""The streams that the laws run over: each public function that makes one is in at least one case.

A case builds the same stream anew each time it is called, over a few small items, None among them. What is named
`process` or `thread` has workers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from pipeline import stream
from pipeline.stream import Node, Processes, Threads

END = "the end of an epoch"

DATA: list[Any] = [0, 1, None, 3, 4, 5, 6, 7, 8, 9, 10]
TEXT = ["a" * n for n in (3, 1, 4, 1, 5, 2, 6, 2, 3)]


class Counted:
    """An iterable of the numbers below n, begun anew each time, that knows its epoch."""

    def __init__(self, n: int) -> None:
        self.n, self.epoch = n, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return (None if i == 2 else (self.epoch, i) for i in range(self.n))


class Keeping:
    """An iterable with a state of its own, which it hands out live, as some do."""

    def __init__(self, n: int) -> None:
        self.n, self.state, self.begin_at = n, {"next": 0}, 0

    def __iter__(self) -> Iterator[int]:
        self.state["next"], self.begin_at = self.begin_at, 0
        while self.state["next"] < self.n:
            self.state["next"] += 1
            yield self.state["next"] - 1

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin_at = state["next"]


def by_epoch(epoch: int) -> Iterator[Any]:
    return iter([None if i == 1 else 100 * epoch + i for i in range(7)])


def noisy(x: Any, generator: torch.Generator) -> tuple[Any, int]:
    return x, int(torch.randint(10**6, (), generator=generator))


def doubled(x: Any) -> Any:
    return (x, x)


def is_kept(x: Any) -> bool:
    return hash(x) % 3 != 1


def read_letters(word: str, after: int | None) -> Iterator[tuple[str, int]]:
    for at in range(after or 0, len(word)):
        yield word[at], at + 1


def columns() -> dict[str, Tensor]:
    return {"x": torch.arange(11), "y": torch.arange(22).reshape(11, 2)}


def rows(seed: int = 0) -> Node:
    return stream.shuffle(DATA, seed=seed)


@attrs.frozen
class Case:
    """A stream by name; `covers` are the functions that it stands for."""

    name: str
    build: Callable[[], Any]
    covers: frozenset[str]


def _case(name: str, build: Callable[[], Any]) -> Case:
    return Case(name, build, frozenset(name.split()) & frozenset(stream.__all__))


FOLDER = Path(__file__).parent / "data"


def _files(suffix: str) -> list[str]:
    return sorted(map(str, FOLDER.glob(f"*.{suffix}")))


CASES: list[Case] = [
    _case("source of a list", lambda: stream.source(DATA)),
    _case("source of tensors", lambda: stream.source(columns())),
    _case("source of an iterable", lambda: stream.source(Counted(7))),
    _case("source of a function", lambda: stream.source(by_epoch)),
    _case("source that keeps its place", lambda: stream.source(Keeping(6))),
    _case("shuffle", rows),
    _case("shuffle through a buffer", lambda: stream.shuffle(by_epoch, buffer=3, seed=1)),
    _case("shuffle through a buffer larger than the data", lambda: stream.shuffle(by_epoch, buffer=99)),
    _case("weighted", lambda: stream.weighted(DATA, [1, 0, 2, 1, 1, 0, 0, 3, 1, 1, 1], draws=9)),
    _case("weighted without replacement", lambda: stream.weighted(DATA, range(11), replacement=False, draws=8)),
    _case("map", lambda: stream.map(rows(), noisy, seed=3)),
    _case("map of an iterable", lambda: stream.map(Counted(7), noisy, seed=3)),
    _case("map by a thread", lambda: stream.map(rows(), noisy, seed=3, workers=Threads(2))),
    _case("map of an iterable by a thread", lambda: stream.map(Counted(7), noisy, seed=3, workers=Threads(2))),
    _case("filter", lambda: stream.filter(rows(), is_kept)),
    _case("batch", lambda: stream.batch(rows(), 4, collate=list)),
    _case("batch without the last", lambda: stream.batch(rows(), 4, collate=list, drop_last=True)),
    _case("batch of tensors", lambda: stream.batch(stream.shuffle(columns()), 4)),
    _case("batch of an iterable", lambda: stream.batch(Counted(7), 3, collate=list)),
    _case("batch of an iterable without the last", lambda: stream.batch(Counted(7), 3, collate=list, drop_last=True)),
    _case("split", lambda: stream.split(stream.batch(stream.shuffle(columns()), 5), 2)),
    _case("take", lambda: stream.take(rows(), 5)),
    _case("take of an iterable", lambda: stream.take(by_epoch, 3)),
    _case("take more than there is", lambda: stream.take(by_epoch, 30)),
    _case("repeat", lambda: stream.take(stream.batch(stream.repeat(rows(), 2), 4, collate=list), 4)),
    _case("repeat of an iterable", lambda: stream.repeat(by_epoch, 2)),
    _case("repeat without an end", lambda: stream.take(stream.repeat(by_epoch), 17)),
    _case("shard", lambda: stream.shard(rows(), 1, 2)),
    _case("shard padded", lambda: stream.batch(stream.shard(rows(), 2, 3, uneven="pad"), 2, collate=list)),
    _case("shard of an iterable", lambda: stream.shard(by_epoch, 1, 3)),
    _case("shard of an iterable padded", lambda: stream.shard(by_epoch, 1, 4, uneven="pad")),
    _case("mix", lambda: stream.mix([rows(), by_epoch, Counted(3)], [1, 2, 0.5], seed=4)),
    _case("mix to the first end", lambda: stream.mix([stream.repeat(rows()), by_epoch], ends="first")),
    _case("bucket_by_length", lambda: stream.bucket_by_length(TEXT, 2, pool=2, collate=list)),
    _case("token_budget", lambda: stream.token_budget(stream.shuffle(TEXT), 9, pool=5, collate=list)),
    _case("unfold", lambda: stream.unfold(["ab", None, "", "cde", "f"], read_letters)),
    _case("lines", lambda: stream.lines(stream.shuffle(_files("jsonl")))),
    _case("json_lines", lambda: stream.json_lines(_files("jsonl"))),
    _case("prefetch", lambda: stream.prefetch(rows(), 3)),
    _case("prefetch of an iterable", lambda: stream.prefetch(stream.shuffle(by_epoch, buffer=4), 3)),
    _case("prefetch by a thread", lambda: stream.prefetch(stream.batch(rows(), 2), workers=Threads(3, ahead=1))),
    _case("to_device", lambda: stream.to_device(stream.batch(columns(), 4), "cpu")),
    _case("batches", lambda: stream.batches(columns(), 3, shuffle=True, epochs=2, ahead=2)),
    _case("batches of an iterable", lambda: stream.batches(by_epoch, 3, shuffle=True, buffer=4, collate=list)),
]

PROCESSES: list[Case] = [
    _case("prefetch by a process", lambda: stream.prefetch(stream.batch(rows(), 3), workers=Processes(2))),
    _case("map by a process", lambda: stream.map(by_epoch, noisy, seed=3, workers=2)),
]
"""Cases that start processes, which takes seconds."""


def plain(value: Any) -> Any:
    """A value that can be compared."""
    if isinstance(value, Tensor):
        return ["tensor", str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain, value)]
    return value


def read(node: Node, n: int) -> list[Any]:
    """The next n things that come: items, and ends of epochs."""
    found: list[Any] = []
    for _ in range(n):
        try:
            found.append(plain(next(node)))
        except StopIteration:
            found.append(END)
            node.reset()  # as torchdata does; a `for` loop goes on by itself
    return found


def carried(state: dict[str, Any]) -> dict[str, Any]:
    """A state as it comes back from a file."""
    return json.loads(json.dumps(state))

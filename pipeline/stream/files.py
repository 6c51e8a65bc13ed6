"""Records out of files: lines, JSON, Parquet, or what a function of yours reads."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import attrs

from pipeline._declared import name_of
from pipeline.errors import SettingError
from pipeline.stream._chained import Chained
from pipeline.stream._guard import Guard
from pipeline.stream._noted import flag
from pipeline.stream.node import Node
from pipeline.stream.sources import source

__all__ = ["json_lines", "lines", "parquet", "unfold"]

Read = Callable[[Any, Any], Iterable[tuple[Any, Any]]]


def unfold(data: Any, read: Read) -> Node:
    """Several items out of each: `read(item, after)` gives them one by one, each with a mark.

    A mark is a plain value that JSON can hold. `after` is None, or the mark of the last item that was given out: then
    `read` goes on behind it. So a place costs no more to go to than `read` takes to get there. An item of None gives
    nothing.

    Raises: SettingError for a `read` that cannot be called.
    """
    if not callable(read):
        raise SettingError("unfold(read)", "a function of an item and a mark", read)
    return _Unfolded(source(data), read)


class _Unfolded(Chained):
    """What is read out of each item."""

    name = kind = "unfold"

    def __init__(self, node: Node, read: Read) -> None:
        super().__init__(node)
        self._read = read
        self._guard = Guard(f"unfold({name_of(read)})", "raise")
        self._stand(None, None)

    def _stand(self, starts: dict[str, Any] | None, after: Any) -> None:
        """Nothing is open. With `starts`, where the item in work begins in the source, it is to be opened again."""
        self._starts, self._after = starts, after
        self._opened: Iterator[tuple[Any, Any]] | None = None

    def next(self) -> Any:
        while True:
            if self._opened is None:
                self._open()
            try:
                item, self._after = next(cast("Iterator[tuple[Any, Any]]", self._opened))
                return item
            except StopIteration:
                self._stand(None, None)
            except Exception as error:
                self._stand(self._starts, self._after)
                self._guard.take(error, f"what follows {self._after!r} in an item of epoch {self.epoch}")

    def _open(self) -> None:
        if self._starts is not None:
            self.source.reset(self._starts)
        starts, after = self.source.state_dict(), self._after
        item = self.source.next()
        self._opened = iter(() if item is None else self._read(item, after))
        self._starts = starts

    def to_epoch(self, epoch: int) -> None:
        super().to_epoch(epoch)
        self._stand(None, None)

    def get_state(self) -> dict[str, Any]:
        if self._starts is None:
            return {"source": self.source.state_dict(), "in_item": False, "after": None}
        return {"source": self._starts, "in_item": True, "after": self._after}

    def load(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        self._stand(state["source"] if flag(state, "in_item") else None, state["after"])

    def close(self) -> None:
        super().close()
        if self._opened is not None:
            self._stand(self._starts, self._after)  # which closes its file

    def settings(self) -> tuple[str, ...]:
        return (name_of(self._read),)


def lines(paths: Any) -> Node:
    """The lines of text files, in UTF-8, without their ends. A place is a number of bytes: going there is a seek.

    Args: paths: one, or several in their order, or a stream of them: `lines(shuffle(paths))` reads the files in another
          order in each epoch, `lines(shard(paths, rank, world))` those of this rank.
    """
    return unfold(_several(paths), _Text("lines", None))


def json_lines(paths: Any) -> Node:
    """The values in files of JSON, one a line; otherwise as `lines`. Empty lines are passed over."""
    return unfold(_several(paths), _Text("json_lines", json.loads))


def parquet(paths: Any, columns: Iterable[str] | None = None) -> Node:
    """The rows of Parquet files, each as a dict; otherwise as `lines`. Going to a place reads its row group again.

    Args:   columns: those to read, all by default.
    Raises: ImportError without pyarrow: `pip install 'foldtrain[parquet]'`; SettingError for a name in place of names.
    """
    try:
        importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        error.add_note("parquet needs pyarrow: pip install 'foldtrain[parquet]'")
        raise
    if isinstance(columns, str):
        raise SettingError("parquet(columns)", "several names", columns, f"Give [{columns!r}].")
    return unfold(_several(paths), _Parquet(None if columns is None else tuple(columns)))


def _several(paths: Any) -> Any:
    return [os.fspath(paths)] if isinstance(paths, (str, Path)) else paths


@attrs.frozen
class _Text:
    """The lines of a file from a byte on, parsed."""

    name: str
    parse: Callable[[str], Any] | None

    def __call__(self, path: str | Path, after: int | None) -> Iterator[tuple[Any, int]]:
        at = after or 0
        with open(path, "rb") as file:
            file.seek(at)
            for line in file:
                at += len(line)
                text = line.decode("utf-8").removesuffix("\n").removesuffix("\r")
                if self.parse is None:
                    yield text, at
                elif text.strip():
                    try:
                        value = self.parse(text)
                    except Exception as error:
                        error.add_note(f"in {os.fspath(path)}, in the line that ends at byte {at}")
                        raise
                    yield value, at


@attrs.frozen
class _Parquet:
    """The rows of a file from a row of a row group on."""

    columns: tuple[str, ...] | None
    name = "parquet"

    def __call__(self, path: str | Path, after: Any) -> Iterator[tuple[dict[str, Any], list[int]]]:
        import pyarrow.parquet  # noqa: PLC0415 - pyarrow is optional

        first, done = after or (0, 0)
        with pyarrow.parquet.ParquetFile(path) as file:
            for group in range(first, file.num_row_groups):
                row = 0
                for table in file.iter_batches(row_groups=[group], columns=self.columns and list(self.columns)):
                    for record in table.slice(max(0, done - row)).to_pylist() if row + len(table) > done else ():
                        done += 1
                        yield record, [group, done]
                    row += len(table)
                done = 0

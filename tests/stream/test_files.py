"""Records out of files: read in order, gone on with by a seek."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pipeline import stream
from pipeline.errors import SettingError
from pipeline.stream import Node
from tests.stream.cases import carried, read
from tests.stream.test_law_resume import check_cut, whole


def written(folder: Path, texts: list[str]) -> list[Path]:
    paths = [folder / f"part-{i}.txt" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text.encode("utf-8"))
    return paths


def test_lines_are_those_of_the_files_in_order(tmp_path: Path) -> None:
    paths = written(tmp_path, ["one\ntwo\n", "", "drei\r\n\nfünf"])
    assert [*stream.lines(paths)] == ["one", "two", "drei", "", "fünf"]
    assert [*stream.lines(paths[0])] == [*stream.lines(str(paths[0]))] == ["one", "two"]


def test_going_on_is_a_seek_and_no_file_before_it_is_opened(tmp_path: Path) -> None:
    paths = written(tmp_path, ["a\n" * 3, "é" * 1000 + "\nlast\n"])
    node = stream.lines(paths)
    read(node, 4)
    place = carried(node.state_dict())
    assert place["after"] == 2001
    node.close()
    paths[0].unlink()
    paths[1].write_bytes(b"x" * 2001 + b"last\n")  # what lies before the place is not looked at
    other = stream.lines(paths)
    other.load_state_dict(place)
    assert [*other] == ["last"]


def test_files_may_be_shuffled_and_shared_out(tmp_path: Path) -> None:
    paths = written(tmp_path, [f"{i}a\n{i}b\n" for i in range(6)])
    node = stream.lines(stream.shuffle(paths))
    first, second = [*node], [*node]
    assert first != second
    assert sorted(first) == sorted(second) == [*stream.lines(paths)]
    ranks = [[*stream.lines(stream.shard(paths, rank, 2))] for rank in range(2)]
    assert ranks[0] == ["0a", "0b", "2a", "2b", "4a", "4b"]
    assert sorted(ranks[0] + ranks[1]) == [*stream.lines(paths)]


def test_json_that_cannot_be_read_names_its_file_and_place(tmp_path: Path) -> None:
    (path,) = written(tmp_path, ['{"a": 1}\n\n[2]\n{"a":\n'])
    node = stream.json_lines(path)
    assert [next(node), next(node)] == [{"a": 1}, [2]]
    for _ in range(2):
        with pytest.raises(json.JSONDecodeError) as failure:
            next(node)
        assert f"in {path}, in the line that ends at byte 20" in failure.value.__notes__
    node.close()
    parsed = stream.map(stream.lines(path), json.loads, errors="skip")
    assert [*parsed] == [{"a": 1}, None, [2], None]
    assert parsed.skipped == 2


def parquet_files(folder: Path) -> list[Path]:
    paths = [folder / "one.parquet", folder / "two.parquet"]
    for start, path in zip((0, 100), paths, strict=True):
        table = pyarrow.table({"n": list(range(start, start + 7)), "text": [f"<{i}>" for i in range(7)]})
        pyarrow.parquet.write_table(table, path, row_group_size=3)
    return paths


def test_parquet_gives_its_rows_and_those_columns_that_are_asked_for(tmp_path: Path) -> None:
    paths = parquet_files(tmp_path)
    assert [row["n"] for row in stream.parquet(paths)] == [*range(7), *range(100, 107)]
    assert next(stream.parquet(paths)) == {"n": 0, "text": "<0>"}
    assert next(stream.parquet(paths[1], ["text"])) == {"text": "<0>"}
    with pytest.raises(SettingError, match=r"parquet\(columns\) must be several names, got 'text'\. Give \['text'\]"):
        stream.parquet(paths, "text")


def test_parquet_is_gone_on_with_at_every_row(tmp_path: Path) -> None:
    paths = parquet_files(tmp_path)

    def build() -> Node:
        return stream.parquet(stream.shuffle(paths), ["n"])

    uncut = whole(build)
    for first in range(len(uncut)):
        check_cut(build, uncut, first, min(first + 2, len(uncut)))


def test_reading_may_be_a_function_of_yours() -> None:
    def letters(word: str, after: int | None) -> Any:
        return ((letter, at) for at, letter in enumerate(word) if after is None or at > after)

    node = stream.unfold(["ab", "c"], letters)
    assert [*node] == ["a", "b", "c"]
    with pytest.raises(SettingError, match=r"unfold\(read\)"):
        stream.unfold(["ab"], 3)


def test_a_file_is_closed_when_a_loop_is_left(tmp_path: Path) -> None:
    # An open file that is dropped would be a ResourceWarning, and so an error.
    node = stream.lines(written(tmp_path, ["a\nb\nc\n"]))
    for line in node:
        assert line == "a"
        break
    assert [*node] == ["b", "c"]
    next(node.__iter__())
    del node

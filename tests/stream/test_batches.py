"""Batches: the same as `DataLoader`'s, read at once where that is possible, cut, and sent to a device."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from pipeline import stream
from pipeline.errors import SettingError, StreamError
from tests.stream.cases import by_epoch, plain


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Sample:
    x: Tensor
    name: str


@attrs.frozen
class Record:
    x: Tensor
    inner: Any
    note: str = "as it was"


X, Y = torch.arange(22.0).reshape(11, 2), torch.arange(11)
COLUMNS: list[Any] = [X, (X, Y), [X, Y], Pair(X, Y), {"x": X, "y": Y}, TensorDataset(X, Y), (X, {"y": (Y,)})]


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and plain(a) == plain(b)


# -- as DataLoader has them --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("data", [TensorDataset(X, Y), [(x, int(y)) for x, y in zip(X, Y, strict=True)], list(Y)])
def test_batches_are_those_of_a_data_loader(data: Any, drop_last: bool) -> None:
    theirs = [*DataLoader(data, 4, drop_last=drop_last)]
    for ours in (
        stream.batches(data, 4, drop_last=drop_last),
        stream.batches(lambda epoch: [data[i] for i in range(11)], 4, drop_last=drop_last),
    ):
        assert len(theirs) == len(list(ours))
        assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))


class Listed(IterableDataset[int]):
    """An iterable dataset that has a `__getitem__`, as all of torch's have."""

    def __iter__(self) -> Any:
        return iter(range(5))


class Asked(Dataset[int]):
    """A dataset that is asked for many items at once."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.asked.append(indices)
        return [10 * index for index in indices]


class Forgetful(Asked):
    """A dataset that gives less than it is asked for."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices[1:]


def test_a_dataset_that_gives_less_than_it_is_asked_for_is_told() -> None:
    node = stream.batches(Forgetful(), 2)
    for _ in range(2):
        with pytest.raises(StreamError, match=r"Forgetful\.__getitems__ gave 1 items for 2 indices") as failure:
            next(node)
        assert "indices [0, 1] of the dataset" in failure.value.__notes__[0]


def test_datasets_of_torch_are_read_as_what_they_are() -> None:
    assert [batch.tolist() for batch in stream.batches(Listed(), 2)] == [[0, 1], [2, 3], [4]]
    data = Asked()
    assert [batch.tolist() for batch in stream.batches(data, 2)] == [[0, 10], [20, 30], [40]]
    assert data.asked == [[0, 1], [2, 3], [4]]
    subset = Subset(TensorDataset(X, Y), [4, 2, 7])
    assert [batch[1].tolist() for batch in stream.batches(subset, 2)] == [[4, 2], [7]]


@pytest.mark.parametrize("data", [c for c in COLUMNS if not isinstance(c, list)], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("shuffle", [False, True])
def test_tensors_give_the_same_batches_at_once_as_item_by_item(data: Any, shuffle: bool) -> None:
    at_once = stream.batches(data, 4, shuffle=shuffle, seed=3)
    one_by_one = stream.source(data)
    one_by_one = stream.shuffle(one_by_one, seed=3) if shuffle else one_by_one
    one_by_one = stream.batch(stream.map(one_by_one, lambda x: x), 4)
    for _ in range(2):
        assert all(same(a, b) for a, b in zip(at_once, one_by_one, strict=True))
    assert len(at_once) == 3


def test_a_list_of_tensors_is_a_list_of_items_and_a_tuple_of_them_columns() -> None:
    assert len(stream.source([X, Y])) == 2
    assert len(stream.source((X, Y))) == 11
    assert len(stream.source((X, "name"))) == 2


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "indices", [[4, 2, 7, -1, 2], [], torch.tensor([10, 0])], ids=["a list", "nothing", "a tensor"]
)
def test_a_subset_of_tensors_is_read_at_once_too(shuffle: bool, indices: Any) -> None:
    for data in (Subset(TensorDataset(X, Y), indices), Subset(Subset(TensorDataset(X, Y), range(11)), indices)):
        node = stream.batches(data, 2, shuffle=shuffle, seed=3)
        with Ops() as ops:
            found = [*node]
        assert "aten.stack.default" not in ops.names
        items = [data[i] for i in range(len(data))]
        expected = [*stream.batches(items, 2, shuffle=shuffle, seed=3)]
        assert plain(found) == plain(expected)
    assert repr(stream.source(data)) == f"source(Subset of {len(indices)})"


class Ops(TorchDispatchMode):
    """The names of the operations on tensors that are called meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_no_item_is_made_for_a_batch_of_tensors() -> None:
    rows = stream.repeat(stream.take(stream.shard(stream.weighted(stream.shuffle((X, Y)), [1.0] * 11), 1, 2), 4), 2)
    for node in (stream.batch(rows, 4), stream.batches((X, Y), 3, shuffle=True)):
        with Ops() as ops:
            assert len([*node]) == len(node)
        assert "aten.index_select.default" in ops.names
        assert not ops.names & {"aten.select.int", "aten.stack.default"}


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_is_the_readers_to_change(shuffle: bool) -> None:
    data = X.clone()
    for batch in stream.batches(data, 4, shuffle=shuffle):
        batch.zero_()
    assert torch.equal(data, X)


def test_none_among_the_items_is_left_out_and_a_batch_of_nothing_else_is_none() -> None:
    data = [1, None, 3, None, None, None, 7]
    expected = [[1, 3], None, [7]]
    for source in (data, lambda epoch: data):
        assert [*stream.batch(source, 3, collate=list)] == expected
        assert [batch if batch is None else batch.tolist() for batch in stream.batch(source, 3)] == expected


def test_items_of_several_sizes_are_told_with_the_cure() -> None:
    for data in ([torch.zeros(1), torch.zeros(2)], lambda epoch: [torch.zeros(1), torch.zeros(2)]):
        with pytest.raises(RuntimeError, match="stack expects") as failure:
            next(stream.batch(data, 2))
        assert "give a `collate` that pads them" in failure.value.__notes__[0]


def test_the_usual_stream_is_the_composition_that_it_says() -> None:
    ours = stream.batches(range(20), 3, shuffle=True, seed=4, epochs=2, rank=1, world=2, drop_last=True)
    parts = stream.shard(stream.repeat(stream.shuffle(range(20), seed=4), 2), 1, 2)
    parts = stream.batch(parts, 3, drop_last=True)
    assert repr(ours) == repr(parts)
    assert all(same(a, b) for a, b in zip(ours, parts, strict=True))
    ours = stream.batches(range(4), 2, weights=[0, 1, 1, 0], seed=1)
    parts = stream.batch(stream.weighted(range(4), [0, 1, 1, 0], seed=1), 2)
    assert all(same(a, b) for a, b in zip(ours, parts, strict=True))


def test_streams_print_as_they_were_written() -> None:
    node = stream.prefetch(stream.batch(stream.map(stream.shuffle(range(9), seed=2), str), 4, drop_last=True), 3)
    assert repr(node) == "prefetch(batch(map(shuffle(source(range of 9), seed=2), str), 4, drop_last=True), 3)"
    assert repr(stream.to_device(by_epoch, "cpu")).startswith("to_device(source(<function by_epoch")


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: stream.source({3, 1}), "an order of its own"),
        (lambda: stream.source({"a": 1}), "an order of its own"),
        (lambda: stream.source("words.txt"), r"`lines\(path\)` reads a file"),
        (lambda: stream.source(torch.tensor(3.0)), "a tensor with a row for each item, got 'one of no dimension'"),
        (lambda: stream.source({"x": X, "scale": torch.tensor(3.0)}), r"all have a row.*got \['scale'\].*in a `map`"),
        (lambda: stream.source({"x": X, "name": "a"}), r"got \['name'\]"),
        (lambda: stream.source(UserDict(x=X)), "a dict of tensors.*UserDict"),
        (lambda: stream.source(Subset(TensorDataset(X), [11])), r"a Subset of the 11 rows that there are, got \[11\]"),
        (lambda: stream.source(Subset(TensorDataset(X), [-12])), "a Subset of the 11 rows"),
        (lambda: stream.source(7), "a dataset with a length, an iterable"),
        (lambda: stream.source((X, Y[:3])), "the same number of rows"),
        (lambda: stream.source(by_epoch, errors="skip"), "`map` with errors='skip'"),
        (lambda: stream.batches(stream.source(range(3)), 2, errors="skip"), "a stream that is there already"),
        (lambda: stream.source(range(3), errors="ignore"), r"source\(errors\) must be 'raise' or 'skip'"),
        (lambda: stream.batch(range(3), 2, collate=3), r"batch\(collate\)"),
        (lambda: stream.map(range(3), 3), r"map\(function\)"),
        (lambda: stream.filter(range(3), 3), r"filter\(predicate\)"),
        (lambda: stream.split(range(3), 0), r"split\(size\)"),
        (lambda: stream.to_device(range(3), "gpu"), r"to_device\(device\) must be a torch\.device, got 'gpu'"),
        (lambda: stream.batch([shared, stream.batch(shared, 2)][1], 2) and stream.batch(shared, 2), "one stream only"),
    ],
)
def test_settings_are_checked(build: Any, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        build()


shared = stream.source(by_epoch)


def test_what_can_be_read_at_any_place_may_be_part_of_several_streams() -> None:
    rows = stream.shuffle(range(6))
    one, two = stream.filter(rows, lambda x: x % 2), stream.batch(rows, 2, collate=list)
    next(rows)
    next(two)
    assert sorted(one) == [1, 3, 5]
    assert len([*rows]) == 5
    assert len([*two]) == 2


# -- micro-batches -----------------------------------------------------------------------------------------------------


def test_a_batch_is_cut_where_it_has_rows() -> None:
    batch = {"x": X[:5], "names": list("abcde"), "pair": (Y[:5], None), "scale": torch.tensor(2.0), "kind": "train"}
    pieces = [*stream.split([batch], 2)]
    assert [piece["x"].tolist() for piece in pieces] == [X[:2].tolist(), X[2:4].tolist(), X[4:5].tolist()]
    assert [piece["names"] for piece in pieces] == [["a", "b"], ["c", "d"], ["e"]]
    assert [piece["pair"][0].tolist() for piece in pieces] == [[0, 1], [2, 3], [4]]
    assert all(piece["pair"][1] is None and piece["kind"] == "train" for piece in pieces)
    assert all(piece["scale"] is batch["scale"] for piece in pieces)
    assert batch["names"] == list("abcde")


def test_a_batch_that_fits_is_left_as_it_is_and_so_is_none() -> None:
    batch = Record(X[:2], [1])
    found = [*stream.split([batch, None], 2)]
    assert found[0] is batch
    assert found[1] is None
    record = next(stream.split([Record(X[:3], {"y": Y[:3]})], 2))
    assert (record.x.shape, record.inner["y"].tolist(), record.note) == ((2, 2), [0, 1], "as it was")


# -- to a device (MOD-4) -----------------------------------------------------------------------------------------------


def test_mod_4_every_container_is_walked_through_and_all_else_is_the_same_object() -> None:
    twice, thing = torch.ones(2), object()
    batch = {
        "tensor": torch.zeros(3),
        "tuple": (torch.zeros(1), None),
        "named": Pair(torch.zeros(1), torch.zeros(2)),
        "dataclass": Sample(torch.zeros(1), "a name"),
        "record": Record(torch.zeros(1), [torch.zeros(2), {"deep": (twice,)}]),
        "names": ["a", "b"],
        "int": 3,
        "0-dim": torch.tensor(1.0),
        "empty": {},
        "twice": [twice, twice],
        "ordered": OrderedDict(a=torch.zeros(1)),
        "user dict": UserDict(a=torch.zeros(1), b="text"),
        "packed": pack_sequence([torch.zeros(2, 1), torch.zeros(1, 1)]),
        "thing": thing,
    }
    before = plain(batch["tensor"]), batch["record"].x.device, batch["dataclass"].x
    (moved,) = stream.to_device([batch], "meta")
    assert {name: type(value) for name, value in moved.items()} == {name: type(v) for name, v in batch.items()}
    where = [
        moved["tensor"],
        moved["tuple"][0],
        *moved["named"],
        moved["dataclass"].x,
        moved["record"].x,
        moved["record"].inner[0],
        moved["record"].inner[1]["deep"][0],
        moved["0-dim"],
        *moved["twice"],
        moved["ordered"]["a"],
        moved["user dict"]["a"],
        moved["packed"].data,
    ]
    assert {tensor.device.type for tensor in where} == {"meta"}
    assert moved["packed"].batch_sizes.device.type == "cpu"
    assert isinstance(moved["packed"], PackedSequence)
    assert moved["twice"][0] is moved["twice"][1] is moved["record"].inner[1]["deep"][0]
    assert moved["tuple"][1] is None
    assert (moved["dataclass"].name, moved["record"].note, moved["user dict"]["b"]) == ("a name", "as it was", "text")
    assert (moved["names"], moved["int"], moved["empty"]) == (["a", "b"], 3, {})
    assert moved["thing"] is thing
    assert (plain(batch["tensor"]), batch["record"].x.device, batch["dataclass"].x) == before


def test_mod_4_a_mapping_that_cannot_change_is_made_anew() -> None:
    (moved,) = stream.to_device([MappingProxyType({"x": X})], "meta")
    assert type(moved) is MappingProxyType
    assert moved["x"].device.type == "meta"


def test_what_is_there_already_is_not_copied() -> None:
    (moved,) = stream.to_device([X], "cpu")
    assert moved is X


def test_pinned_memory_without_an_accelerator_is_refused() -> None:
    # On a machine that has one, it is given out.
    if torch.accelerator.is_available():
        assert next(stream.batches(X, 2, pin=True)).is_pinned()
    else:
        with pytest.raises(SettingError, match="pinned must be used where there is an accelerator"):
            stream.batches(X, 2, pin=True)

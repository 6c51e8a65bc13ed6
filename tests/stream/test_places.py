"""The place of any stream, and the way back there."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from pipeline import stream
from pipeline.errors import PlaceError, SettingError, StreamError
from pipeline.stream import Threads
from tests.stream.cases import Keeping, carried, read


def number(batch: Any) -> Any:
    return batch.tolist() if hasattr(batch, "tolist") else batch


def gone_on(build: Any, read_: int, rewrap: Any = carried) -> list[Any]:
    """What comes behind the place that is `read_` items into an epoch, in a fresh stream."""
    first, other = build(), build()
    iterator = iter(first)
    for _ in range(read_):
        next(iterator)
    place = rewrap(stream.place_of(first, read_))
    to_pass_over = stream.go_to(other, place)
    return [number(item) for item in islice(iter(other), to_pass_over, None)]


@pytest.mark.parametrize(
    "build",
    [
        lambda: stream.batches(range(10), 2, shuffle=True),
        lambda: stream.batches(range(10), 2, shuffle=True, workers=Threads(2), ahead=1),
        lambda: stream.shuffle(lambda epoch: range(5), buffer=3),
        lambda: [1, 2, 3, 4, 5],
        lambda: DataLoader(range(10), 2),
    ],
    ids=["node", "node with workers", "node over an iterable", "list", "DataLoader"],
)
def test_whatever_is_read_again_goes_on_where_it_was(build: Any) -> None:
    uncut = [number(item) for item in build()]
    assert len(uncut) == 5
    for read_ in range(6):
        assert gone_on(build, read_) == uncut[read_:]


# It warns itself of a call that torch has deprecated.
its_own_warning = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@its_own_warning
def test_a_stateful_data_loader_keeps_its_own_place() -> None:
    def build() -> Any:
        return StatefulDataLoader(range(10), 2)

    uncut = [number(item) for item in build()]
    for read_ in range(1, 5):
        assert gone_on(build, read_, rewrap=lambda place: place) == uncut[read_:]
    place = stream.place_of(build(), 0)
    assert stream.go_to(build(), place) == 0


@its_own_warning
def test_a_stateful_data_loader_may_be_the_source_of_a_stream() -> None:
    def build() -> Any:
        return stream.prefetch(StatefulDataLoader(range(10), 2), 2)

    uncut = [number(item) for item in read(build(), 11)]
    for cut in range(11):
        node, other = build(), build()
        read(node, cut)
        other.load_state_dict(node.state_dict())
        assert read(other, 11 - cut) == uncut[cut:]
        node.close()
        other.close()


def test_a_generator_has_no_way_back_and_says_what_to_give_instead() -> None:
    def numbers() -> Iterator[int]:
        yield from range(5)

    place = stream.place_of(numbers(), 2)
    with pytest.raises(StreamError, match=r"A generator has no way back to its item 2: .*source\(lambda epoch"):
        stream.go_to(numbers(), place)
    assert stream.go_to(numbers(), stream.place_of(numbers(), 0)) == 0
    assert stream.is_read_once(numbers())
    assert not any(map(stream.is_read_once, ([1], DataLoader(range(3)), stream.source(numbers()))))


@pytest.mark.parametrize("place", [None, {}, {"read": 1}, {"version": 1, "read": -3, "state": None}, [1], "x"])
def test_what_is_no_place_of_a_stream_is_told(place: Any) -> None:
    for other in ([1, 2], DataLoader(range(3)), stream.source([1])):
        with pytest.raises(PlaceError, match=r"that `place_of` told of, got"):
            stream.go_to(other, place)
        with pytest.raises(PlaceError, match="with version 1, got 2"):
            stream.go_to(other, {"version": 2, "read": 0, "state": None})


@pytest.mark.parametrize("epoch", [-1, 1.5, "a", None, True])
def test_what_is_no_epoch_is_refused(epoch: Any) -> None:
    for node in (stream.shuffle(range(3)), stream.source(in_a_row)):
        with pytest.raises(SettingError, match=r"begin\(epoch\) must be a whole number, 0 or more"):
            node.begin(epoch)
        assert node.epoch == 0


def test_nor_has_a_node_over_one() -> None:
    node = stream.source(iter(range(5)))
    read(node, 2)
    other = stream.source(iter(range(5)))
    with pytest.raises(PlaceError, match="can be read only once"):
        other.load_state_dict(node.state_dict())
    assert [*other] == [0, 1, 2, 3, 4]
    with pytest.raises(StreamError, match="a function of the epoch that makes it"):
        next(iter(other))
    node.load_state_dict(node.state_dict())  # it stands there
    assert next(node) == 2


def test_a_place_of_a_node_is_no_place_of_another() -> None:
    shuffled = stream.shuffle(range(10))
    for other, says in (
        (stream.filter(range(10), bool), "with node 'filter', got 'rows'"),
        (stream.shuffle(range(9)), "with order '9 rows, shuffled with seed 0', got '10 rows, shuffled with seed 0'"),
        (stream.shuffle(range(10), seed=1), "shuffled with seed 1"),
        (stream.source(range(10)), "with order '10 rows'"),
        (stream.weighted(range(10), [1] * 10), "weighted"),
    ):
        read(other, 1)
        before = other.state_dict()
        with pytest.raises(PlaceError, match=says):
            other.load_state_dict(shuffled.state_dict())
        assert other.state_dict() == before


@pytest.mark.parametrize(
    "broken",
    [
        lambda state: {},
        lambda state: {**state, "version": 2},
        lambda state: {**state, "row": 11},
        lambda state: {**state, "row": -1},
        lambda state: {name: value for name, value in state.items() if name != "epoch"},
        lambda state: {**state, "row": "three"},
    ],
)
def test_what_is_no_place_is_refused_and_the_stream_stays(broken: Any) -> None:
    node = stream.batch(stream.shuffle(range(10)), 2, collate=list)
    first = next(node)
    with pytest.raises(PlaceError):
        node.load_state_dict(broken(node.state_dict()))
    node.load_state_dict(node.state_dict())
    assert [first, *node] == [*stream.batch(stream.shuffle(range(10)), 2, collate=list)]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (lambda: stream.shuffle(in_a_row, buffer=10), lambda: stream.shuffle(in_a_row, buffer=4)),
        (lambda: stream.shuffle(in_a_row, buffer=10), lambda: stream.shuffle(in_a_row, buffer=10, seed=1)),
        (lambda: stream.take(in_a_row, 9), lambda: stream.take(in_a_row, 3)),
        (lambda: stream.mix([in_a_row, in_a_row]), lambda: stream.mix([in_a_row] * 3)),
        (lambda: stream.mix([in_a_row] * 3), lambda: stream.mix([in_a_row, in_a_row])),
        (lambda: stream.mix([in_a_row, in_a_row]), lambda: stream.mix([in_a_row, in_a_row], [1, 2])),
        (lambda: stream.mix([in_a_row, in_a_row]), lambda: stream.mix([in_a_row, in_a_row], ends="first")),
        (lambda: stream.split(in_a_row, 2), lambda: stream.split(in_a_row, 3)),
        (lambda: by_length(2, pool=5), lambda: by_length(2, pool=4)),
        (lambda: by_length(2, pool=5), lambda: by_length(5, pool=2)),
        (lambda: by_length(2, pool=5), lambda: by_length(2, pool=5, drop_last=True)),
        (lambda: budget(8, pool=6), lambda: budget(8, pool=5)),
        (lambda: budget(8, pool=6), lambda: budget(9, pool=6)),
        (lambda: budget(8, pool=6), lambda: budget(8, pool=6, seed=1)),
    ],
)
def test_a_place_in_another_order_is_refused_for_what_is_read_in_a_row_too(saved: Any, loaded: Any) -> None:
    node, other = saved(), loaded()
    read(node, 3)
    with pytest.raises(PlaceError, match=r"with order .*, got .*The order of this epoch is another one now"):
        other.load_state_dict(node.state_dict())
    again = saved()
    again.load_state_dict(node.state_dict())
    assert [*again] == [*node]


def in_a_row(epoch: int) -> Iterator[int]:
    return iter(range(20))


def by_length(size: int, **settings: Any) -> Any:
    return stream.bucket_by_length(in_a_row, size, length=int, collate=list, **settings)


def budget(tokens: int, **settings: Any) -> Any:
    return stream.token_budget(in_a_row, tokens, length=lambda item: item % 5, collate=list, **settings)


def test_a_place_in_what_has_become_less_is_told() -> None:
    node, other = (stream.split(stream.batch(torch.arange(12), size), 2) for size in (6, 4))
    read(node, 2)
    other.load_state_dict(node.state_dict())
    with pytest.raises(PlaceError, match="in a batch of 2 micro-batches, got 'number 2 of it'"):
        next(other)
    node, other = (stream.shuffle(lambda epoch, n=n: range(n), buffer=10) for n in (10, 5))
    read(node, 7)
    other.load_state_dict(node.state_dict())
    with pytest.raises(PlaceError, match="in its pool of 5, got 'number 7 of it'"):
        next(other)


def test_a_place_of_an_iterable_with_a_state_does_for_one_without() -> None:
    node, other = stream.source(Keeping(6)), stream.source(lambda epoch: range(6))
    read(node, 4)
    other.load_state_dict(node.state_dict())
    assert [*other] == [4, 5]


class Refusing(Keeping):
    """An iterable with a state that takes none."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise RuntimeError("no")


def test_a_state_that_an_iterable_does_not_take_is_its_own_error() -> None:
    node, other = stream.source(Keeping(6)), stream.source(Refusing(6))
    read(node, 4)
    other.load_state_dict(node.state_dict())
    with pytest.raises(RuntimeError, match="no"):
        next(other)


def test_nested_rubbish_is_refused_too() -> None:
    node = stream.batch(stream.filter(range(10), bool), 2, collate=list)
    read(node, 1)
    for state in ({**node.state_dict(), "source": 3}, {**node.state_dict(), "source": {}}):
        with pytest.raises(PlaceError):
            node.load_state_dict(state)
    assert next(node) == [3, 4]


def test_an_iterable_that_has_become_shorter_is_told() -> None:
    node, other = stream.source(lambda epoch: range(5)), stream.source(lambda epoch: range(3))
    read(node, 4)
    other.load_state_dict(node.state_dict())
    with pytest.raises(PlaceError, match="in its 3 items, got 'item 4'"):
        next(other)


class Untouched:
    """Ten million items, none of which may be looked at."""

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> int:
        raise AssertionError("read")


def test_going_to_a_place_reads_nothing_and_takes_no_time_where_any_place_can_be_read() -> None:
    node = stream.batches(Untouched(), 32, shuffle=True)
    place = {**node.state_dict(), "row": 32 * 200_000}
    times = []
    for _ in range(5):
        fresh = stream.batches(Untouched(), 32, shuffle=True)
        began = time.perf_counter()
        fresh.load_state_dict(place)
        assert fresh.state_dict() == place
        times.append(time.perf_counter() - began)
    assert min(times) < 0.05


def test_and_the_first_item_there_is_found_in_no_time_either() -> None:
    times = []
    for _ in range(5):
        node = stream.batches(range(10**7), 32, shuffle=True)
        began = time.perf_counter()
        node.load_state_dict({**node.state_dict(), "row": 32 * 200_000})
        next(node)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.05


class Counting:
    """An iterable that counts what is read of it."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        for i in range(100):
            self.read += 1
            yield i


def test_a_buffer_is_filled_again_and_nothing_before_it_is_made() -> None:
    made: list[int] = []

    def make(x: int) -> int:
        made.append(x)
        return x

    def build() -> Any:
        return stream.shuffle(stream.filter(stream.map(range(100), make), lambda x: True), buffer=10)

    node, other = build(), build()
    read(node, 57)
    other.load_state_dict(node.state_dict())
    made.clear()
    assert [*other] == [*node]
    assert sorted(made[: len(made) // 2 + 30])[0] == 50


def test_streams_of_any_kind_are_iterables_for_a_type_checker() -> None:
    stream_: Iterable[Any] = stream.batches(range(3), 1)
    assert len([*stream_]) == 3

"""Faults of torchdata 0.11 and of `DataLoader`, one by one: a stream is free of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torchdata.nodes import BaseNode, Batcher, Loader

from pipeline import stream
from pipeline.errors import SettingError
from pipeline.stream import Node, Threads
from tests.stream import work
from tests.stream.cases import END, Keeping, carried, read

AHEAD = [
    lambda x: x,
    lambda x: stream.prefetch(x, 3),
    lambda x: stream.prefetch(x, workers=Threads(2)),
]
ahead = pytest.mark.parametrize("ahead", AHEAD, ids=["plain", "prefetch", "threads"])


def ten() -> Node:
    return stream.shuffle(range(10), seed=1)


@ahead
def test_1_a_state_from_the_end_of_an_epoch_does_not_freeze(ahead: Any) -> None:
    node = ahead(ten())
    read(node, 11)
    end, node = node.state_dict(), ahead(ten())
    node.load_state_dict(end)
    states = [node.state_dict() for _ in node]
    assert [state["row"] for state in states] == list(range(1, 11))
    assert node.state_dict()["epoch"] == 2


def test_2_a_state_is_loaded_though_one_was_asked_for_before() -> None:
    source, node = ten(), ten()
    first = read(source, 5)
    node.state_dict()
    node.load_state_dict(source.state_dict())
    assert [*first, *node] == [*ten()]


def test_3_a_state_asked_for_after_loading_is_the_one_loaded_though_an_iterator_lives() -> None:
    node = ten()
    iterator = iter(node)
    place = node.state_dict()
    list(islice(iterator, 4))
    node.load_state_dict(place)
    assert node.state_dict() == place
    assert next(iterator) == next(iter(ten()))


@ahead
def test_4_the_count_is_right_after_a_resume(ahead: Any) -> None:
    node = ahead(ten())
    read(node, 3)
    other = ahead(ten())
    other.load_state_dict(node.state_dict())
    read(other, 1)
    assert other.state_dict()["row"] == 4


@ahead
def test_5_none_at_the_place_is_an_item_and_not_the_end(ahead: Any) -> None:
    data = [0, None, 2, None, None, 5]
    for cut in range(7):
        node, other = ahead(stream.source(data)), ahead(stream.source(data))
        head = read(node, cut)
        other.load_state_dict(node.state_dict())
        assert [*head, *other] == data


def test_6_the_order_of_a_later_epoch_is_resumed_on_each_rank() -> None:
    for rank in range(2):
        node, other = (stream.shard(stream.shuffle(range(10), seed=3), rank, 2) for _ in range(2))
        uncut = read(node, 14)
        node.begin(1)
        head = read(node, 2)
        other.load_state_dict(node.state_dict())
        assert [*head, *other] == uncut[6:11]


def test_7_orders_differ_between_epochs_and_a_resume_keeps_them() -> None:
    uncut = read(ten(), 22)
    assert uncut[:10] != uncut[11:21]
    for cut in range(22):
        node, other = ten(), ten()
        read(node, cut)
        other.load_state_dict(node.state_dict())
        assert read(other, 22 - cut) == uncut[cut:]


def test_8_items_come_in_order_though_a_later_one_is_ready_first() -> None:
    def first_is_slow(x: int) -> int:
        time.sleep(0.1 if x % 5 == 0 else 0.0)
        return x

    node = stream.map(range(10), first_is_slow, workers=Threads(3))
    head = read(node, 3)
    other = stream.map(range(10), first_is_slow, workers=Threads(3))
    other.load_state_dict(node.state_dict())
    assert [*head, *other] == list(range(10))
    node.close()


# 9, a worker that dies or cannot pickle its result: see test_workers.py.


def read_with_errors(node: Node, n: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(n):
        try:
            found += read(node, 1)
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("data", [range(6), lambda epoch: range(6)], ids=["map-style", "iterable"])
@pytest.mark.parametrize(
    "build",
    [
        lambda data: stream.map(data, work.fails_on_three),
        lambda data: stream.map(data, work.fails_on_three, workers=Threads(2)),
        lambda data: stream.prefetch(stream.map(data, work.fails_on_three), 2),
        lambda data: stream.prefetch(stream.prefetch(stream.map(data, work.fails_on_three), 2), 2),
    ],
    ids=["plain", "threads", "prefetch", "prefetch twice"],
)
def test_10_an_error_is_raised_again_and_again_and_no_item_is_lost(build: Any, data: Any) -> None:
    node = build(data)
    assert read_with_errors(node, 6) == [0, 10, 20, "three", "three", "three"]
    place = carried(node.state_dict())
    mended = stream.map(data, lambda x: x * 10)
    mended.load_state_dict(place)
    assert read(mended, 4) == [30, 40, 50, END]
    node.close()


def test_10_an_iterable_that_fails_does_not_end_in_silence() -> None:
    def broken(epoch: int) -> Iterator[int]:
        yield from range(3)
        raise ValueError("three")

    for ahead in AHEAD[:2]:
        node = ahead(stream.source(broken))
        assert read_with_errors(node, 6) == [0, 1, 2, "three", "three", "three"]
        assert node.epoch == 0


def test_11_a_live_state_of_an_iterable_is_copied() -> None:
    node = stream.prefetch(stream.source(Keeping(9)), 4)
    states = []
    for _ in range(4):
        read(node, 1)
        time.sleep(0.02)  # for the thread to read on
        states.append(node.state_dict())
    assert [state["inner"]["next"] for state in states] == [1, 2, 3, 4]
    other = stream.prefetch(stream.source(Keeping(9)), 4)
    other.load_state_dict(states[1])
    assert [*other] == list(range(2, 9))
    node.close()


def test_12_what_a_function_draws_is_part_of_the_place() -> None:
    def build() -> Node:
        return stream.map(ten(), work.tokens, seed=5)

    uncut = read(build(), 22)
    for cut in range(22):
        node, other = build(), build()
        read(node, cut)
        torch.rand(3)
        other.load_state_dict(node.state_dict())
        assert read(other, 22 - cut) == uncut[cut:]
    drawn = [item[2] for item in uncut if item != END]
    assert len(set(drawn)) == 20


def test_13_there_may_be_more_items_in_flight_than_workers() -> None:
    assert [*stream.prefetch(range(9), workers=Threads(1, ahead=5))] == list(range(9))
    assert [*stream.prefetch(range(9), workers=Threads(3, ahead=1))] == list(range(9))


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_14_a_batch_size_of_nothing_is_refused(size: Any) -> None:
    with pytest.raises(SettingError, match=r"batch\(size\) must be a whole number, 1 or more"):
        stream.batch(range(3), size)


class Gate:
    """An iterable whose second item waits to be let through, and that knows how many read it at a time."""

    def __init__(self) -> None:
        self.is_open, self.readers, self.most = threading.Event(), 0, 0

    def __iter__(self) -> Iterator[int]:
        yield 0
        for i in range(1, 5):
            self.readers += 1
            self.most = max(self.most, self.readers)
            self.is_open.wait()
            self.readers -= 1
            yield i


def test_15_there_are_never_two_readers_of_one_source() -> None:
    gate = Gate()
    node = stream.prefetch(stream.source(gate), 2)
    assert next(node) == 0
    while not gate.readers:
        time.sleep(0.01)
    # The thread is stuck in the source. Who goes elsewhere waits for it, and does not put another one beside it.
    other = threading.Thread(target=node.begin, daemon=True)
    other.start()
    time.sleep(0.1)
    assert other.is_alive()
    gate.is_open.set()
    other.join(5)
    assert not other.is_alive()
    assert [*node] == list(range(5))
    assert gate.most == 1
    node.close()


def test_16_a_shuffle_buffer_has_another_order_in_each_epoch_and_loses_nothing_on_a_resume() -> None:
    def build() -> Node:
        return stream.shuffle(lambda epoch: range(12), buffer=5, seed=7)

    first, second = [*build()], read(build(), 25)[13:]
    assert first != second
    assert sorted(first) == sorted(second) == list(range(12))
    for cut in range(13):
        node, other = build(), build()
        head = read(node, cut)
        other.load_state_dict(node.state_dict())
        assert [*head, *other] == first


def test_17_a_stream_has_a_length_and_lasting_workers() -> None:
    node = stream.batches(range(10), 3, workers=Threads(2))
    assert len(node) == 4
    node = stream.map(range(6), lambda x: threading.get_ident(), workers=Threads(2))
    assert len({*node} | {*node} | {*node}) <= 2
    node.close()


# -- and what it does with torchdata's own parts --------------------------------------------------------------------


def test_it_is_a_node_that_torchdata_can_drive() -> None:
    node = Batcher(ten(), 4, drop_last=False)
    loader = Loader(node)
    first, second = list(loader), list(loader)
    plain = stream.batch(ten(), 4, collate=list)
    assert first == [*plain]
    assert second == [*plain]
    assert first != second


def test_a_node_of_torchdata_can_stand_under_it() -> None:
    def build() -> Node:
        foreign: BaseNode[Any] = Batcher(ten(), 5)
        return stream.prefetch(stream.map(foreign, sum), 2)

    uncut = read(build(), 8)
    for cut in range(8):
        node, other = build(), build()
        read(node, cut)
        other.load_state_dict(carried(node.state_dict()))
        assert read(other, 8 - cut) == uncut[cut:]
        node.close()
        other.close()

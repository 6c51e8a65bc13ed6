"""Sharing out over ranks: nothing lost, nothing twice, equal counts, and another number of ranks after a resume."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import stream
from pipeline.errors import PlaceError, SettingError
from pipeline.stream import Node
from tests.stream import work
from tests.stream.cases import by_epoch, carried


def items_of(batches: Any) -> list[Any]:
    return [item for batch in batches if batch is not None for item in batch]


def rank_of(n: int, rank: int, world: int, size: int = 2, uneven: Any = "pad", **more: Any) -> Node:
    return stream.batches(range(n), size, shuffle=True, rank=rank, world=world, uneven=uneven, collate=list, **more)


@given(n=st.integers(0, 40), world=st.integers(1, 5), size=st.integers(1, 4))
def test_ranks_have_equal_counts_and_share_everything_out(n: int, world: int, size: int) -> None:
    for uneven in ("pad", "drop"):
        ranks = [[*rank_of(n, rank, world, size, uneven)] for rank in range(world)]
        assert len({len(batches) for batches in ranks}) == 1
        found = sorted(item for batches in ranks for item in items_of(batches))
        if uneven == "pad":
            assert found == list(range(n))
        else:
            assert len(found) == len(set(found)) == n // world * world
            assert all(batch is not None for batches in ranks for batch in batches)


@pytest.mark.parametrize("data", [range(10), lambda epoch: range(10)], ids=["map-style", "iterable"])
def test_both_ways_of_reading_share_out_the_same(data: Any) -> None:
    for uneven, expected in (
        ("drop", [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
        ("pad", [[0, 3, 6, 9], [1, 4, 7, None], [2, 5, 8, None]]),
    ):
        nodes = [stream.shard(data, rank, 3, uneven=uneven) for rank in range(3)]
        assert [[*node] for node in nodes] == expected
        assert [[*node] for node in nodes] == expected


def test_a_batch_of_nothing_but_padding_is_none() -> None:
    ranks = [[*stream.batches(range(5), 2, rank=rank, world=4, uneven="pad", collate=list)] for rank in range(4)]
    assert ranks == [[[0, 4]], [[1]], [[2]], [[3]]]
    ranks = [[*stream.batches(range(5), 1, rank=rank, world=4, uneven="pad", collate=list)] for rank in range(4)]
    assert ranks == [[[0], [4]], [[1], None], [[2], None], [[3], None]]


@given(
    n=st.integers(1, 60),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    data=st.data(),
)
def test_another_number_of_ranks_goes_on_with_what_is_left(
    n: int, before: int, after: int, sizes: tuple[int, int], data: st.DataObject
) -> None:
    old = [rank_of(n, rank, before, sizes[0]) for rank in range(before)]
    taken = data.draw(st.integers(0, len(old[0])))
    found = [item for node in old for item in items_of(next(node) for _ in range(taken))]
    places = [carried(node.state_dict()) for node in old]
    assert places == places[:1] * before  # the place of one is the place of all

    new = [rank_of(n, rank, after, sizes[1]) for rank in range(after)]
    for node in new:
        node.load_state_dict(places[0])
    rest = [[*node] for node in new]
    assert len({len(batches) for batches in rest}) == 1
    assert sorted(found + [item for batches in rest for item in items_of(batches)]) == list(range(n))
    # The next epoch is that of a stream of so many ranks from the start.
    fresh = [rank_of(n, rank, after, sizes[1]) for rank in range(after)]
    for node, other in zip(new, fresh, strict=True):
        other.begin(1)
        assert [*node] == [*other]


@given(n=st.integers(0, 60), worlds=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_and_changes_as_often_as_it_likes(n: int, worlds: list[int], data: st.DataObject) -> None:
    place, found = rank_of(n, 0, 1).state_dict(), []
    for world in worlds:
        nodes = [rank_of(n, rank, world) for rank in range(world)]
        for node in nodes:
            node.load_state_dict(place)
        taken = data.draw(st.integers(0, -(-(n - place["row"]) // (2 * world))))
        found += [item for node in nodes for item in items_of([next(node) for _ in range(taken)])]
        place = carried(nodes[0].state_dict())
    last = rank_of(n, 0, 1)
    last.load_state_dict(place)
    assert sorted(found + items_of(last)) == list(range(n))


def test_draws_of_an_item_do_not_hang_on_the_number_of_ranks() -> None:
    def items(world: int) -> list[Any]:
        nodes = [
            stream.map(stream.shard(stream.shuffle(range(12)), rank, world), work.tokens, seed=1)
            for rank in range(world)
        ]
        return sorted(item for node in nodes for item in node)

    assert items(1) == items(2) == items(3)
    assert len({drawn for _, drawn in items(2)}) == 12


@pytest.mark.parametrize("data", [range(12), lambda epoch: range(12)], ids=["map-style", "iterable"])
def test_draws_differ_between_ranks(data: Any) -> None:
    drawn = [
        [number for _, number in stream.map(stream.shard(data, rank, 2), work.tokens, seed=1)] for rank in range(2)
    ]
    assert not set(drawn[0]) & set(drawn[1])
    orders = [[item // 2 for item in stream.shuffle(stream.shard(data, rank, 2), buffer=6)] for rank in range(2)]
    assert orders[0] != orders[1] or not callable(data)


@pytest.mark.parametrize(
    "behind",
    [
        lambda node: stream.filter(node, lambda x: True),
        lambda node: stream.take(node, 3),
        stream.shuffle,
        lambda node: stream.mix([node, range(3)]),
        lambda node: stream.bucket_by_length(node, 2, length=int, collate=list),
    ],
    ids=["filter", "take", "shuffle", "mix", "bucket"],
)
def test_where_the_place_is_one_ranks_own_another_number_of_ranks_is_refused(behind: Any) -> None:
    node, other = (behind(stream.shard(range(24), 0, world)) for world in (2, 3))
    next(node)
    with pytest.raises(PlaceError, match=r"with world 3, got 2\. The world size may change only where"):
        other.load_state_dict(node.state_dict())
    assert next(other) is not None


def test_and_so_it_is_for_what_is_read_in_a_row() -> None:
    node, other = (stream.batch(stream.shard(by_epoch, 0, world), 2, collate=list) for world in (2, 3))
    with pytest.raises(PlaceError, match="with world 3, got 2"):
        other.load_state_dict(node.state_dict())


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: stream.shard(range(3), 2, 2), r"shard\(rank\) must be a whole number from 0 to 1, got 2"),
        (lambda: stream.shard(range(3), -1, 2), r"shard\(rank\) must be"),
        (lambda: stream.shard(range(3), 0, 0), r"shard\(world\) must be"),
        (lambda: stream.shard(range(3), 0, 2, uneven="repeat"), "'drop' or 'pad'"),
    ],
)
def test_settings_are_checked(build: Any, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        build()

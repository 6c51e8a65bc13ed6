"""The law of streams: cut anywhere, however often, and gone on elsewhere, a stream gives what it gives uncut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import stream
from pipeline.errors import PlaceError
from pipeline.stream import Node, Threads
from tests.stream.cases import (
    CASES,
    DATA,
    END,
    PROCESSES,
    TEXT,
    Case,
    Counted,
    by_epoch,
    carried,
    doubled,
    is_kept,
    noisy,
    plain,
    read,
)

each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
NOT_STREAMS = {"Node", "Processes", "Threads", "balanced", "go_to", "is_read_once", "place_of"}
NEEDS_MORE_THAN_A_CPU = {"pinned"}
NEEDS_AN_EXTRA = {"parquet"}


def test_every_public_function_that_makes_a_stream_is_on_the_list() -> None:
    covered = frozenset().union(*(case.covers for case in CASES))
    assert set(stream.__all__) - NOT_STREAMS - NEEDS_MORE_THAN_A_CPU - NEEDS_AN_EXTRA <= covered


def whole(build: Callable[[], Node], epochs: int = 2) -> list[Any]:
    """What the stream gives uncut in so many epochs, and a little of the next."""
    node, found = build(), []
    while found.count(END) < epochs:
        found += read(node, 1)
    found += read(node, 2)
    node.close()
    return found


def check_cut(build: Callable[[], Node], uncut: list[Any], first: int, second: int) -> None:
    """Read up to the first cut, on to the second in a fresh stream, and to the end in the first one, used by then."""
    one, other = build(), build()
    assert read(one, first) == uncut[:first]
    place = carried(one.state_dict())
    read(one, 2)
    other.load_state_dict(place)
    assert other.state_dict() == place
    assert read(other, second - first) == uncut[first:second]
    one.load_state_dict(carried(other.state_dict()))
    assert read(one, len(uncut) - second) == uncut[second:]
    one.close()
    other.close()


@each
def test_cut_at_every_place_twice_in_a_row(case: Case) -> None:
    uncut = whole(case.build)
    for first in range(len(uncut)):
        for second in {first, first + 1, min(first + 4, len(uncut))}:
            check_cut(case.build, uncut, first, second)


@pytest.mark.parametrize("case", PROCESSES, ids=lambda case: case.name)
def test_cut_with_processes(case: Case) -> None:
    uncut = whole(case.build)
    for first, second in ((3, 4), (uncut.index(END), len(uncut) - 1)):
        check_cut(case.build, uncut, first, second)


@each
def test_epochs_are_a_function_of_their_number(case: Case) -> None:
    uncut = whole(case.build)
    node, second = case.build(), uncut[uncut.index(END) + 1 :]
    read(node, 1)
    node.begin(1)
    assert node.epoch == 1
    assert read(node, len(second)) == second
    node.begin()
    assert node.epoch == 0
    assert read(node, len(uncut)) == uncut
    node.close()


@each
def test_a_for_loop_gives_the_rest_of_the_epoch(case: Case) -> None:
    uncut = whole(case.build)
    node, first = case.build(), uncut.index(END)
    for _ in node:
        break
    assert node.epoch == 0
    assert [*map(repr, node)] == [*map(repr, [*case.build()][1:])]
    assert node.epoch == 1
    assert len([*node]) == uncut[first + 1 :].index(END)
    assert node.epoch == 2


@each
def test_the_length_is_that_of_an_epoch_where_it_is_known(case: Case) -> None:
    node = case.build()
    if not knows_its_length(node):
        with pytest.raises(TypeError, match="does not know its length"):
            len(node)
    else:
        assert len(node) == len([*node]) == len([*node])


def knows_its_length(node: Node) -> bool:
    try:
        return len(node) >= 0
    except TypeError:
        return False


@each
def test_a_state_is_shared_with_nothing(case: Case) -> None:
    node = case.build()
    read(node, 2)
    state = node.state_dict()
    before = carried(state)
    read(node, 3)
    assert state == before
    node.load_state_dict(state)
    read(node, 3)
    assert state == before
    node.close()


@each
def test_asking_for_the_state_or_the_length_moves_nothing(case: Case) -> None:
    uncut, asked, node = whole(case.build), [], case.build()
    for _ in uncut:
        node.state_dict()
        assert repr(node)
        assert bool(node)
        assert node.skipped == 0
        node.load_state_dict(node.state_dict())
        asked += read(node, 1)
    assert asked == uncut
    node.close()


# -- states from anywhere ---------------------------------------------------------------------------------------------

THE_READERS_OWN = {"inner", "after"}  # what an iterable, or a function that reads, has noted down


def spoilt(state: Any) -> Iterator[Any]:
    """The same state with rubbish in one place, in each place."""
    if isinstance(state, dict):
        for name in state.keys() - THE_READERS_OWN:
            yield {key: value for key, value in state.items() if key != name}
            yield from ({**state, name: other} for other in spoilt(state[name]))
    elif isinstance(state, list):
        yield from ([*state[:i], other, *state[i + 1 :]] for i in range(len(state)) for other in spoilt(state[i]))
        yield state[1:]
        yield [*state, *state[:1]]
    if not isinstance(state, list) or state:
        yield from (rubbish for rubbish in ("x", None, -7, 2.5, []) if rubbish != state)


@each
def test_what_is_no_place_is_refused_and_the_stream_stays_where_it_was(case: Case) -> None:
    uncut, node = whole(case.build), case.build()
    assert read(node, 2) == uncut[:2]
    place = carried(node.state_dict())
    for rubbish in (None, 3, "x", [], {}, *spoilt(place)):
        with pytest.raises(PlaceError):
            node.load_state_dict(rubbish)
        assert node.state_dict() == place
    assert read(node, len(uncut) - 2) == uncut[2:]
    node.close()


# -- drawn at random -----------------------------------------------------------------------------------------------

ROWS: list[Callable[[Any], Any]] = [
    lambda x: stream.shuffle(x, seed=2, buffer=3),
    lambda x: stream.map(x, noisy, seed=5),
    lambda x: stream.map(x, noisy, seed=5, workers=Threads(2)),
    lambda x: stream.map(x, doubled),
    lambda x: stream.take(x, 6),
    lambda x: stream.repeat(x, 2),
    lambda x: stream.shard(x, 1, 2),
    lambda x: stream.shard(x, 1, 3, uneven="pad"),
    lambda x: stream.prefetch(x, 2),
    lambda x: stream.filter(x, is_kept),
    lambda x: stream.mix([x, stream.shuffle(by_epoch, buffer=2)], [1.0, 0.5]),
    lambda x: stream.mix([x, Counted(3)], ends="first"),
]
BATCHES: list[Callable[[Any], Any]] = [
    lambda x: stream.batch(x, 3, collate=list),
    lambda x: stream.batch(x, 2, collate=list, drop_last=True),
    lambda x: stream.bucket_by_length(x, 2, pool=2, length=lambda item: len(str(item)), collate=list),
    lambda x: stream.token_budget(x, 40, pool=4, length=lambda item: min(40, len(str(item))), collate=list),
]
AFTER: list[Callable[[Any], Any]] = [
    lambda x: stream.prefetch(x, 2),
    lambda x: stream.shard(x, 0, 2),
    lambda x: stream.split(x, 1),
    lambda x: stream.map(x, doubled, workers=Threads(2)),
    lambda x: x,
]


@st.composite
def compositions(draw: st.DrawFn) -> Callable[[], Node]:
    begin = draw(st.sampled_from([lambda: DATA, lambda: TEXT, lambda: Counted(9), lambda: by_epoch]))
    parts = draw(st.lists(st.sampled_from(ROWS), max_size=4))
    parts += draw(st.sampled_from([[], *([b, a] for b in BATCHES for a in AFTER)]))

    def build() -> Node:
        node: Any = begin()
        for part in parts:
            node = part(node)
        return stream.source(node)

    return build


@settings(max_examples=60)
@given(build=compositions(), data=st.data())
def test_any_composition_cut_anywhere(build: Callable[[], Node], data: st.DataObject) -> None:
    uncut = whole(build)
    first = data.draw(st.integers(0, len(uncut) - 1))
    second = data.draw(st.integers(first, len(uncut)))
    check_cut(build, uncut, first, second)


@settings(max_examples=40)
@given(build=compositions(), data=st.data())
def test_any_composition_is_left_and_entered_again_at_will(build: Callable[[], Node], data: st.DataObject) -> None:
    uncut, node, found = whole(build), build(), []
    while len(found) < len(uncut) - 2:
        leave_after = data.draw(st.integers(1, 5))
        for item in node:
            found.append(plain(item))
            leave_after -= 1
            if not leave_after:
                break
        else:
            found.append(END)
    assert found == uncut[: len(found)]
    node.close()

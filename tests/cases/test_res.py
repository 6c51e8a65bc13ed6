"""Resuming, the stream's part: the place is what was consumed, at the end of an epoch and inside a window too."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pipeline import Accumulate, fold, init, stream
from pipeline.events import UpdateDone
from tests.cases.probe import Probe, Recorder, bits, items, of, probe_step
from tests.stream.cases import carried
from tests.stream.work import tokens

kinds = pytest.mark.parametrize(
    "data", [range(10), lambda epoch: range(10)], ids=["read at any place", "read in a row"]
)

# -- RES-2 -----------------------------------------------------------------------------------------


def four_batches(data: Any, workers: Any = None, ahead: int = 0) -> stream.Node:
    return stream.batches(data, 3, shuffle=True, seed=2, workers=workers, ahead=ahead)


def numbers(batch: torch.Tensor) -> tuple[int, ...]:
    return tuple(batch.tolist())


@kinds
@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("told", [False, True], ids=["before the end is told", "after"])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_res_2_saved_at_the_end_of_an_epoch_no_epoch_is_dropped_or_repeated(
    data: Any, ahead: int, told: bool, epoch: int
) -> None:
    straight = four_batches(data)
    expected = [(straight.epoch, numbers(batch)) for _ in range(4) for batch in straight]
    assert len(expected) == 16

    first, seen = four_batches(data, ahead=ahead), []
    for _ in range(epoch):
        seen += [(first.epoch, numbers(batch)) for batch in first]
    for _ in range(4):
        seen.append((first.epoch, numbers(next(first))))
    if told:
        assert [*first] == []
    place = carried(first.state_dict())
    first.close()

    second = four_batches(data, ahead=ahead)
    second.load_state_dict(place)
    passes = []
    for _ in range(second.epoch, 4):
        rest = [(second.epoch, numbers(batch)) for batch in second]
        passes.append(len(rest))
        seen += rest
    assert seen == expected
    assert second.epoch == 4
    assert passes == ([] if told else [0]) + [4] * (3 - epoch)
    second.close()


# -- RES-3 -----------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("ahead", [0, 2])
def test_res_3_the_place_counts_micro_batches_and_not_updates(data: Any, ahead: int) -> None:
    def batches() -> stream.Node:
        made = stream.map(data, lambda i: items(float(i)))
        return stream.prefetch(made, ahead) if ahead else made

    def trained(state: Any, step: Any, given: Any) -> tuple[Any, list[float]]:
        recorder = Recorder()
        run = fold(step, state, given, sinks=[recorder])
        return run.state, [float(u.loss) for u in of(UpdateDone, recorder.events)]

    model = Probe()
    step = probe_step(model, every=4)
    straight, losses = trained(init(step, model), step, batches())

    # Six micro-batches: one update, and two into the next window, which stays open.
    first, model = batches(), Probe()
    carrying = probe_step(model, every=4).replace("Accumulate", Accumulate(every=4, at_end="carry"))
    taken: Iterator[Any] = (next(first) for _ in range(6))
    state, begun = trained(init(carrying, model), carrying, taken)
    assert (state.progress.micro_steps, state.window.micro_batches) == (6, 2)

    other = batches()
    other.load_state_dict(carried(first.state_dict()))
    step = probe_step(model, every=4)
    state, rest = trained(state, step, other)
    assert begun + rest == losses
    ours, theirs = bits(state), bits(straight)
    assert ours.pop("progress").updates == theirs.pop("progress").updates == 3
    assert ours == theirs
    first.close()


# -- RES-6 -----------------------------------------------------------------------------------------


def test_res_6_the_count_is_that_of_the_items_consumed() -> None:
    node = stream.source(range(10))
    assert [next(node) for _ in range(3)] == [0, 1, 2]
    other = stream.source(range(10))
    other.load_state_dict(carried(node.state_dict()))
    assert next(other) == 3
    assert other.state_dict()["row"] == 4


def test_res_6_a_state_is_loaded_after_one_was_asked_for() -> None:
    node, other = stream.source(range(10)), stream.source(range(10))
    for _ in range(5):
        next(node)
    other.state_dict()
    other.load_state_dict(carried(node.state_dict()))
    assert [*other] == [5, 6, 7, 8, 9]


@kinds
def test_res_6_what_is_in_flight_is_neither_lost_nor_doubled(data: Any) -> None:
    def build() -> stream.Node:
        return stream.prefetch(stream.map(data, tokens, seed=1, workers=stream.Threads(2)), 3)

    uncut = [*stream.map(data, tokens, seed=1)]
    node, other = build(), build()
    head = [next(node) for _ in range(7)]
    other.load_state_dict(carried(node.state_dict()))
    assert [*head, *other] == uncut
    node.close()
    assert [*head, *node] == uncut  # the one that was stopped goes on as well
    other.close()

"""Workers, threads and processes: the same items as without, errors in seconds, and nobody left behind."""

from __future__ import annotations

import _thread
import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from pipeline import stream
from pipeline.errors import SettingError, WorkerError
from pipeline.stream import Node, Processes, Threads
from tests.stream import work
from tests.stream.cases import carried, plain, read

ROOT = Path(__file__).parent.parent.parent

CREWS = [Threads(2), Threads(8, ahead=1), Processes(2)]
each_crew = pytest.mark.parametrize("workers", CREWS, ids=["2 threads", "8 threads", "2 processes"])


def eventually(is_so: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    return is_so()


@pytest.fixture(autouse=True)
def nobody_is_left_behind() -> Iterator[None]:
    threads = set(threading.enumerate())
    yield
    gc.collect()
    assert eventually(lambda: not multiprocessing.active_children())
    assert eventually(lambda: set(threading.enumerate()) <= threads)


# -- the same items ---------------------------------------------------------------------------------------------------


@each_crew
def test_order_and_draws_are_those_without_workers(workers: Any) -> None:
    def build(workers: Any) -> Node:
        return stream.prefetch(
            stream.batch(stream.map(stream.shuffle(work.Numbers(50), seed=2), work.tokens, seed=3), 4), workers=workers
        )

    with build(workers) as node:
        assert read(node, 30) == read(build(None), 30)


@pytest.mark.parametrize("data", [range(9), lambda epoch: range(9)], ids=["map-style", "iterable"])
def test_two_functions_in_a_row_draw_different_numbers_though_they_have_one_seed(data: Any) -> None:
    plainly = stream.map(stream.map(data, work.tokens, seed=1), work.tokens, seed=1)
    drawn = [(first, second) for (_, first), second in plainly]
    assert all(first != second for first, second in drawn)
    between = stream.prefetch(stream.map(data, work.tokens, seed=1, workers=Threads(2)), 2)
    with stream.map(between, work.tokens, seed=1, workers=Threads(2)) as node:
        assert [(first, second) for (_, first), second in node] == drawn


def test_orders_that_are_worked_out_in_blocks_travel_to_a_process() -> None:
    n = 70_000
    node = stream.batch(stream.weighted(stream.shuffle(range(n), seed=2), torch.ones(n), seed=1), 5, collate=list)
    next(node)  # so that a block is there
    with stream.prefetch(node, workers=1) as other:
        assert read(other, 2) == read(node, 2)


@each_crew
def test_over_what_is_read_in_a_row_too(workers: Any) -> None:
    def build(workers: Any) -> Node:
        return stream.map(
            stream.shuffle(lambda epoch: range(20), seed=2, buffer=6), work.tokens, seed=3, workers=workers
        )

    with build(workers) as node:
        assert read(node, 45) == read(build(None), 45)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_default_generators_draw_the_same_without_workers_and_in_processes(batch_size: int) -> None:
    def build(workers: Any) -> Node:
        return stream.batches(work.Drawing(12), batch_size, seed=5, workers=workers)

    with build(2) as node:
        drawn = [plain(item) for _ in range(2) for item in node]
    assert drawn == [plain(item) for node in [build(0)] for _ in range(2) for item in node]
    with build(2) as other:
        other.begin(1)
        assert [plain(item) for item in other] == drawn[len(drawn) // 2 :]


def test_a_function_on_rows_may_draw_from_the_default_generators() -> None:
    plainly = [*stream.map(range(8), work.draws)]
    with stream.map(range(8), work.draws, workers=2) as node:
        assert [*node] == plainly
    assert len(set(plainly)) == 8


def test_functions_on_what_is_read_in_a_row_draw_by_the_seed_of_the_source() -> None:
    def drawn(seed: int) -> list[Any]:
        source = stream.source(lambda epoch: range(4), seed=seed)
        with stream.map(stream.shuffle(source, buffer=2), work.draws, workers=1) as node:
            return [number for item in node for number in item]

    first = drawn(1)
    assert drawn(1) == first
    assert not {*first} & {*drawn(2)}


def test_without_a_seed_a_dataset_draws_from_the_generators_of_the_reader() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = [work.draws(), work.draws()]
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    assert [*stream.source(work.Drawing(2), seed=None)] == expected


@pytest.fixture
def numpys_own() -> Iterator[None]:
    """The bit generator of numpy's default generator is put back after a test that changes it."""
    own = np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(own)


@pytest.mark.usefixtures("numpys_own")
@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
@pytest.mark.parametrize("normals", [0, 1, 2, 3])
@pytest.mark.parametrize("words", [0, 1, 615, 620, 622, 623, 624, 625])
def test_numpy_draws_afterwards_what_it_would_have_drawn(kind: Any, normals: int, words: int) -> None:
    def began() -> None:
        np.random.set_bit_generator(kind(1))
        np.random.randint(2**32, size=words, dtype=np.uint32)
        np.random.randn(normals)

    def drawn() -> str:
        return str([np.random.randn(3).tolist(), np.random.random(700).tolist(), np.random.randn(2).tolist()])

    began()
    expected, state = drawn(), str(np.random.get_state(legacy=False))
    began()
    own = np.random.get_bit_generator()
    first = [*stream.source(work.Drawing(2))]
    assert np.random.get_bit_generator() is own
    assert (drawn(), str(np.random.get_state(legacy=False))) == (expected, state)
    assert [*stream.source(work.Drawing(2))] == first


def test_what_runs_no_code_of_the_users_is_read_without_touching_a_generator() -> None:
    tensors = TensorDataset(torch.arange(6))
    plain_ones: list[Any] = [[1, 2], range(2), tensors, Subset(tensors, [3, 1]), ConcatDataset([tensors, [1]])]
    assert all(stream.source(data).is_plain for data in plain_ones)
    others: list[Any] = [work.Drawing(4), Subset(work.Drawing(4), [2, 0]), ConcatDataset([tensors, work.Drawing(2)])]
    assert not any(stream.source(data).is_plain for data in others)
    for data in others[:2]:
        assert [*stream.source(data)] == [*stream.source(data)]


def test_a_stream_within_an_item_leaves_the_draws_of_the_item_alone() -> None:
    class Nested(work.Drawing):
        def __getitem__(self, index: int) -> Any:
            return work.draws(), np.random.randn(), is_nested and [*stream.source(work.Drawing(2))], work.draws()

    is_nested = False
    plainly = [(first, normal, last) for first, normal, _, last in stream.source(Nested(3))]
    is_nested = True
    assert [(first, normal, last) for first, normal, _, last in stream.source(Nested(3))] == plainly


def test_drawing_leaves_the_default_generators_of_the_reader_alone() -> None:
    np.random.seed(1)
    np.random.randn()  # half a pair is kept for the next call
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    assert len([*stream.batches(work.Drawing(9), 2)]) == 5
    assert len([*stream.batches(range(9), 2, shuffle=True, workers=Threads(2))]) == 5
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert str(np.random.get_state()) == before[2]


def test_one_place_does_for_any_number_of_workers() -> None:
    def build(workers: Any, ahead: int = 0) -> Node:
        return stream.batches(work.Numbers(20), 3, shuffle=True, workers=workers, ahead=ahead)

    uncut = read(build(0), 14)
    places = []
    for node in (build(0), build(2), build(Threads(3)), build(0, ahead=2), build(2, ahead=1)):
        with node:
            assert read(node, 3) == uncut[:3]
            places.append(carried(node.state_dict()))
    assert places == places[:1] * 5
    for other in (build(0), build(1), build(Threads(2), ahead=3)):
        with other:
            other.load_state_dict(places[0])
            assert read(other, 11) == uncut[3:]


def test_workers_last_over_epochs() -> None:
    with stream.map(range(8), work.pid, workers=2) as node:
        pids = {*node} | {*node} | {*node}
    assert len(pids) <= 2
    assert os.getpid() not in pids


@each_crew
def test_a_dataset_is_told_its_epoch_in_each_worker(workers: Any) -> None:
    with stream.batches(work.Epoch(5), 1, workers=workers, collate=list) as node:
        epochs = [{epoch for batch in node for epoch, _ in batch} for _ in range(3)]
    assert epochs == [{0}, {1}, {2}]


@each_crew
def test_an_item_is_made_in_its_own_epoch_though_several_are_in_work(workers: Any) -> None:
    expected = [(epoch, index) for epoch in range(6) for index in range(4)]
    rows = stream.repeat(work.SlowEpoch(4), 6)
    assert [*rows] == expected
    with stream.prefetch(stream.batch(rows, 3, collate=list), workers=workers) as node:
        assert [item for batch in node for item in batch] == expected


def test_two_streams_over_one_source_read_it_each_in_its_own_epoch() -> None:
    source = stream.source(work.Epoch(3))
    one, other = stream.batch(source, 1, collate=list), stream.batch(source, 1, collate=list)
    other.begin(5)
    assert [(a[0], b[0]) for a, b in zip(one, other, strict=True)] == [((0, i), (5, i)) for i in range(3)]


def test_no_more_is_read_ahead_than_was_said() -> None:
    made: list[int] = []

    def note(x: int) -> int:
        made.append(x)
        return x

    for node, room in (
        (stream.map(range(50), note, workers=Threads(2, ahead=2)), 4),
        (stream.prefetch(stream.map(lambda epoch: range(50), note), 3), 3 + 1),  # one is in the thread's hands
    ):
        made.clear()
        for taken in range(1, 4):
            next(node)
            time.sleep(0.05)
            assert len(made) <= taken + room
        node.close()


def test_large_payloads_and_results_pass_each_other() -> None:
    # More than a pipe holds, both ways at the same time.
    items = [bytes(300_000)] * 12
    with stream.map(lambda epoch: items, bytes, workers=Processes(1, ahead=4)) as node:
        assert [*node] == items


# -- errors ------------------------------------------------------------------------------------------------------------


@each_crew
def test_an_error_keeps_its_type_and_tells_where(workers: Any) -> None:
    node = stream.prefetch(stream.shuffle(work.Numbers(20, bad=7), seed=1), workers=workers)
    order = [*stream.shuffle(work.Numbers(20), seed=1)]
    place = order.index(7)
    assert read(node, place) == order[:place]
    for _ in range(2):
        with pytest.raises(OSError, match="sector 7") as failure:
            next(node)
        notes = "\n".join(failure.value.__notes__)
        assert "index 7 of the dataset" in notes
        assert f"at item {place} of epoch 0" in notes
        if isinstance(workers, Processes):
            assert "in a worker process" in notes
            assert 'raise OSError(f"sector {index}")' in notes
    assert node.state_dict()["row"] == place


@pytest.mark.parametrize("how", ["exit", "kill", "sys.exit", "no pickle", "local error"])
def test_a_worker_that_cannot_answer_is_an_error_within_seconds(how: str) -> None:
    node = stream.prefetch(work.Numbers(20, bad=7, how=how), workers=2)
    assert read(node, 5) == [0, 1, 2, 3, 4]
    began = time.monotonic()
    with pytest.raises(WorkerError) as failure:
        read(node, 4)
    assert time.monotonic() - began < 10
    says = {
        "exit": "died with exit code 3",
        "kill": "died with exit code -9",
        "sys.exit": "died with exit code 4",
        "no pickle": "A result cannot be sent",
        "local error": "of a class that cannot be pickled",
    }
    assert says[how] in str(failure.value)
    assert "at item 7 of epoch 0" in "\n".join(failure.value.__notes__)
    assert node.state_dict()["row"] == 7


@pytest.mark.parametrize("function", [work.dies_on_three, work.unpicklable_on_three])
def test_over_an_iterable_as_well(function: Any) -> None:
    node = stream.map(lambda epoch: range(9), function, workers=2)
    with pytest.raises(WorkerError) as failure:
        read(node, 9)
    assert "at item 3 of epoch 0" in "\n".join(failure.value.__notes__)
    assert node.state_dict()["index"] == 3


def test_what_cannot_be_sent_to_a_process_is_told_with_the_cure() -> None:
    with pytest.raises(WorkerError, match=r"cannot be sent to a worker process.*top of a module, or use Threads"):
        next(stream.map(range(3), lambda x: x, workers=2))
    node = stream.map(lambda epoch: range(3), lambda x: x, workers=1)
    for _ in range(2):
        with pytest.raises(WorkerError):
            next(node)
    assert node.state_dict()["index"] == node.state_dict()["source"]["items"] == 0
    unpicklable = [1, threading.Lock()]
    node = stream.map(lambda epoch: unpicklable, str, workers=1)
    assert next(node) == "1"
    with pytest.raises(WorkerError, match="An item cannot be sent to a worker process"):
        next(node)


@pytest.mark.parametrize("workers", [None, Threads(2), Processes(2)], ids=["none", "threads", "processes"])
@pytest.mark.parametrize("data", [range(8), lambda epoch: range(8)], ids=["map-style", "iterable"])
def test_errors_may_be_skipped_and_are_counted(workers: Any, data: Any) -> None:
    with stream.map(data, work.fails_on_three, errors="skip", workers=workers) as node:
        assert [*node] == [0, 10, 20, None, 40, 50, 60, 70]
        assert node.skipped == 1
        assert len([*node]) == 8
        assert node.skipped == 2


def test_items_that_could_not_be_made_are_left_out_of_their_batch() -> None:
    for workers in (0, 2):
        with stream.batches(work.Numbers(8, bad=5), 2, errors="skip", workers=workers, collate=list) as node:
            assert [*node] == [[0, 1], [2, 3], [4], [6, 7]]
            assert node.skipped == 1


@pytest.mark.parametrize("workers", [None, Threads(1), Processes(1)], ids=["none", "thread", "process"])
def test_a_stop_iteration_of_the_users_code_does_not_end_the_epoch(workers: Any) -> None:
    node = stream.prefetch(work.Numbers(5, bad=2, how="stop"), workers=workers)
    with pytest.raises(RuntimeError, match="raised StopIteration, at index 2 of the dataset"):
        read(node, 5)
    node.close()


def test_an_error_of_the_source_comes_after_the_items_before_it() -> None:
    def broken(epoch: int) -> Iterator[int]:
        yield from range(5)
        raise ConnectionError("gone")

    node = stream.map(broken, work.slowly, workers=Threads(2, ahead=4))
    assert read(node, 5) == list(range(5))
    with pytest.raises(ConnectionError, match="gone"):
        next(node)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Threads(0), r"Threads\.n must be a whole number, 1 or more"),
        (lambda: Processes(2, ahead=0), r"Processes\.ahead must be"),
        (lambda: Processes(2, start="clone"), r"Processes\.start must be one of .*spawn"),
        (lambda: stream.prefetch(range(3), 0), r"prefetch\(ahead\) must be"),
        (lambda: stream.prefetch(range(3), workers=-1), r"prefetch\(workers\) must be a number of processes"),
        (lambda: stream.prefetch(lambda epoch: range(3), workers=2), "Give the workers to `map`"),
        (lambda: stream.map(range(3), str, errors="ignore"), r"map\(errors\) must be 'raise' or 'skip'"),
    ],
)
def test_settings_are_checked(build: Any, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        build()


# -- nobody left behind: the fixture looks after each test -----------------------------------------------------------


def streams() -> list[Callable[[], Node]]:
    return [
        lambda: stream.prefetch(stream.source(lambda epoch: range(99)), 2),
        lambda: stream.prefetch(stream.map(range(99), work.slowly, workers=Threads(3)), 2),
        lambda: stream.batches(work.Numbers(99), 2, workers=2, ahead=2),
    ]


@pytest.mark.parametrize("build", streams())
def test_a_loop_that_is_left_ends_them_and_another_one_goes_on(build: Callable[[], Node]) -> None:
    node, found = build(), []
    for item in node:
        found.append(plain(item))
        if len(found) % 13 == 0:
            break
    assert eventually(lambda: not multiprocessing.active_children())
    assert found + [plain(item) for item in node] == [plain(item) for item in build()]
    node.close()


@pytest.mark.parametrize("build", streams())
def test_an_error_in_the_loop_ends_them(build: Callable[[], Node]) -> None:
    def loop() -> None:
        for _ in build():
            raise KeyError("in the loop")

    with pytest.raises(KeyError):
        loop()


@pytest.mark.parametrize("build", streams())
def test_dropping_the_stream_ends_them(build: Callable[[], Node]) -> None:
    node = build()
    next(node)
    del node


@pytest.mark.parametrize("build", streams())
def test_a_with_block_ends_them(build: Callable[[], Node]) -> None:
    with build() as node:
        next(node)
        assert threading.active_count() > 1 or multiprocessing.active_children()
    node.close()


@pytest.mark.parametrize("start", multiprocessing.get_all_start_methods())
def test_processes_end_by_themselves_however_they_were_started(start: str) -> None:
    node = stream.prefetch(work.Numbers(9), workers=Processes(2, start=start))
    assert next(node) == 0
    processes = multiprocessing.active_children()
    node.close()
    assert [process.exitcode for process in processes] == [0, 0]  # one that does not notice is killed


SCRIPT = """
import signal
import sys
import time
from pipeline import stream
from tests.stream import work

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the one who started the tests has made of it
    workers = {
        "processes": 2, "forks": stream.Processes(2, start="fork"), "threads": stream.Threads(2), "none": None
    }[sys.argv[1]]
    batches = stream.batches(stream.map(range(10**6), work.slowly), 4, workers=workers, ahead=2)
    for i, _ in enumerate(batches):
        if i == 2:
            print("going", flush=True)
            time.sleep(60)  # by and by the workers have nothing left to do
"""


def alive(group: int) -> list[str]:
    """The processes of a process group that still run."""
    shown = subprocess.run(["ps", "-A", "-o", "pgid=,stat=,pid="], capture_output=True, text=True, check=True).stdout
    found = [line.split() for line in shown.splitlines()]
    return [pid for of, state, pid in found if int(of) == group and not state.startswith("Z")]


@pytest.mark.parametrize("kind", ["none", "threads", "processes", "forks"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill"])
def test_ctrl_c_and_a_kill_leave_no_process(kind: str, how: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        time.sleep(1.0)
        if how is signal.SIGINT:
            os.killpg(process.pid, how)  # as a terminal does
        else:
            process.kill()
        _, said = process.communicate(timeout=30)
    assert process.returncode in (-how, 130)
    assert "KeyboardInterrupt" in said or how is signal.SIGKILL
    assert said.count("Traceback") <= 1
    assert eventually(lambda: not alive(process.pid))


@pytest.mark.parametrize("workers", [None, Threads(2), Processes(2)], ids=["a thread", "threads", "processes"])
def test_ctrl_c_while_waiting_ends_them_and_the_stream_stays_where_it_was(workers: Any) -> None:
    node = stream.prefetch(stream.map(range(12), work.slowly_at_last), workers=workers)
    assert read(node, 8) == list(range(8))
    threading.Timer(0.3, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        read(node, 4)
    assert not multiprocessing.active_children()
    assert threading.active_count() <= 1 + (workers is None)  # which ends as soon as it has read what it is reading
    done = node.state_dict()["row"]
    assert [*node] == list(range(done, 12))


def test_ctrl_c_leaves_the_stream_where_it_was() -> None:
    def interrupted(x: int) -> int:
        if x == 3 and not told:
            told.append(x)
            raise KeyboardInterrupt
        return x

    told: list[int] = []
    for data in (range(6), lambda epoch: range(6)):
        told.clear()
        node = stream.batch(stream.map(data, interrupted), 2, collate=list)
        assert next(node) == [0, 1]
        with pytest.raises(KeyboardInterrupt):
            next(node)
        assert [*node] == [[2, 3], [4, 5]]

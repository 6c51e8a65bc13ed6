"""EventLog: one line an event that outlives the process, one writer a folder, and going on where a run was."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    EmitEvents,
    Epochs,
    Evaluation,
    Forward,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    chain,
    errors,
    fold,
    init,
    monitors,
    read_events,
    replay,
    sinks,
    supervised,
)
from pipeline.events import EpochStarted, Event, RunEnded

AT: Mapping[str, Any] = {"micro_step": 4, "update": 1, "epoch": 0, "time": 12.5}


@attrs.frozen(kw_only=True)
class Measured(Event):
    """An event of a user's own."""

    value: Any


def nth(n: int) -> Event:
    return EpochStarted(micro_step=n, update=n, epoch=n, time=n / 7)


def written(folder: Path, *events: Event) -> Path:
    log = sinks.EventLog(folder)
    for event in events:
        log.write(event)
    log.close()
    return log.path


def files(folder: Path) -> dict[str, list[int]]:
    """The logs in a folder, each by the numbers of its events."""
    return {path.name: [event.update for event in read_events(path)] for path in sorted(folder.iterdir())}


class TestFile:
    def test_the_first_event_makes_the_folder(self, tmp_path: Path) -> None:
        log = sinks.EventLog(tmp_path / "runs" / "a")
        assert log.path == tmp_path / "runs" / "a" / "events.jsonl"
        assert not (tmp_path / "runs").exists()
        log.write(nth(1))
        log.close()
        assert files(tmp_path / "runs" / "a") == {"events.jsonl": [1]}

    def test_each_line_is_there_as_it_comes_and_the_first_says_the_format(self, tmp_path: Path) -> None:
        log = sinks.EventLog(tmp_path)
        for count in (1, 2, 3):
            log.write(nth(count))
            lines = [json.loads(line) for line in log.path.read_text().splitlines()]
            assert [line["update"] for line in lines] == list(range(1, count + 1))
        log.close()
        assert [line.get("format") for line in lines] == [1, None, None]

    def test_an_event_that_cannot_be_written_leaves_no_half_a_line(self, tmp_path: Path) -> None:
        log = sinks.EventLog(tmp_path)
        log.write(nth(1))
        with pytest.raises(errors.EventFormError, match="Measured has no form in JSON: it holds <object object"):
            log.write(Measured(**AT, value=object()))
        log.write(nth(2))
        log.close()
        assert files(tmp_path) == {"events.jsonl": [1, 2]}

    def test_a_log_that_is_there_is_moved_away_and_the_newest_has_the_highest_number(self, tmp_path: Path) -> None:
        for n in (1, 2, 3):
            written(tmp_path, nth(n))
        assert files(tmp_path) == {"events.1.jsonl": [1], "events.2.jsonl": [2], "events.jsonl": [3]}
        (tmp_path / "events.1.jsonl").unlink()
        written(tmp_path, nth(4))
        assert files(tmp_path) == {"events.2.jsonl": [2], "events.3.jsonl": [3], "events.jsonl": [4]}
        assert json.loads((tmp_path / "events.jsonl").read_text())["format"] == 1

    def test_even_a_torn_line_is_not_lost(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        path.write_text('{"event":"Epoc')
        written(tmp_path, nth(1))
        assert (tmp_path / "events.1.jsonl").read_text() == '{"event":"Epoc'
        assert files(tmp_path)["events.jsonl"] == [1]

    def test_an_event_log_without_an_event_touches_nothing(self, tmp_path: Path) -> None:
        written(tmp_path, nth(1))
        written(tmp_path)
        assert files(tmp_path) == {"events.jsonl": [1]}

    def test_used_for_a_second_run_it_goes_on_with_its_own(self, tmp_path: Path) -> None:
        log = sinks.EventLog(tmp_path)
        for n in (1, 2):
            log.write(nth(n))
            log.close()
        log.close()
        assert files(tmp_path) == {"events.jsonl": [1, 2]}
        assert log.path.read_text().count("format") == 1

    def test_what_another_run_wrote_in_between_is_moved_away_too(self, tmp_path: Path) -> None:
        mine = sinks.EventLog(tmp_path)
        mine.write(nth(1))
        mine.close()
        written(tmp_path, nth(2), nth(3))
        mine.write(nth(4))
        mine.close()
        assert files(tmp_path) == {"events.1.jsonl": [1], "events.2.jsonl": [2, 3], "events.jsonl": [4]}

    def test_it_prints_as_it_was_written(self) -> None:
        assert repr(sinks.EventLog("runs/a")) == "EventLog('runs/a')"


class TestResume:
    @pytest.mark.parametrize("kept", range(5))
    def test_exactly_the_first_events_are_kept(self, kept: int, tmp_path: Path) -> None:
        path = written(tmp_path, *map(nth, range(4)))
        whole = path.read_bytes()
        log = sinks.EventLog(tmp_path)
        log.resume(kept)
        for n in range(kept, 4):
            log.write(nth(n))
        log.close()
        assert path.read_bytes() == whole
        assert files(tmp_path) == {"events.jsonl": [0, 1, 2, 3]}

    def test_cut_at_any_byte_of_the_last_lines_the_log_goes_on_without_a_trace(self, tmp_path: Path) -> None:
        path = written(tmp_path, *map(nth, range(3)), Measured(**AT, value=float("nan")))
        whole = path.read_bytes()
        lines = whole.splitlines(keepends=True)
        for size in range(len(lines[0]), len(whole) + 1):
            held = whole[:size].count(b"\n")
            for kept in {held, 1}:
                path.write_bytes(whole[:size])
                log = sinks.EventLog(tmp_path)
                log.resume(kept)
                assert path.read_bytes() == b"".join(lines[:kept])
                log.write(nth(kept))
                log.close()
                *before, last = read_events(path, [Measured])
                assert (len(before), last) == (kept, nth(kept))

    def test_in_a_long_log_too(self, tmp_path: Path) -> None:
        path = written(tmp_path, *map(nth, range(2000)))  # more than is read at once
        lines = path.read_bytes().splitlines(keepends=True)
        for kept in (1999, 1000, 1):
            log = sinks.EventLog(tmp_path)
            log.resume(kept)
            log.close()
            assert path.read_bytes() == b"".join(lines[:kept])

    def test_a_log_that_holds_too_few_is_named_and_left_alone(self, tmp_path: Path) -> None:
        path = written(tmp_path, nth(1), nth(2))
        torn = path.read_bytes() + b'{"event":"Ep'
        path.write_bytes(torn)
        log = sinks.EventLog(tmp_path)
        with pytest.raises(
            errors.LogTooShortError, match="holds 2 whole events, and the run goes on after 3"
        ) as caught:
            log.resume(3)
        assert (caught.value.holds, caught.value.asked) == (2, 3)
        assert path.read_bytes() == torn
        log.write(nth(3))  # the folder is free, and the log that is there is another run's
        log.close()
        assert files(tmp_path) == {"events.1.jsonl": [1, 2], "events.jsonl": [3]}

    def test_no_log_holds_none(self, tmp_path: Path) -> None:
        log = sinks.EventLog(tmp_path / "a")
        with pytest.raises(errors.LogTooShortError, match="holds 0 whole events, and the run goes on after 1"):
            log.resume(1)
        assert not (tmp_path / "a").exists()
        log.resume(0)
        log.write(nth(1))
        log.close()
        assert files(tmp_path / "a") == {"events.jsonl": [1]}

    def test_while_it_writes_it_can_be_taken_back(self, tmp_path: Path) -> None:
        log = sinks.EventLog(tmp_path)
        for n in (1, 2, 3):
            log.write(nth(n))
        log.resume(1)
        log.write(nth(4))
        log.close()
        assert files(tmp_path) == {"events.jsonl": [1, 4]}

    @pytest.mark.parametrize("events", [-1, 1.5, True])
    def test_only_a_count_will_do(self, events: Any, tmp_path: Path) -> None:
        with pytest.raises(errors.SettingError, match=r"EventLog\.resume\(events\) must be a whole number, 0 or more"):
            sinks.EventLog(tmp_path).resume(events)

    def test_what_is_no_log_of_this_format_is_not_gone_on_with(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        for text, kind in (('{"event":"X","format":2}\n', errors.LogFormatError), ("a\nb\n", errors.DamagedLogError)):
            path.write_text(text)
            with pytest.raises(kind, match=r"events\.jsonl, line 1"):
                sinks.EventLog(tmp_path).resume(1)
            assert path.read_text() == text


def start(code: str, *args: object) -> subprocess.Popen[str]:
    """Another process, which has said that it is ready."""
    opening = "import sys, time, os; from pathlib import Path; from pipeline import sinks, events\n"
    opening += "sinks.EventLog; assert 'torch' not in sys.modules\n"
    opening += "def nth(n): return events.EpochStarted(micro_step=n, update=n, epoch=n, time=n / 7)\n"
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", opening + code, *map(str, args)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


class TestOneWriter:
    def test_a_second_log_in_the_folder_is_refused_while_the_first_is_open(self, tmp_path: Path) -> None:
        first, second = sinks.EventLog(tmp_path), sinks.EventLog(tmp_path)
        first.write(nth(1))
        for use in (lambda: second.write(nth(2)), lambda: second.resume(1)):
            with pytest.raises(errors.LogInUseError, match=r"written by another EventLog.*a folder of its own"):
                use()
        assert list(read_events(tmp_path)) == [nth(1)]
        first.write(nth(3))
        first.close()
        second.write(nth(4))
        second.close()
        assert files(tmp_path) == {"events.1.jsonl": [1, 3], "events.jsonl": [4]}

    def test_one_of_many_that_start_at_once_gets_it_and_no_event_is_lost(self, tmp_path: Path) -> None:
        written(tmp_path, nth(0))
        logs = [sinks.EventLog(tmp_path) for _ in range(8)]

        def begin(n: int) -> bool:
            try:
                logs[n].write(nth(n + 1))
            except errors.LogInUseError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(begin, range(8)))
        for log in logs:
            log.close()
        assert got.count(True) == 1
        assert files(tmp_path) == {"events.1.jsonl": [0], "events.jsonl": [got.index(True) + 1]}

    def test_moved_away_between_opening_and_locking_a_log_is_not_written_to(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, moved, take = written(tmp_path, nth(1)), tmp_path / "events.1.jsonl", fcntl.flock

        def after_another_run(file: Any, how: int) -> None:
            if not moved.exists():
                path.rename(moved)
            take(file, how)

        monkeypatch.setattr(fcntl, "flock", after_another_run)
        written(tmp_path, nth(2))
        assert files(tmp_path) == {"events.1.jsonl": [1], "events.jsonl": [2]}

    def test_while_a_log_is_moved_away_nobody_else_can_take_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written(tmp_path, nth(1))
        other, move = sinks.EventLog(tmp_path), Path.rename

        def rename(self: Path, target: Path) -> Path:
            with pytest.raises(errors.LogInUseError):
                other.write(nth(3))
            return move(self, target)

        monkeypatch.setattr(Path, "rename", rename)
        written(tmp_path, nth(2))
        assert files(tmp_path) == {"events.1.jsonl": [1], "events.jsonl": [2]}

    def test_a_writer_that_is_killed_leaves_whole_lines_and_a_free_folder(self, tmp_path: Path) -> None:
        code = """
log = sinks.EventLog(sys.argv[1])
log.write(nth(0))
print("ready", flush=True)
for n in range(1, 10**9):
    log.write(nth(n))
"""
        process = start(code, tmp_path)
        with pytest.raises(errors.LogInUseError):
            sinks.EventLog(tmp_path).write(nth(0))
        while (tmp_path / "events.jsonl").stat().st_size < 10_000:
            time.sleep(0.01)
        killed(process)
        assert process.returncode == -signal.SIGKILL
        found = [event.update for event in read_events(tmp_path)]
        assert found == list(range(len(found)))
        log = sinks.EventLog(tmp_path)
        log.resume(len(found))
        log.write(nth(len(found)))
        log.close()
        assert files(tmp_path) == {"events.jsonl": [*found, len(found)]}

    def test_a_child_that_outlives_the_writer_does_not_keep_the_folder(self, tmp_path: Path) -> None:
        code = """
log = sinks.EventLog(sys.argv[1])
log.write(nth(1))
if os.fork() == 0:  # the child says so: by then it has let go
    print("ready", flush=True)
time.sleep(60)
"""
        process = start(code, tmp_path)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        killed(process)
        try:
            written(tmp_path, nth(2))
        finally:
            for child in children:
                os.kill(int(child), signal.SIGKILL)
        assert files(tmp_path) == {"events.1.jsonl": [1], "events.jsonl": [2]}

    def test_without_locks_it_writes_all_the_same(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pipeline._lock.fcntl", None)
        for n in (1, 2):
            written(tmp_path, nth(n))
        assert files(tmp_path) == {"events.1.jsonl": [1], "events.jsonl": [2]}

    def test_a_full_disk_leaves_no_half_a_line_for_the_next_to_follow(self, tmp_path: Path) -> None:
        code = """
import resource, signal
log = sinks.EventLog(sys.argv[1])
log.write(nth(1))
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 30, most))
try:
    log.write(nth(2))
except OSError as error:
    print("ready", flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
log.write(nth(3))
log.close()
"""
        process = start(code, tmp_path)
        process.communicate()
        assert process.returncode == 0
        assert files(tmp_path) == {"events.jsonl": [1, 3]}

    def test_sync_brings_the_file_and_its_name_to_the_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: list[Path] = []
        fsync = os.fsync

        def noting(fd: int) -> None:
            synced.append(Path(f"/proc/self/fd/{fd}").readlink())
            fsync(fd)

        monkeypatch.setattr(os, "fsync", noting)
        log = sinks.EventLog(tmp_path)
        log.sync()
        assert synced == []  # nothing to bring
        log.write(nth(1))
        log.sync()
        log.close()
        assert synced == [log.path, tmp_path]


def train(folder: Path, **settings: Any) -> Any:
    """A small run into `folder`, with an evaluation each epoch."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = [(torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(5)]
    forward = Forward(
        model, supervised(F.cross_entropy, measures={"accuracy": lambda o, t: (o.argmax(1) == t).float().mean()})
    )
    optimizer = Optimizer(torch.optim.SGD, lr=0.1)
    step = chain(forward, ScaledBackward(), Accumulate(every=2), MaybeStep(optimizer), EmitEvents(micro_batches=True))
    return fold(
        step,
        init(step, model),
        settings.pop("stream", data),
        until=Epochs(3),
        evaluations=[Evaluation(forward, data[:2])],
        sinks=[sinks.EventLog(folder), *settings.pop("sinks", ())],
        **settings,
    )


class TestRun:
    def test_the_log_holds_what_any_other_sink_was_given(self, tmp_path: Path) -> None:
        given: list[Event] = []

        class Recorder:
            def write(self, event: Event) -> None:
                given.append(event)

            def close(self) -> None:
                pass

        train(tmp_path, sinks=[Recorder()])
        assert list(read_events(tmp_path)) == given

    def test_monitors_over_the_log_give_the_live_results(self, tmp_path: Path) -> None:
        watching = [
            monitors.MeanLoss(),
            monitors.Mean("accuracy"),
            monitors.LearningRate(),
            monitors.GradNorm(),
            monitors.Throughput(),
            monitors.EarlyStopping("val_loss"),
        ]
        run = train(tmp_path, monitors=watching)
        assert None not in run.results.values()
        assert replay(tmp_path, watching) == run.results

    def test_a_run_that_failed_says_so_in_its_last_line(self, tmp_path: Path) -> None:
        def stream() -> Any:
            yield torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
            raise OSError("the disk is gone")

        with pytest.raises(OSError, match="the disk is gone"):
            train(tmp_path, stream=stream())
        *_, last = read_events(tmp_path)
        assert isinstance(last, RunEnded)
        assert last.reasons == ("OSError: the disk is gone",)

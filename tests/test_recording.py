"""Logs read back: in constant memory, whole lines alone, damage named by its line, and monitors folded over them."""

from __future__ import annotations

import sys
import tracemalloc
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from pipeline import errors, monitors, read_events, replay, sinks
from pipeline._quick_events import quick_reader
from pipeline.event_json import EventJson
from pipeline.events import EpochStarted, EvalDone, Event, UpdateDone

AT: Mapping[str, Any] = {"micro_step": 4, "update": 1, "epoch": 0, "time": 12.5}


@attrs.frozen(kw_only=True)
class Noted(Event):
    """An event of a user's own."""

    words: tuple[str, ...]


@pytest.fixture(params=["with msgspec", "without"], autouse=True)
def _reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything here holds with the quick reader and without."""
    if request.param == "without":
        monkeypatch.setitem(sys.modules, "msgspec", None)
    quick_reader.cache_clear()
    assert (quick_reader()(LINES[0] + b"\n") is None) == (request.param == "without")
    yield
    quick_reader.cache_clear()


def update(n: int, **more: Any) -> UpdateDone:
    at = {"micro_step": 2 * n, "update": n, "epoch": n // 100, "time": n / 7}
    given = {"loss": 1 / n, "weight": 4.0, "micro_batches": 2, "rates": {"default": 0.1}, "grad_norm": 1.0 + n % 5}
    return UpdateDone(**{**at, **given, "samples": 8 * n, "measures": {"accuracy": (n / 3, 4.0)}, **more})


EVENTS = [update(n) for n in range(1, 301)]
LINES = [EventJson().encode(event).encode() for event in EVENTS]  # more than are read at once


def written(folder: Path, *events: Event) -> Path:
    log = sinks.EventLog(folder)
    for event in events:
        log.write(event)
    log.close()
    return log.path


class TestReading:
    def test_a_log_is_read_from_its_folder_or_its_file(self, tmp_path: Path) -> None:
        path = written(tmp_path, *EVENTS)
        for place in (tmp_path, path, str(tmp_path), str(path)):
            assert list(read_events(place)) == EVENTS
        assert list(read_events(path.rename(tmp_path / "kept.jsonl"))) == EVENTS

    def test_no_log_is_said_at_once(self, tmp_path: Path) -> None:
        for place in (tmp_path, tmp_path / "a", tmp_path / "a.jsonl"):
            with pytest.raises(FileNotFoundError, match="there is no event log"):
                read_events(place)

    def test_an_empty_log_has_no_events(self, tmp_path: Path) -> None:
        (tmp_path / "events.jsonl").touch()
        assert list(read_events(tmp_path)) == []

    def test_a_log_that_is_being_written_gives_what_is_there(self, tmp_path: Path) -> None:
        log = sinks.EventLog(tmp_path)
        log.write(update(1))
        reading = read_events(tmp_path)
        assert next(reading) == update(1)
        log.write(update(2))
        assert list(reading) == [update(2)]
        assert list(read_events(tmp_path)) == [update(1), update(2)]
        log.close()

    def test_events_of_ones_own_are_read_by_the_classes_handed_over(self, tmp_path: Path) -> None:
        events = [update(1), Noted(**AT, words=("a", "b")), update(2)]
        written(tmp_path, *events)
        assert list(read_events(tmp_path, [Noted])) == events
        assert list(read_events(tmp_path, skip_unknown=True)) == [update(1), update(2)]
        with pytest.raises(errors.UnknownEventError, match=r"events\.jsonl, line 2: 'Noted'.*types=\[Noted\]"):
            list(read_events(tmp_path))
        with pytest.raises(errors.SettingError):
            read_events(tmp_path, [int])  # type: ignore[list-item]

    def test_nan_and_the_infinities_come_back(self, tmp_path: Path) -> None:
        events = [update(n, loss=float(value)) for n, value in enumerate(["nan", "inf", "-inf", "1"], 1)]
        written(tmp_path, *events)
        assert repr(list(read_events(tmp_path))) == repr(events)

    def test_logs_one_after_the_other_in_a_file_are_a_log(self, tmp_path: Path) -> None:
        written(tmp_path, update(1))
        path = written(tmp_path, update(2))
        both = tmp_path / "both.jsonl"
        both.write_bytes((tmp_path / "events.1.jsonl").read_bytes() + path.read_bytes())
        assert list(read_events(both)) == [update(1), update(2)]

    def test_memory_does_not_grow_with_the_log(self, tmp_path: Path) -> None:
        def peak(count: int) -> int:
            path = written(tmp_path / str(count), *(update(n) for n in range(1, count + 1)))
            assert sum(1 for _ in read_events(path)) == count  # once before: what is made once is not measured
            tracemalloc.start()
            replay(path, [monitors.MeanLoss(), monitors.GradNorm()])
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            return most

        assert peak(4000) < 1.25 * peak(1000)


class TestTorn:
    def test_cut_at_any_byte_the_log_holds_the_whole_lines(self, tmp_path: Path) -> None:
        events = [update(1), update(2, loss=float("nan")), EpochStarted(**AT)]
        whole = written(tmp_path, *events).read_bytes()
        for size in range(len(whole) + 1):
            cut = tmp_path / "cut.jsonl"
            cut.write_bytes(whole[:size])
            assert repr(list(read_events(cut))) == repr(events[: whole[:size].count(b"\n")])

    def test_what_a_loss_of_power_leaves_after_the_last_line_is_passed_over(self, tmp_path: Path) -> None:
        path = written(tmp_path, update(1))
        path.write_bytes(path.read_bytes() + b"\0" * 70_000)
        assert list(read_events(path)) == [update(1)]


class TestDamaged:
    @pytest.mark.parametrize("number", [1, 2, 299])
    @pytest.mark.parametrize(
        "damage",
        [
            lambda line: line[:20],
            lambda line: line[20:],
            lambda line: b"",
            lambda line: b"\0" * len(line),
            lambda line: line[:30] + b"\xff" + line[30:],
            lambda line: line + line,
            lambda line: line + b"," + line,
            lambda line: line.replace(b"weight", b"wieght"),
            lambda line: b"[" + line + b"]",
        ],
        ids=["end", "start", "empty", "zeros", "byte", "twice", "comma", "key", "list"],
    )
    def test_a_damaged_line_is_named_and_all_before_it_are_given(
        self, damage: Any, number: int, tmp_path: Path
    ) -> None:
        path = tmp_path / "log.jsonl"
        path.write_bytes(b"\n".join([*LINES[: number - 1], damage(LINES[number - 1]), *LINES[number:], b""]))
        given = deque[Event]()
        with pytest.raises(errors.DamagedLogError, match=rf"log\.jsonl, line {number} is no event: .") as caught:
            given.extend(read_events(path))
        assert caught.value.where == f"{path}, line {number}"
        assert list(given) == EVENTS[: number - 1]

    def test_two_damages_that_make_up_for_each_other_are_found(self, tmp_path: Path) -> None:
        path = tmp_path / "log.jsonl"
        line = LINES[0]
        path.write_bytes(b"\n".join([line, line + b"," + line, line[:100], line[100:], b""]))
        with pytest.raises(errors.DamagedLogError, match="line 2 is no event"):
            list(read_events(path))

    def test_a_later_format_is_refused_wherever_it_stands(self, tmp_path: Path) -> None:
        path = tmp_path / "log.jsonl"
        line = LINES[0]
        path.write_bytes(line + b"\n" + line.replace(b'"UpdateDone"', b'"UpdateDone","format":2') + b"\n")
        with pytest.raises(errors.LogFormatError, match="line 2: the log is in format 2"):
            list(read_events(path))


WATCHING: list[Any] = [
    monitors.MeanLoss(),
    monitors.Mean("accuracy"),
    monitors.GradNorm(),
    monitors.Throughput(),
    monitors.EarlyStopping("val_loss"),
]


class TestReplay:
    @pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 64, 300])
    def test_a_path_gives_what_its_events_give(self, count: int, tmp_path: Path) -> None:
        events: list[Event] = [update(n) for n in range(1, count + 1)]
        if events:
            events.append(EvalDone(**AT, name="val", values={"val_loss": 0.5}, weight=1.0, batches=1))
        (tmp_path / "events.jsonl").touch()
        written(tmp_path, *events)
        one_by_one: dict[str, Any] = {}
        for monitor in WATCHING:
            accumulator = monitor.init()
            for event in events:
                accumulator = monitor.reduce(accumulator, event)
            one_by_one[monitor.name] = monitor.result(accumulator)
        for log in (tmp_path, str(tmp_path), events, iter(events), read_events(tmp_path)):
            assert replay(log, WATCHING) == one_by_one

    def test_two_monitors_of_one_name_are_refused(self) -> None:
        with pytest.raises(errors.DuplicateNameError, match="Two monitors are called 'MeanLoss'"):
            replay([], [monitors.MeanLoss(), monitors.MeanLoss()])

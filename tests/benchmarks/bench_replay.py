"""How fast a log is written and replayed through five monitors on one core, and in how much memory.

The events are those of a run as a fold publishes them: updates with all that they measure, and an evaluation and an
epoch's end each thousand of them; then the same with each window's four micro-batches. Time is the processor's. Each
round reads in a process of its own, and the best one counts.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline import monitors, read_events, replay, sinks
from pipeline.events import EpochEnded, EpochStarted, EvalDone, Event, MicroBatchDone, RunEnded, RunStarted, UpdateDone

EPOCH, WINDOW = 1000, 4


def events(count: int, micro_batches: bool) -> Iterator[Event]:
    """So many events of a long run."""
    draw, made, n = random.Random(0).random, 1, 0
    at: dict[str, Any] = {"micro_step": 0, "update": 0, "epoch": 0, "time": 1.8e9}
    yield RunStarted(**at, until="Updates(1000000)", total_updates=1_000_000)
    while made < count - 1:
        some: list[Event] = []
        if n % EPOCH == 0:
            some.append(EpochStarted(**at))
        for _ in range(WINDOW):
            at = {**at, "micro_step": at["micro_step"] + 1, "time": at["time"] + 0.01 * draw()}
            if micro_batches:
                some.append(MicroBatchDone(**at, loss=3 * draw(), weight=32, samples=32))
        n += 1
        at = {**at, "update": n}
        some.append(
            UpdateDone(
                **at,
                loss=3 * draw(),
                weight=128,
                micro_batches=WINDOW,
                rates={"default": 1e-3 * draw()},
                grad_norm=5 * draw(),
                clip_factor=draw(),
                samples=128 * n,
                measures={"accuracy": (128 * draw(), 128)},
                waited=0.01 * draw(),
            )
        )
        if n % EPOCH == 0:
            at = {**at, "epoch": at["epoch"] + 1}
            some.append(EvalDone(**at, name="val", values={"val_loss": draw()}, weight=1000.0, batches=10))
            some.append(EpochEnded(**at, batches=WINDOW * EPOCH))
        some = some[: count - 1 - made]
        made += len(some)
        yield from some
    yield RunEnded(**at, reasons=("Updates(1000000)",))


def five() -> list[Any]:
    """Monitors as a run has them."""
    return [
        monitors.MeanLoss(),
        monitors.GradNorm(),
        monitors.LearningRate(),
        monitors.Throughput(),
        monitors.EarlyStopping("val_loss"),
    ]


def peak() -> float:
    """The most memory that this process has held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def write(folder: Path, count: int, micro_batches: bool) -> None:
    """Write the log, and print at what rate."""
    log, taken, source = sinks.EventLog(folder), 0.0, events(count, micro_batches)
    while some := list(islice(source, 1000)):
        begun = time.process_time()
        for event in some:
            log.write(event)
        taken += time.process_time() - begun
    log.close()
    size = log.path.stat().st_size / count
    print(f"  written  {count / taken:>9,.0f} a second, {1e6 * taken / count:5.2f} µs each, {size:.0f} bytes each")


def read(folder: Path) -> None:
    """In a process of its own: seconds to read it alone and to replay it, and the growth of the memory in between."""
    replay(islice(read_events(folder), 1000), five())  # what is made once is there
    before, begun = peak(), time.process_time()
    deque(read_events(folder), maxlen=0)
    between = time.process_time()
    replay(folder, five())
    print(between - begun, time.process_time() - between, peak() - before)


def main(count: int, rounds: int) -> None:
    for micro_batches in (False, True):
        print(f"{count:,} events{', those of micro-batches among them' if micro_batches else ''}")
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), count, micro_batches)
            command = [sys.executable, __file__, "--read", folder]
            said = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(rounds)]
        alone, replayed, growth = zip(*(map(float, line.split()) for line in said), strict=True)
        print(f"  read     {count / min(alone):>9,.0f} a second, {1e6 * min(alone) / count:5.2f} µs each")
        print(
            f"  replayed {count / min(replayed):>9,.0f} a second, {1e6 * min(replayed) / count:5.2f} µs each; "
            f"bar 200,000; memory grew by {max(growth):.1f} MB"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.read:
        read(asked.read)
    else:
        main(asked.events, asked.rounds)

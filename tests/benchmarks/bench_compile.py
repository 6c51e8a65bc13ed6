"""What compiling a step is worth: the compiled fold against the plain loop, and that with `torch.compile(model)`.

An MLP 32-64-10, a small transformer of 290 tensors, and a small GPT; AdamW fused, window 4, clip 1.0, warmup-cosine;
one thread. The three run in turn in one process; medians of the rounds, and the median of the rounds' ratios. Then how
long the first start takes, with an empty cache, and the second, each in a process of its own. CPU seconds count the
compiler's processes too, and not what else runs on the machine.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import attrs
import torch

from pipeline import compiled, fold, init, monitors
from tests.benchmarks.recipes import MLP, SMALL_GPT, TRANSFORMER, WINDOW, Batches, Job, Plain, step_of


@attrs.frozen
class Case:
    """A job, and how many micro-batches make a round."""

    job: Job
    micro_batches: int
    bar: str


CASES = {
    "mlp": Case(MLP, 200, "2.5 of plain"),
    "transformer": Case(TRANSFORMER, 8, "2.5 of plain, 1.5 of torch.compile(model)"),
    "gpt": Case(SMALL_GPT, 8, "1 of torch.compile(model)"),
}


class Compiled:
    """The compiled fold with three monitors."""

    def __init__(self, job: Job) -> None:
        model = job.started()
        self.step = compiled(step_of(model))
        self.state = init(self.step, model)

    def run(self, batches: Batches) -> None:
        watch = [monitors.MeanLoss(), monitors.GradNorm(), monitors.LearningRate()]
        self.state = fold(self.step, self.state, batches, monitors=watch).state


def compare(name: str, rounds: int) -> None:
    case = CASES[name]
    batches = [case.job.batch() for _ in range(case.micro_batches)]
    sides = {
        "plain": Plain(case.job.started()),
        "torch.compile(model)": Plain(case.job.started(), is_compiled=True),
        "compiled(step)": Compiled(case.job),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds + 3):
        gc.collect()
        for side in sorted(sides, reverse=bool(turn % 2)):
            start = time.process_time()
            sides[side].run(batches)
            if turn >= 3:  # the first are the warm-up
                times[side].append((time.process_time() - start) / len(batches) * 1e6)
    print(f"{name}:")
    for side, values in times.items():
        print(f"  {side:>20}: {statistics.median(values):8.1f} µs a micro-batch")
    for side in ("plain", "torch.compile(model)"):
        ratios = sorted(a / b for a, b in zip(times[side], times["compiled(step)"], strict=True))
        quarter = len(ratios) // 4
        spread = f"middle half {ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}"
        print(f"  compiled(step) is {statistics.median(ratios):.2f} times as fast as {side} ({spread})")
    print(f"  bar: {case.bar}")


def start(name: str) -> None:
    """Two updates in this process, from nothing."""
    began = time.perf_counter()
    job = CASES[name].job
    side = Compiled(job)
    side.run([job.batch() for _ in range(2 * WINDOW)])
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in used)
    graphs = ", ".join(f"{'+'.join(g.parts)} {g.traced:.1f} + {g.compiled:.1f} s" for g in side.step.graphs)
    print(f"{time.perf_counter() - began:.1f} s, {cpu:.1f} s of CPU ({graphs})")


def starts(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for which in ("first", "second"):
            command = [sys.executable, __file__, "--start", name]
            where = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
            said = subprocess.run(command, env=where, check=True, capture_output=True, text=True).stdout.strip()
            print(f"  {which} start: {said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--start", choices=CASES, help="measure a start of this one alone, with the cache as it is")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.start:
        start(given.start)
        return
    for name in given.models:
        compare(name, given.rounds)
        starts(name)


if __name__ == "__main__":
    main()

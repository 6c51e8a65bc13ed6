"""What a step costs: the fold with three monitors against the loop that a careful person would write by hand.

An MLP 32-64-10, a tiny transformer of 290 tensors, and a small GPT; AdamW fused, window 4, clip 1.0, warmup-cosine, the
loss of every update kept; one thread. The two sides run in turn in one process; medians of the rounds, and the median
of the rounds' ratios. Processor time, which leaves out what else runs on the machine.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import attrs
import torch

from pipeline import fold, init, monitors
from tests.benchmarks.recipes import MLP, SMALL_GPT, TRANSFORMER, WINDOW, Batches, Job, Plain, step_of

WARM_UP = 3


@attrs.frozen
class Recipe:
    """A job; how many micro-batches make a round, how many rounds, and what the ratio may be."""

    job: Job
    micro_batches: int
    rounds: int
    bar: float


RECIPES = {
    "MLP": Recipe(MLP, micro_batches=120, rounds=201, bar=1.00),
    "transformer of 290 tensors": Recipe(TRANSFORMER, micro_batches=16, rounds=25, bar=1.02),
    "small GPT": Recipe(SMALL_GPT, micro_batches=8, rounds=41, bar=1.01),
}


class Folded:
    """The fold with three monitors."""

    def __init__(self, job: Job) -> None:
        model = job.started()
        self.step = step_of(model)
        self.state = init(self.step, model)

    @property
    def updates(self) -> int:
        return self.state.progress.updates

    def run(self, batches: Batches) -> None:
        watch = [monitors.MeanLoss(), monitors.GradNorm(), monitors.LearningRate()]
        self.state = fold(self.step, self.state, batches, monitors=watch).state


def compare(name: str, rounds: int | None) -> None:
    recipe = RECIPES[name]
    rounds = rounds or recipe.rounds
    batches = [recipe.job.batch() for _ in range(recipe.micro_batches)]
    sides = {"plain": Plain(recipe.job.started()), "fold": Folded(recipe.job)}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds + WARM_UP):
        gc.collect()
        for side in sorted(sides, reverse=bool(turn % 2)):  # who goes first takes turns
            start = time.process_time()
            sides[side].run(batches)
            if turn >= WARM_UP:
                times[side].append((time.process_time() - start) / len(batches) * 1e6)
    expected = recipe.micro_batches // WINDOW * (rounds + WARM_UP)
    assert [side.updates for side in sides.values()] == [expected, expected]
    print(f"{name}:")
    for side, values in times.items():
        print(f"  {side:>5}: {statistics.median(values):8.1f} µs a micro-batch ({_middle_half(values, '.1f')})")
    ratios = [f / p for p, f in zip(times["plain"], times["fold"], strict=True)]
    spread = f"{_middle_half(ratios, '.3f')}, {rounds} rounds"
    print(f"  ratio: {statistics.median(ratios):8.3f} ({spread}); bar {recipe.bar:.2f}")


def _middle_half(values: list[float], how: str) -> str:
    ordered, quarter = sorted(values), len(values) // 4
    return f"middle half {ordered[quarter]:{how}} to {ordered[-1 - quarter]:{how}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, help="in place of as many as each recipe needs")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.recipes:
        compare(name, given.rounds)


if __name__ == "__main__":
    main()

"""What an ensemble saves: 16 members at once, against 16 loops that a careful person would write, one after another.

Each as in `bench_step`: MLP 32-64-10, batch 32, AdamW (fused in the plain loops), window 4, clip 1.0, warmup-cosine,
the loss of every update kept; one thread. The members see the same batches, and differ in seed and rate. The sides run
in turn in one process; times are the processor's, medians of the rounds, and of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch
from torch import Tensor

from pipeline import compiled, ensemble, fold, init, initialise, monitors, schedules
from pipeline.ensembles import per_member
from tests.benchmarks.recipes import MLP, WINDOW, Batches, Plain, step_of

MEMBERS, UPDATES = 16, 25
RATES = [schedules.warmup_cosine(peak=1e-3 * (1 + i / 10), warmup=20, total=5_000) for i in range(MEMBERS)]


class OneAfterAnother:
    """All the hand-written loops."""

    def __init__(self) -> None:
        self.loops = [Plain(initialise(MLP.model(), seed=member), RATES[member]) for member in range(MEMBERS)]

    def run(self, batches: Batches) -> None:
        for loop in self.loops:
            loop.run(batches)

    def weights(self, member: int) -> Tensor:
        return next(self.loops[member].model.parameters()).detach()


class AtOnce:
    """The members in one fold, with a monitor for each of them."""

    def __init__(self, *, is_compiled: bool) -> None:
        model = MLP.model()
        step = step_of(model, lr=1e-3)
        self.several = ensemble(step, seeds=range(MEMBERS), rates=RATES)
        self.step = compiled(self.several) if is_compiled else self.several
        self.state = init(self.step, model)

    def run(self, batches: Batches) -> None:
        watch = [per_member(monitors.MeanLoss())]
        self.state = fold(self.step, self.state, batches, monitors=watch, publish_every=10 * MEMBERS).state

    def weights(self, member: int) -> Tensor:
        return next(iter(self.several.member(self.state, member).params.values())).detach()


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batches = [(torch.randn(32, 32), torch.randint(0, 10, (32,))) for _ in range(UPDATES * WINDOW)]
    plain = OneAfterAnother()
    sides = {"plain": plain, "ensemble": AtOnce(is_compiled=False), "compiled": AtOnce(is_compiled=True)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 2):
        gc.collect()
        for name in sorted(sides, reverse=bool(turn % 2)):  # who goes first takes turns
            start = time.process_time()
            sides[name].run(batches)
            if turn >= 2:  # the first are the warm-up
                times[name].append((time.process_time() - start) / len(batches) / MEMBERS * 1e6)
    for name, values in times.items():
        low, *_, high = sorted(values)
        print(f"{name:>8}: {statistics.median(values):6.1f} µs a member's micro-batch ({low:.1f} to {high:.1f})")
    for name in ("ensemble", "compiled"):
        ratios = sorted(p / e for p, e in zip(times["plain"], times[name], strict=True))
        quarter = len(ratios) // 4
        spread = f"middle half {ratios[quarter]:.1f} to {ratios[-1 - quarter]:.1f}, {rounds} rounds"
        apart = [float((sides[name].weights(i) - plain.weights(i)).abs().max()) for i in range(MEMBERS)]
        bar = "; bar 8" if name == "compiled" else ""
        print(f"{name:>8}: {statistics.median(ratios):.1f} times the throughput ({spread}{bar})")
        print(f"{'':>8}  weights of the member in the middle within {statistics.median(apart):.0e} of the plain loop's")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    main(parser.parse_args().rounds)

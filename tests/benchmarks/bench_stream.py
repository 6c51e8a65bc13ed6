"""What a stream costs, against `torch.utils.data.DataLoader` on the same work, and what batches by length save.

1. Tensors in memory, 32 a batch, shuffled, no workers.
2. Decoding of about 2 ms an item, 32 a batch, shuffled, two worker processes that last over the epochs in both.
3. A dataset whose items take a microsecond, 32 a batch, shuffled, no workers: with the default generators set for each
   batch, and without.
4. Padding on a skewed distribution of lengths: fixed batches in shuffled order, `bucket_by_length`, `token_budget`.
5. Going to a place in 10^7 items, shuffled.

The two sides run in turn in one process; medians of the rounds, and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from pipeline import stream

BATCH = 32
BLOB = zlib.compress(bytes(torch.randint(0, 16, (400_000,), dtype=torch.uint8).tolist()))


class Decoding:
    """A dataset whose items take about 2 ms of computing."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.rounds = max(1, round(2e-3 / min(timed(lambda: zlib.decompress(BLOB)) for _ in range(20))))

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Tensor:
        for _ in range(self.rounds):
            zlib.decompress(BLOB)
        return torch.full((64,), float(index))


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def drain(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


class Cheap:
    """A dataset whose items are there already."""

    def __init__(self, n: int) -> None:
        self.rows = torch.randn(n, 32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def compare(title: str, sides: dict[str, Iterable[Any]], batches: int, rounds: int, bar: str) -> None:
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        gc.collect()
        for name in sorted(sides, reverse=bool(turn % 2)):  # who goes first takes turns
            taken = timed(lambda name=name: drain(sides[name]))
            if turn:  # the first round starts the workers
                times[name].append(taken / batches * 1e6)
    print(title)
    for name, values in times.items():
        print(f"  {name:>11}: {statistics.median(values):9.1f} µs a batch ({min(values):.1f} to {max(values):.1f})")
    theirs, ours = times["DataLoader"], times["stream"]
    ratios = sorted(b / a for a, b in zip(theirs, ours, strict=True))
    middle, quarter = statistics.median(ratios), len(ratios) // 4
    spread = f"middle half {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}, {rounds} rounds"
    print(f"  {'ratio':>11}: {middle:9.3f} of DataLoader ({spread}); bar {bar}")


def in_memory(rounds: int) -> None:
    n = 200 * BATCH
    data = TensorDataset(torch.randn(n, 32), torch.randint(0, 10, (n,)))
    sides = {
        "DataLoader": DataLoader(data, BATCH, shuffle=True),
        "stream": stream.batches(data, BATCH, shuffle=True),
    }
    compare("tensors in memory", sides, n // BATCH, rounds, "0.25")


def cheap(rounds: int) -> None:
    n = 200 * BATCH
    data: Any = Cheap(n)
    for seed, title in ((0, "cheap items"), (None, "cheap items, source(seed=None)")):
        ours = stream.batch(stream.shuffle(stream.source(data, seed=seed)), BATCH)
        compare(
            title, {"DataLoader": DataLoader(data, BATCH, shuffle=True), "stream": ours}, n // BATCH, rounds, "none"
        )


def decoding(rounds: int) -> None:
    n = 8 * BATCH
    data: Any = Decoding(n)
    ours = stream.batches(data, BATCH, shuffle=True, workers=2)
    sides = {
        "DataLoader": DataLoader(data, BATCH, shuffle=True, num_workers=2, persistent_workers=True),
        "stream": ours,
    }
    with ours:
        compare("decoding, 2 workers", sides, n // BATCH, rounds, "1.0")


def lengths(n: int) -> list[Tensor]:
    """Sequences with lengths of a log-normal distribution, 1 to 512, most of them short."""
    drawn = torch.distributions.LogNormal(3.5, 0.9).sample((n,)).long().clamp_(1, 512)
    return [torch.zeros(int(length), dtype=torch.int64) for length in drawn]


def wasted(batches: Iterable[list[Tensor]]) -> tuple[float, int]:
    """Which part of the padded batches is padding, and the size of the largest."""
    kept = padded = largest = 0
    for batch in batches:
        size = len(batch) * max(map(len, batch))
        kept, padded, largest = kept + sum(map(len, batch)), padded + size, max(largest, size)
    return 1 - kept / padded, largest


def padding(n: int) -> None:
    shuffled = stream.shuffle(lengths(n), seed=0)
    budget = 32 * 64
    ways: dict[str, Iterator[Any] | Iterable[Any]] = {
        "fixed batches": stream.batch(shuffled, BATCH, collate=list),
        "bucket_by_length": stream.bucket_by_length(shuffled, BATCH, pool=50, collate=list),
        "token_budget": stream.token_budget(shuffled, budget, pool=50 * BATCH, collate=list),
    }
    print(f"padding, {n} sequences of skewed length")
    for name, batches in ways.items():
        share, largest = wasted(batches)
        print(f"  {name:>17}: {share:6.1%} of the tokens are padding; largest batch {largest} tokens")
    print(f"  {'':>17}  the budget is {budget} tokens")


def resuming(n: int) -> None:
    def read_on() -> object:
        batches = stream.batches(range(n), BATCH, shuffle=True)
        batches.load_state_dict(place)
        return next(batches)

    batches = stream.batches(range(n), BATCH, shuffle=True)
    place = {**batches.state_dict(), "row": n // 2 // BATCH * BATCH}
    times = [timed(read_on) * 1e3 for _ in range(11)]
    print(f"going to the middle of {n} shuffled items, and the first batch there")
    print(f"  {statistics.median(times):.2f} ms (to {max(times):.2f}); bar 50")


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    in_memory(3 * rounds)
    cheap(3 * rounds)
    decoding(rounds)
    padding(20_000)
    resuming(10_000_000)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    main(parser.parse_args().rounds)

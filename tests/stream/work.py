"""Datasets and functions for worker processes, which find them here by name."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import Any

import numpy as np
import torch


class Numbers:
    """The numbers below n; at `bad`, trouble."""

    def __init__(self, n: int, bad: int | None = None, how: str = "raise") -> None:
        self.n, self.bad, self.how = n, bad, how

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            if self.how == "raise":
                raise OSError(f"sector {index}")
            if self.how == "exit":
                os._exit(3)
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "sys.exit":
                sys.exit(4)
            if self.how == "no pickle":
                return lambda: index
            if self.how == "local error":

                class LocalError(Exception):
                    pass

                raise LocalError("of a class that cannot be pickled")
            if self.how == "stop":
                raise StopIteration
        return index


class Drawing:
    """Items drawn from the three default generators."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return draws()


def draws(*_: Any) -> tuple[int, int, int]:
    """One number each of torch, Python and numpy."""
    high = 10**9
    return int(torch.randint(high, ())), random.randrange(high), int(np.random.randint(high))


class Epoch:
    """A dataset that is told its epoch."""

    def __init__(self, n: int) -> None:
        self.n, self.epoch = n, -1

    def __len__(self) -> int:
        return self.n

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.epoch, index


class SlowEpoch(Epoch):
    """One that takes its time between being told and giving an item."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        epoch = self.epoch
        time.sleep(0.002 * (index % 3))
        assert self.epoch == epoch
        return epoch, index


def tokens(item: Any, generator: torch.Generator) -> tuple[Any, int]:
    """The item and a number of its own."""
    return item, int(torch.randint(10**9, (), generator=generator))


def fails_on_three(item: int) -> int:
    if item == 3:
        raise ValueError("three")
    return item * 10


def dies_on_three(item: int) -> int:
    if item == 3:
        os._exit(5)
    return item * 10


def slowly(item: int) -> int:
    time.sleep(0.02)
    return item


def slowly_at_last(item: int) -> int:
    time.sleep(0.7 if item >= 8 else 0)
    return item


def unpicklable_on_three(item: int) -> Any:
    return (lambda: item) if item == 3 else item


def pid(item: Any) -> int:
    return os.getpid()

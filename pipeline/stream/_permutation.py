"""Permutations by random access: where place i of a shuffled order lies, without the order in memory."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from pipeline.stream._keys import generator, key, mixed
from pipeline.stream._tables import Blocks, Kept, Table

_SMALL = 1 << 16  # up to here the whole order is kept
_ROUNDS = 6


def permutation(n: int, of: int) -> Table:
    """A random order of 0 … n - 1 that follows from `of`."""
    if n <= _SMALL:
        return Kept(torch.randperm(n, generator=generator(of)))
    return Blocks(n, functools.partial(feistel, n=n, of=of))


def feistel(places: Tensor, n: int, of: int) -> Tensor:
    """What stands at these places in the order of 0 … n - 1 that follows from `of`.

    A Feistel network permutes the numbers below the next power of four; a number that lands at n or above goes through
    again until it lands below, which is still a permutation of those below.

    Source: Luby, Rackoff 1988 for the network; Black, Rogaway 2002, "Ciphers with arbitrary finite domains", for the
    walk.
    """
    half = max(1, math.ceil(math.log2(max(n, 2)) / 2))
    while 1 << 2 * half < n:  # the logarithm is rounded
        half += 1
    keys = [key(of, round_) for round_ in range(_ROUNDS)]
    found = _once(places, half, keys)
    outside = (found >= n).nonzero().flatten()
    while outside.numel():
        again = _once(found[outside], half, keys)
        found[outside] = again
        outside = outside[again >= n]
    return found


def _once(places: Tensor, half: int, keys: list[int]) -> Tensor:
    mask = (1 << half) - 1
    left, right = places >> half, places & mask
    for of in keys:
        left, right = right, left ^ (mixed(right, of) & mask)
    return left << half | right

"""Randomness by counter: each draw of a stream is a function of the seed and of the item's place, of nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline._splitmix import splitmix64

ORDER, DRAW, MIX, POOL, ITEM, DEFAULTS = range(1, 7)
"""What a key is for: draws of one seed at one place are told apart by it. 0 is for nothing."""

_MASK = (1 << 64) - 1


def key(*numbers: int) -> int:
    """A 64-bit key out of whole numbers in their order."""
    mixed = 0
    for number in numbers:
        mixed = splitmix64(mixed + number)
    return mixed


def generator(of: int) -> torch.Generator:
    """A generator of torch that starts from the key `of`."""
    return torch.Generator().manual_seed(of)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


_FIRST, _SECOND = map(_signed, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """`x >> bits` as for numbers without a sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mixed(places: Tensor, of: int) -> Tensor:
    """`splitmix64(place + of)` for each of the places, int64 that wraps around."""
    x = places + _signed((of + 0x9E3779B97F4A7C15) & _MASK)
    x = x.bitwise_xor_(_shifted(x, 30)).mul_(_FIRST)
    x = x.bitwise_xor_(_shifted(x, 27)).mul_(_SECOND)
    return x.bitwise_xor_(_shifted(x, 31))


def uniform(places: Tensor, of: int) -> Tensor:
    """A number above 0 and below 1 for each of the places, in float64."""
    return (_shifted(mixed(places, of), 12).to(torch.float64) + 0.5) * 2.0**-52

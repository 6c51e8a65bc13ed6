"""numpy's default generator: another one in its place for a while, for a few microseconds."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import attrs

_MT19937 = ctypes.c_uint32 * 625  # 624 words, and the place in them
_spares: list[Any] = []  # a bit generator is slow to make


@attrs.frozen
class Own:
    """What was there before: the bit generator, and what numpy keeps beside it, half a pair of normal draws."""

    bits: Any
    half: float | None


def put_aside(seed: int) -> Own | None:
    """Let a spare bit generator that starts from a 32-bit seed take the place of the user's; None without numpy.

    Getting and setting the state of the user's would take twenty times as long.
    """
    if "numpy" not in sys.modules:
        return None
    random = sys.modules["numpy"].random
    bits = random.get_bit_generator()
    own = Own(bits, _half_taken_from(bits, random))
    random.set_bit_generator(_spares.pop() if _spares else random.MT19937(0))
    random.seed(seed)
    return own


def put_back(own: Own) -> None:
    """Let the user's bit generator stand again where it stood."""
    random = sys.modules["numpy"].random
    _spares.append(random.get_bit_generator())
    random.set_bit_generator(own.bits)
    if own.half is not None:
        random.set_state(random.get_state(legacy=False) | {"has_gauss": 1, "gauss": own.half})


def _half_taken_from(bits: Any, random: Any) -> float | None:
    """The half pair of normal draws, if there is one.

    Where there is one, a normal draw gives it and leaves the bit generator alone. Where there is none, the draw moves
    the bit generator, whose words are then put back.
    """
    if not isinstance(bits, random.MT19937):
        state = random.get_state(legacy=False)
        return state["gauss"] if state["has_gauss"] else None
    words = _MT19937.from_address(bits.ctypes.state_address)
    before = bytes(words)
    drawn = random.standard_normal()
    if bytes(words) == before:
        return drawn
    ctypes.memmove(words, before, len(before))
    return None

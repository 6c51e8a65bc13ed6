"""The default generators of torch, Python and numpy, set from a key while an item is made, and put back afterwards.

A dataset that draws from them then draws the same for an item whoever makes it. Threads share these generators with all
other threads, so that none of ours touches them: see `in_background`.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

_thread = threading.local()
_spares: list[Any] = []  # a bit generator is slow to make


def in_background() -> None:
    """Say that this thread is a helper of another one, and must leave the default generators alone."""
    _thread.in_background = True


@contextmanager
def defaults_from(key: int) -> Generator[None]:
    """Inside, the default generators start from `key`; afterwards they are where they were."""
    if getattr(_thread, "in_background", False):
        yield
        return
    torch_state, python_state = torch.default_generator.get_state(), random.getstate()
    torch.default_generator.manual_seed(key)
    random.seed(key)
    try:
        if "numpy" in sys.modules:
            with _numpy_from(key):
                yield
        else:
            yield
    finally:
        random.setstate(python_state)
        torch.default_generator.set_state(torch_state)


@contextmanager
def _numpy_from(key: int) -> Generator[None]:
    """The same for numpy, whose state is slow to set: a spare bit generator takes the place of the user's for a while.

    What numpy keeps outside of it, half a pair of normal draws, is lost by that, and set where there was any.
    """
    random_ = sys.modules["numpy"].random
    before, own = random_.get_state(legacy=False), random_.get_bit_generator()
    spare = _spares.pop() if _spares else random_.MT19937(0)
    random_.set_bit_generator(spare)
    random_.seed(key >> 32)  # of two words it would take ten times as long
    try:
        yield
    finally:
        random_.set_bit_generator(own)
        _spares.append(spare)
        if before["has_gauss"]:
            random_.set_state(before)

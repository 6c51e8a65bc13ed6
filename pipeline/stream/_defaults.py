"""The default generators of torch, Python and numpy, set from a key while an item is made, and put back afterwards.

A dataset that draws from them then draws the same for an item whoever makes it. Threads share these generators with all
other threads, so that none of ours touches them: see `in_background`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch

from pipeline.stream._numpys_default import put_aside, put_back

_thread = threading.local()


def in_background() -> None:
    """Say that this thread is a helper of another one, and must leave the default generators alone."""
    _thread.in_background = True


@contextmanager
def defaults_from(key: int) -> Generator[None]:
    """Inside, the default generators start from `key`; afterwards they are where they were."""
    if getattr(_thread, "in_background", False):
        yield
        return
    torch_state, python_state, numpys = torch.default_generator.get_state(), random.getstate(), put_aside(key >> 32)
    try:
        torch.default_generator.manual_seed(key)
        random.seed(key)
        yield
    finally:
        if numpys is not None:
            put_back(numpys)
        random.setstate(python_state)
        torch.default_generator.set_state(torch_state)

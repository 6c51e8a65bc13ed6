"""Tensors copied on several cores at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

__all__ = ["Copies"]

_AT_ONCE = 4


class Copies:
    """Copies that are made together: a large one waits for memory most of the time, and for every page of a file."""

    def __init__(self) -> None:
        self._asked: list[tuple[Tensor, Tensor]] = []

    def into(self, place: Tensor, values: Tensor) -> None:
        """Ask for `values` to be written to `place`."""
        self._asked.append((place, values))

    def of(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A leaf on the device, which has the values of `tensor` once all copies are made."""
        copy = torch.empty_like(tensor, device=device, requires_grad=False)
        self.into(copy, tensor)
        return copy.requires_grad_(tensor.requires_grad)

    def make(self) -> None:
        """Make all that were asked for."""
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="copies") as pool:
            for _ in pool.map(_copy, *zip(*self._asked, strict=True)):
                pass


@torch.no_grad()
def _copy(place: Tensor, values: Tensor) -> None:
    place.copy_(values)

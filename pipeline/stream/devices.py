"""`to_device`: batches to where the model is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import SettingError
from pipeline.stream._transparent import Transparent
from pipeline.stream._trees import rebuilt
from pipeline.stream.node import Node
from pipeline.stream.sources import source

__all__ = ["pinned", "to_device"]


def to_device(data: Any, device: torch.device | str) -> Node:
    """Each batch with its tensors on `device`, in the same containers, everything else the same object.

    Lists, tuples, dicts and other mappings, NamedTuples, attrs records and dataclasses are walked through. The host
    does not wait for the copies: those to a CUDA device go through pinned memory. Put a `prefetch` behind it, and
    batches are copied ahead.

    Raises: SettingError for what is no device.
    """
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SettingError("to_device(device)", "a torch.device", device) from error

    def moved(tensor: Tensor) -> Tensor:
        if where.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(where, non_blocking=True)

    return _Changed(source(data), moved, "to_device", f"'{where}'")


def pinned(data: Any) -> Node:
    """Each batch with its tensors in pinned memory, from where copies to an accelerator need not wait.

    `to_device` does so itself; this is for those who move batches on their own.

    Raises: SettingError where there is no accelerator.
    """
    if not torch.accelerator.is_available():
        raise SettingError("pinned", "used where there is an accelerator", "none", "Leave it out.")
    return _Changed(source(data), Tensor.pin_memory, "pinned")


class _Changed(Transparent):
    """Batches with other tensors in them."""

    def __init__(self, node: Node, change: Callable[[Tensor], Tensor], name: str, *settings: str) -> None:
        super().__init__(node)
        self._change, self._settings = change, settings
        self.name = name  # pyright: ignore[reportAttributeAccessIssue]

    def next(self) -> Any:
        return rebuilt(self.source.next(), self._change)

    def settings(self) -> tuple[str, ...]:
        return self._settings

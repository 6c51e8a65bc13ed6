"""Activation checkpointing: what a submodule saved for backward is computed again instead of kept."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.utils.checkpoint import checkpoint

from pipeline.errors import SettingError


def chosen(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """The submodules whose names match, the outermost where one lies in another.

    Raises: SettingError for a pattern that nothing matches, and for a module that would see its batch twice and
            remember it (BatchNorm statistics).
    """
    names: list[str] = []
    for pattern in patterns:
        found = [name for name, _ in model.named_modules() if name and fnmatch.fnmatchcase(name, pattern)]
        if not found:
            known = ", ".join(name for name, _ in model.named_children())
            raise SettingError(
                "Forward.recompute", "a pattern that some submodule's name matches", pattern, known + "."
            )
        names += found
    outermost = [name for name in dict.fromkeys(names) if not any(name.startswith(f"{other}.") for other in names)]
    for name in outermost:
        for module in model.get_submodule(name).modules():
            if isinstance(module, _NormBase) and module.track_running_stats:
                cure = "Its statistics would take each batch in twice: choose submodules without it."
                raise SettingError("Forward.recompute", "without BatchNorm inside", name, cure)
    return [model.get_submodule(name) for name in outermost]


@contextmanager
def recomputed(modules: Sequence[nn.Module]) -> Generator[None]:
    """While inside, a call of each of `modules` keeps its inputs alone, and is run again by the backward pass."""
    before: list[Any] = [vars(module).get("forward") for module in modules]
    for module in modules:
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            if own is None:
                del module.forward
            else:
                module.forward = own

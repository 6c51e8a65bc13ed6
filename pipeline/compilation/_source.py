"""Python source over named constants, made into functions: what is around a graph runs thousands of times a second."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Source"]

_OFTEN = {"f.state.progress": "progress", "f.state.window": "window", "f.state": "state", "f.batch": "batch"}
"""What is looked up once in a function, and by which name it then goes."""


class Source:
    """The constants that expressions refer to, each under a name of its own."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {"math": math, "torch": torch}

    def name(self, value: Any) -> str:
        """A name for `value`."""
        name = f"k{len(self._names)}"
        self._names[name] = value
        return name

    def constant(self, value: Any) -> str:
        """An expression for `value`: itself where that is short and exact, a name otherwise."""
        is_plain = value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value))
        is_plain = is_plain or (type(value) is str and "f." not in value)  # which is how a frame's paths begin
        return repr(value) if is_plain else self.name(value)

    def function(self, lines: Sequence[str]) -> Callable[..., Any]:
        """The function of a frame `f` with these lines."""
        body = "\n".join(f"    {line}" for line in lines)
        looked_up: list[str] = []
        for path, name in _OFTEN.items():
            if path in body:
                body = body.replace(path, name)
                looked_up.insert(0, f"    {name} = {path}\n")
        found: dict[str, Any] = {}
        exec(f"def made(f):\n{''.join(looked_up)}{body}", self._names, found)
        return found["made"]

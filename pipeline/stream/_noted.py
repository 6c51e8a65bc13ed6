"""What a state is made of, looked at before it is used: a state may come from anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def number(state: Mapping[str, Any], name: str) -> int:
    """The number by that name, 0 or more; TypeError for anything else."""
    value = state[name]
    if type(value) is not int or value < 0:
        raise TypeError(f"{name} must be a whole number, 0 or more, got {value!r}")
    return value


def flag(state: Mapping[str, Any], name: str) -> bool:
    """The truth value by that name; TypeError for anything else."""
    value = state[name]
    if type(value) is not bool:
        raise TypeError(f"{name} must be true or false, got {value!r}")
    return value

"""What the schedules' settings have in common: rates, counts, and schedules inside schedules."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from pipeline.errors import SettingError

__all__ = ["Schedule"]

Schedule = Callable[[int], float]
"""A function of the update count, from 0, that gives a rate."""


def _name(instance: object, attribute: attrs.Attribute[Any]) -> str:
    return f"{type(instance).__name__}.{attribute.name}"


def number(value: Any) -> Any:
    """Any real number as a float; the rest as it came, for the validator to refuse."""
    return float(value) if isinstance(value, numbers.Real) else value


def numbers_of(values: Any) -> Any:
    """Real numbers as a tuple of floats."""
    return tuple(map(number, values)) if isinstance(values, Iterable) else (values,)


def count(value: Any) -> Any:
    """A whole number as an int, 1e5 too; the rest as it came, for the validator to refuse."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    return operator.index(value) if hasattr(value, "__index__") else value


def counts(values: Any) -> Any:
    """Whole numbers as a tuple of ints."""
    return tuple(map(count, values)) if isinstance(values, Iterable) else values


def not_negative(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """A rate."""
    if not isinstance(value, float) or not 0 <= value < math.inf:
        raise SettingError(_name(instance, attribute), "a number, 0 or more and finite", value)


def positive(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """A number above 0."""
    if not isinstance(value, float) or not 0 < value < math.inf:
        raise SettingError(_name(instance, attribute), "a number, positive and finite", value)


def up_to_one(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """A factor that lets nothing grow."""
    if not isinstance(value, float) or not 0 < value <= 1:
        cure = "Any function of the update count is a schedule: write one for a rate that grows so."
        raise SettingError(_name(instance, attribute), "a number above 0 and at most 1", value, cure)


def whole(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """A number of updates, 0 too."""
    if not isinstance(value, int) or value < 0:
        raise SettingError(_name(instance, attribute), "a whole number of updates, 0 or more", value)


def at_least_one(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """A number of updates."""
    if not isinstance(value, int) or value < 1:
        raise SettingError(_name(instance, attribute), "a whole number, 1 or more", value)


def increasing(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Update counts after the first, in order."""
    pairs = zip((0, *value), value, strict=False) if isinstance(value, tuple) else ()
    if not isinstance(value, tuple) or not all(isinstance(b, int) and a < b for a, b in pairs):
        raise SettingError(_name(instance, attribute), "update counts of 1 or more, each larger than the last", value)


def callable_schedule(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """A schedule inside a schedule."""
    if isinstance(value, type) or not callable(value):
        raise SettingError(_name(instance, attribute), "a schedule, or a rate of 0 or more", value)

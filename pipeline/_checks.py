"""Settings checked when an object is built, each rule in one place."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from pipeline.errors import SettingError


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether `value` is one; True and False are none. NaN is."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def whole(setting: str, value: object, least: int | None = 1) -> None:
    """Raise SettingError unless `value` is a whole number, and at least `least` where there is one."""
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        raise SettingError(setting, "a whole number" + ("" if least is None else f", {least} or more"), value)


def not_negative(setting: str, value: object) -> None:
    """Raise SettingError unless `value` is a finite number of at least 0."""
    if not is_number(value) or not 0 <= value < math.inf:
        raise SettingError(setting, "0 or more and finite", value)


def positive(setting: str, value: object) -> None:
    """Raise SettingError unless `value` is a finite number above 0."""
    if not is_number(value) or not 0 < value < math.inf:
        raise SettingError(setting, "positive and finite", value)


def share(setting: str, value: object, *, up_to_one: bool = False) -> None:
    """Raise SettingError unless `value` is a number above 0 and below 1, or, `up_to_one`, 1 itself."""
    if not is_number(value) or not (0 < value < 1 or (up_to_one and value == 1)):
        raise SettingError(setting, f"above 0 and {'at most' if up_to_one else 'below'} 1", value)


def one_of(setting: str, value: object, *choices: str) -> None:
    """Raise SettingError unless `value` is one of the words."""
    if value not in choices:
        raise SettingError(setting, " or ".join(map(repr, choices)), value)


def function(setting: str, value: object) -> None:
    """Raise SettingError unless `value` can be called."""
    if not callable(value):
        raise SettingError(setting, "a function", value)


def text(instance: object, attribute: Any, value: object) -> None:
    """The same for a field, as a validator of attrs: raise SettingError unless `value` is text, and not empty."""
    if not isinstance(value, str) or not value:
        raise SettingError(f"{type(instance).__name__}.{attribute.name}", "text", value)

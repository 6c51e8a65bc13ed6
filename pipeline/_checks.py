"""Settings checked when an object is built, each rule in one place."""

from __future__ import annotations

import math

from pipeline.errors import SettingError


def whole(setting: str, value: object, least: int | None = 1) -> None:
    """Raise SettingError unless `value` is a whole number, and at least `least` where there is one."""
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        raise SettingError(setting, "a whole number" + ("" if least is None else f", {least} or more"), value)


def not_negative(setting: str, value: object) -> None:
    """Raise SettingError unless `value` is a finite number of at least 0."""
    if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise SettingError(setting, "0 or more and finite", value)


def positive(setting: str, value: object) -> None:
    """Raise SettingError unless `value` is a finite number above 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise SettingError(setting, "positive and finite", value)

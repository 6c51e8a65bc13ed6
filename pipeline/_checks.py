"""Settings checked when an object is built, each rule in one place."""

from __future__ import annotations

import math

from pipeline.errors import SettingError


def whole(setting: str, value: object, least: int = 1) -> None:
    """Raise SettingError unless `value` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingError(setting, f"a whole number, {least} or more", value)


def not_negative(setting: str, value: object) -> None:
    """Raise SettingError unless `value` is a finite number of at least 0."""
    if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise SettingError(setting, "0 or more and finite", value)


def positive(setting: str, value: object) -> None:
    """Raise SettingError unless `value` is a finite number above 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise SettingError(setting, "positive and finite", value)

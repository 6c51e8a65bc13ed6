"""Whether what is to watch a run can do so: monitors and sinks, checked before anything begins. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from pipeline.errors import SettingError
from pipeline.monitor import Monitor

S = TypeVar("S")


def checked(setting: str, monitor: Monitor) -> Monitor:
    """`monitor` itself; SettingError where it is none."""
    if isinstance(monitor, type) or not isinstance(monitor, Monitor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SettingError(setting, "a monitor, such as `monitors.MeanLoss()`", monitor)
    if not isinstance(monitor.name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SettingError(f"The name of {monitor!r}", "text", monitor.name)
    return monitor


def checked_sinks(sinks: Iterable[S]) -> tuple[S, ...]:
    """`sinks` themselves; SettingError where one is none."""
    given = tuple(sinks)
    for sink in given:
        if isinstance(sink, type) or not (hasattr(sink, "write") and hasattr(sink, "close")):
            raise SettingError("Each of `sinks`", "a sink, such as `sinks.Console()`", sink)
    return given

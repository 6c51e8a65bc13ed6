"""How a monitor prints: as it was written, what has its default left out."""

from __future__ import annotations

from typing import Any

import attrs

from pipeline._declared import show


class Written:
    """The base of the monitors here, for `repr` alone."""

    __slots__ = ()

    def __repr__(self) -> str:
        shown: list[str] = []
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if field.default is attrs.NOTHING:
                shown.append(show(value))
            elif field.init and value != _default(field, self):
                shown.append(f"{field.name}={show(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"


def _default(field: attrs.Attribute[Any], monitor: object) -> Any:
    default: Any = field.default
    return default.factory(monitor) if hasattr(default, "factory") else default

"""Records made at once: the constructor of a frozen class, without what being frozen costs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import attrs

P = ParamSpec("P")
R = TypeVar("R")


class Record:
    """A record of which one is made in every micro-batch."""

    __slots__ = ("__weakref__",)  # here, so that a class and its twin have the same layout


def positional(cls: Callable[P, R]) -> Callable[P, R]:
    """The constructor of a frozen attrs class whose fields are all given by position, none of them checked.

    A frozen class writes each field through a call, since its own `__setattr__` refuses: 0.95 µs for nine fields. A
    twin that is not frozen writes them as any class does, and is then turned into the class: 0.4 µs.
    """
    names = [field.name for field in attrs.fields(cls)]  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    twin: Any = attrs.make_class(cls.__name__, names, bases=(Record,), slots=True, weakref_slot=False, eq=False)

    def make(*values: Any) -> Any:
        record = twin(*values)
        record.__class__ = cls
        return record

    return cast("Callable[P, R]", make)

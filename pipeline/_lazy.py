"""Names that a package hands out when they are asked for, so that importing it imports nothing else."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any


def handing_out(
    package: str, homes: Mapping[str, Collection[str]], modules: Collection[str] = ()
) -> Callable[[str], Any]:
    """The `__getattr__` of a package: names by the module that is their home, and modules of its own."""
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name in home_of:
            return getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get

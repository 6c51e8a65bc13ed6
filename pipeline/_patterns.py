"""Patterns on the names of parameters and modules, as in `fnmatch`."""

from __future__ import annotations

import fnmatch
from functools import lru_cache

from pipeline.errors import SettingError


def as_patterns(setting: str, given: object, *, of: str = "parameter") -> tuple[str, ...]:
    """One pattern, or a list or tuple of several, as a tuple; SettingError for anything else."""
    several = (given,) if isinstance(given, str) else given
    if not isinstance(several, (tuple, list)) or not all(isinstance(pattern, str) for pattern in several):
        raise SettingError(setting, f"a pattern on {of} names, or several", given)
    return tuple(several)


@lru_cache
def places(patterns: tuple[str, ...], names: tuple[str, ...]) -> tuple[int, ...]:
    """For each name the number of the first pattern that it matches, `len(patterns)` for none."""
    return tuple(
        next((i for i, pattern in enumerate(patterns) if fnmatch.fnmatchcase(name, pattern)), len(patterns))
        for name in names
    )

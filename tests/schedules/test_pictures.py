"""The pictures in the docs are those that the script draws, and the guide shows one of each schedule."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from pipeline import schedules

DOCS = Path(__file__).parents[2] / "docs"
NUMBER = re.compile(r"-?\d+\.\d+|-?\d+")


def test_they_are_what_the_script_draws() -> None:
    drawn = runpy.run_path(str(DOCS / "pictures/schedules.py"))["pictures"]()
    assert {path.name for path in DOCS.glob("pictures/*.svg")} == drawn.keys(), "run docs/pictures/schedules.py"
    for name, content in drawn.items():
        kept = (DOCS / "pictures" / name).read_text(encoding="utf-8")
        assert NUMBER.sub("#", kept) == NUMBER.sub("#", content), f"{name}: run docs/pictures/schedules.py"
        # A cosine may round differently elsewhere: a tenth of a pixel is nothing.
        numbers = [[float(n) for n in NUMBER.findall(text)] for text in (kept, content)]
        assert numbers[0] == pytest.approx(numbers[1], abs=0.11), name


def test_the_guide_shows_one_of_each_schedule() -> None:
    guide = (DOCS / "guides/schedules.md").read_text(encoding="utf-8")
    written = {name for name in schedules.__all__ if name.islower()} - {"points"}
    assert {name for name in (*written, "plateau") if f"(../pictures/{name}.svg)" not in guide} == set()

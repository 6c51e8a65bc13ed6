"""The page of benchmarks says what the benchmarks are now, and what each printed."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
BENCHES = sorted((ROOT / "tests" / "benchmarks").glob("bench_*.py"))


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.stem)
def test_each_has_its_section_with_its_own_words_and_what_it_printed(bench: Path) -> None:
    name, said = bench.stem.removeprefix("bench_"), ast.get_docstring(ast.parse(bench.read_text()))
    assert said
    assert re.search(rf"^## {name}\n\n{re.escape(said)}\n\n```text\n.+?\n```$", PAGE, re.MULTILINE | re.DOTALL)


def test_nothing_else_has_one() -> None:
    assert re.findall(r"^## (\w+)$", PAGE, re.MULTILINE) == [bench.stem.removeprefix("bench_") for bench in BENCHES]

"""Every Python fence in the README and in `docs/` runs, in order, in one namespace a file.

Warnings are errors in there too: pytest's `filterwarnings` in `pyproject.toml` holds for what a test executes.
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [page for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))] if page.exists()]

# An opening or closing line of a fence: indent, marks, info string.
FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*(.*?)\s*$")
# Info strings that ask for Python without being the one spelling that this test runs.
LOOKS_LIKE_PYTHON = re.compile(r"(?i)\{?\.?(py|python|python3|pycon)\b")


def fences(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the number of the first line inside, the info string and the body of each fence."""
    opened: tuple[int, str, str] | None = None
    body: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        match = FENCE.match(line)
        if opened is None:
            if match:
                opened, body = (number + 1, match[2], match[3]), []
        elif match and match[2].startswith(opened[1]) and not match[3]:
            yield opened[0], opened[2], textwrap.dedent("\n".join(body))
            opened = None
        else:
            body.append(line)
    if opened is not None:
        raise ValueError(f"the fence above line {opened[0]} is never closed")


def run_page(page: Path, module: ModuleType) -> None:
    for line, info, body in fences(page.read_text(encoding="utf-8")):
        if info == "python":
            # Blank lines in front, so that a traceback names the line of the page.
            code = compile("\n" * (line - 1) + body, str(page), "exec", dont_inherit=True)
            exec(code, module.__dict__)
        elif LOOKS_LIKE_PYTHON.match(info):
            raise ValueError(f"{page}:{line - 1}: a Python fence opens with ```python and nothing more, got {info!r}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_fence_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("page")
    # Registered, so that what the page defines can be found by name: pickle and dataclasses ask for that.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    run_page(page, module)


def test_a_failing_fence_names_its_page_and_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n- in a list:\n\n  ```python\n  a = 1\n  ```\n\n```python\nassert a == 1\nassert a == 2\n```"
    )
    with pytest.raises(AssertionError) as failure:
        run_page(page, ModuleType("page"))
    last = failure.traceback[-1]
    assert (str(last.path), last.lineno + 1) == (str(page), 11)


@pytest.mark.parametrize("info", ["python no-run", "python3", "py", 'python title="a.py"'])
def test_no_python_fence_escapes(info: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"text\n```{info}\nraise RuntimeError\n```\n")
    with pytest.raises(ValueError, match=r"page\.md:2: a Python fence opens with"):
        run_page(page, ModuleType("page"))


def test_a_warning_in_a_fence_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nimport warnings\nwarnings.warn('old', DeprecationWarning)\n```\n")
    with pytest.raises(DeprecationWarning, match="old"):
        run_page(page, ModuleType("page"))

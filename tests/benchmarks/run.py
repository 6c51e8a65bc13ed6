"""Run the benchmarks one after another, each in a process of its own, and write what they print to docs/benchmarks.md.

`--only step,import` runs those alone; `--trainers` runs the comparison with other trainers too, for which the extra
`trainers` has to be there. What the page says of those that were not run stays.
"""

from __future__ import annotations

import argparse
import ast
import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

What `make bench` printed, each part when it was last run, written by the same command. Each is a ratio of things that
ran in turn in one process, unless it says otherwise: the machine is in both, and its noise in the spread. A *bar* is
what the project holds itself to.

{machine}
"""


def machine() -> str:
    """What the numbers were measured on."""
    cpu = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", cpu.read_text()) if cpu.exists() else []
    name = names[0] if names else platform.processor() or platform.machine()
    return (
        f"{name}, {os.cpu_count()} cores, one thread each; {platform.system()}, Python {platform.python_version()}, "
        f"torch {version('torch').partition('+')[0]}; {time.strftime('%d %B %Y').lstrip('0')}."
    )


def measured(bench: Path) -> str:
    """Everything that a benchmark prints, shown as it comes."""
    print(f"== {bench.stem}", flush=True)
    lines: list[str] = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    with subprocess.Popen([sys.executable, "-u", bench], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        sys.exit(f"{bench.stem} failed with {process.returncode}: the page stays as it was")
    return "".join(lines)


def section(bench: Path, printed: str) -> str:
    """What the benchmark says of itself, and what it printed."""
    said = (ast.get_docstring(ast.parse(bench.read_text())) or "").strip()
    return f"## {bench.stem.removeprefix('bench_')}\n\n{said}\n\n```text\n{printed.rstrip()}\n```\n"


def kept(name: str) -> str | None:
    """The section of this name on the page as it is."""
    if not PAGE.exists():
        return None
    found = re.search(rf"^## {name}\n.*?(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return found[0].rstrip() + "\n" if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--trainers", action="store_true", help="compare with other trainers too")
    given = parser.parse_args()
    benches = {path.stem.removeprefix("bench_"): path for path in sorted(HERE.glob("bench_*.py"))}
    only = [name for name in given.only.split(",") if name]
    for name in only:
        if name not in benches:
            parser.error(f"no benchmark is called {name!r}: there are {', '.join(benches)}")
    sections: list[str] = []
    for name, bench in benches.items():
        if (only and name not in only) or (name == "trainers" and not (given.trainers or only)):
            sections += [old for old in (kept(name),) if old]
        else:
            sections.append(section(bench, measured(bench)))
    PAGE.write_text("\n".join([HEAD.format(machine=machine()), *sections]))
    print(f"written: {PAGE.relative_to(HERE.parents[1])}")


if __name__ == "__main__":
    main()

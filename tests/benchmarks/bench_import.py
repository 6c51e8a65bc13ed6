"""What it costs to import the monitors and the events where nothing else of the library is needed, and no torch.

Each in a fresh interpreter, which times itself: wall time and processor time, the least of the rounds, so that what
else the machine does is left out. A good part of them is attrs', which is shown apart.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

CODE = """
import sys, time
wall, processor = time.perf_counter(), time.process_time()
import {modules}
print(time.perf_counter() - wall, time.process_time() - processor, "torch" in sys.modules)
"""


def measured(modules: str, rounds: int) -> tuple[float, float, bool]:
    """Milliseconds of wall and of processor time, and whether torch was imported."""
    walls, processors, torch = list[float](), list[float](), False
    for _ in range(rounds):
        command = [sys.executable, "-c", CODE.format(modules=modules)]
        wall, processor, loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        walls.append(1e3 * float(wall))
        processors.append(1e3 * float(processor))
        torch = torch or loaded == "True"
    return min(walls), min(processors), torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    for modules in ("attrs", "pipeline.events", "pipeline.monitors, pipeline.events"):
        wall, processor, torch = measured(modules, rounds)
        print(f"import {modules:<36} {wall:6.1f} ms  ({processor:.1f} ms of processor)  torch: {torch}")


if __name__ == "__main__":
    main()

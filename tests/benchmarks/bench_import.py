"""What importing costs: the monitors and the events where no torch is needed (bar: 100 ms), and the rest behind torch.

Each in a fresh interpreter, which times itself: wall time and processor time, the least of the rounds, so that what
else the machine does is left out. A good part of the first is attrs', which is shown apart. Names are handed out as
they are asked for: `import pipeline` (bar: 100 ms beyond torch) imports nothing yet, and `fold` brings almost all.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

CODE = """
import sys, time
{before}
wall, processor = time.perf_counter(), time.process_time()
{importing}
print(time.perf_counter() - wall, time.process_time() - processor, "torch" in sys.modules)
"""


def measured(importing: str, before: str, rounds: int) -> tuple[float, float, bool]:
    """Milliseconds of wall and of processor time, and whether torch was imported."""
    walls, processors, torch = list[float](), list[float](), False
    for _ in range(rounds):
        command = [sys.executable, "-c", CODE.format(importing=importing, before=before)]
        wall, processor, loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        walls.append(1e3 * float(wall))
        processors.append(1e3 * float(processor))
        torch = torch or loaded == "True"
    return min(walls), min(processors), torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    for importing, before in (
        ("import attrs", ""),
        ("import pipeline.events", ""),
        ("import pipeline.monitors, pipeline.events", ""),
        ("from pipeline.monitors import *", ""),
        ("import pipeline", "import torch"),
        ("from pipeline import fold", "import torch"),
    ):
        wall, processor, torch = measured(importing, before, rounds)
        behind = "  behind torch" if before else f"  torch: {torch}"
        print(f"{importing:<42} {wall:6.1f} ms  ({processor:.1f} ms of processor){behind}")


if __name__ == "__main__":
    main()

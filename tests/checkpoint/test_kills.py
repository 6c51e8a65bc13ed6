"""A run that is killed 200 times, at random moments, is as if it had not been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.checkpoint.kills import KEPT, KILLS, UPDATES


def test_killed_200_times_the_run_ends_as_if_it_had_not_been_and_loses_no_checkpoint(tmp_path: Path) -> None:
    # In an interpreter of its own, which has no threads yet and so may fork.
    command = [sys.executable, "-W", "error", "-m", "tests.checkpoint.kills", str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=env, cwd=Path(__file__).parents[2])
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["ended"] == [0, 0]
    assert seen["kills"] == KILLS
    assert seen["in a save"] > KILLS / 20
    assert seen["lost"] == 0
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert json.loads((whole / "results.json").read_text())["by"] == [f"Updates({UPDATES})"]
    for name in ("results.json", "events.jsonl"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    assert sorted(path.name for path in killed.iterdir()) == ["checkpoints", "events.jsonl", "results.json"]
    names = sorted(path.name for path in (killed / "checkpoints").iterdir())
    assert names == [".lock", f"{2 * UPDATES - 2:010d}", f"{2 * UPDATES:010d}"]
    assert len(names) == KEPT + 1

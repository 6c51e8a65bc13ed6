"""What the command line tells of checkpoints."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch

from pipeline import Tensors
from pipeline.__main__ import main
from pipeline.checkpoint import CheckpointStore
from pipeline.monitors import MeanLoss, SaveBest, SaveEvery
from tests.checkpoint.cases import at, training


@pytest.fixture
def run(tmp_path: Path) -> Path:
    training(tmp_path / "a", updates=6, monitors=[SaveBest("val_loss"), SaveEvery(updates=2), MeanLoss()])
    return tmp_path / "a"


def told(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[str]:
    main(["checkpoints", *map(str, arguments)])
    return capsys.readouterr().out.splitlines()


def test_a_run_is_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, blank, head, *rows = told(capsys, run)
    assert re.fullmatch(re.escape(f"{run}/checkpoints") + r": 3 checkpoints, \d+(\.\d+)? kB", first)
    assert not blank
    assert head.split() == ["name", "update", "micro-step", "epoch", "saved", "size", "val_loss", "why"]
    found = CheckpointStore(run).list()
    counts = [[saved.path.name, saved.update, saved.micro_step, saved.epoch] for saved in found]
    assert [row.split()[:4] for row in rows] == [[str(count) for count in line] for line in counts]
    assert rows[-1].endswith("every 2 updates")
    assert "best val_loss: " in "".join(rows)
    assert len({row.index("1970-01-01") for row in rows}) == 1  # columns stand below one another
    assert told(capsys, run / "checkpoints") == [first, blank, head, *rows]


@pytest.mark.parametrize("time", [1e30, -1e30, math.inf, math.nan])
def test_a_time_of_no_year_is_told_in_seconds(time: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = CheckpointStore(tmp_path).save(at(1, time=time))
    assert f"  {time:g} s  " in told(capsys, tmp_path)[-1]
    assert told(capsys, path)[1].startswith(f"saved {time:g} s")


def test_an_empty_store_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert told(capsys, tmp_path) == [f"{tmp_path}/checkpoints: 0 checkpoints, 0 B"]


def test_verified_the_damaged_ones_are_told_and_the_status_is_not_0(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, last = told(capsys, run, "--verify")
    assert "  whole  " in last
    store = CheckpointStore(run)
    os.truncate(store.folders()[-1] / "tensors-00000.safetensors", 10)
    (store.folders()[0] / "manifest.json").unlink()
    with pytest.raises(SystemExit) as ended:
        main(["checkpoints", str(run), "--verify"])
    out, err = capsys.readouterr()
    assert ended.value.code == 1
    assert err == f"error: 2 of {len(store.folders())} checkpoints cannot be read\n"
    assert "tensors-00000.safetensors has 10 bytes instead of" in out
    assert "manifest.json cannot be read" in out


def test_what_is_in_a_checkpoint_is_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "checkpoints" / "0000000012"
    lines = told(capsys, path)
    assert lines[0] == f"{path}: update 6, micro-step 12, epoch 2"
    assert lines[1].startswith("saved 1970-01-01")
    assert "monitors  SaveBest, SaveEvery, MeanLoss" in lines
    assert "state/progress/updates = 6" in lines
    assert 'place/until = "Updates(6)"' in lines
    assert "params: 6 tensors, 63 elements, 252 B" in lines
    assert re.search(r"^  4\.weight/exp_avg_sq  float32 3×6$", "\n".join(lines), re.MULTILINE)


def test_two_checkpoints_are_compared(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = run / "checkpoints" / "0000000012", run.parent / "b" / "checkpoints" / "0000000012"
    training(run.parent / "b", updates=6, seed=1, monitors=[SaveBest("val_loss"), SaveEvery(updates=2), MeanLoss()])
    lines = told(capsys, one, "--against", other)
    assert "state/rng/seed: 0 → 1" in lines
    assert not any(line.startswith("state/progress") for line in lines)
    assert any(re.fullmatch(r"  params/0\.weight +by [\d.e-]+ at most, of [\d.e-]+", line) for line in lines)
    same = told(capsys, one, "--against", one)
    assert same == [str(one), str(one), "", "", "33 tensors equal, 0 not"]


def test_what_only_one_has_or_has_in_another_form_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = at(1), at(1)
    tensors = {"w": torch.ones(2, 2), "new": torch.tensor([True, False])}
    other = attrs.evolve(other, state=attrs.evolve(other.state, params=Tensors(tensors), slots={"count": 3}))
    paths = [CheckpointStore(tmp_path / name).save(c) for name, c in (("a", one), ("b", other))]
    lines = told(capsys, paths[0], "--against", paths[1])
    assert "state/slots/count: not there → 3" in lines
    assert "  params/w    float32 3 → float32 2×2" in lines
    assert "  params/new  only in the second" in lines


def test_names_from_a_file_do_nothing_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = at(1)
    given = attrs.evolve(given, state=attrs.evolve(given.state, params=Tensors({"\x1b[2J": torch.ones(1)})))
    lines = told(capsys, CheckpointStore(tmp_path).save(given))
    assert r"  \x1b[2J  float32 1" in lines


def test_what_is_no_checkpoint_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["checkpoints", str(tmp_path / "nowhere")])
    assert "there is no checkpoint" in capsys.readouterr().err


def test_the_other_commands_wait_for_no_torch() -> None:
    code = "import sys, pipeline.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

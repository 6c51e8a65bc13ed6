"""The examples do what they say."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from examples import digits, resume


def log_of(folder: Path) -> list[dict[str, Any]]:
    """The run's events, without the clock."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in event.items() if name not in ("time", "waited")} for event in events]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    with np.load(folder / "weights.npz", allow_pickle=False) as arrays:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def without_clock(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in summary.items() if name != "Throughput"}


def test_digits_learns_to_read_and_leaves_a_run_that_can_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "digits"
    summary = digits.main(folder)
    assert summary["test_accuracy"] >= 0.97
    assert f"held-out accuracy {summary['test_accuracy']:.4f}" in capsys.readouterr().out.splitlines()[-1]

    assert sorted(path.name for path in folder.iterdir()) == ["events.jsonl", "summary.json", "weights.npz"]
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(summary))
    names = [event["event"] for event in log_of(folder)]
    assert (names[0], names[-1]) == ("RunStarted", "RunEnded")
    assert names.count("UpdateDone") == summary["updates"]

    _, _, test = digits.load_splits()
    images, targets = test[:]
    model = digits.convnet().eval()
    model.load_state_dict(weights_of(folder))
    with torch.no_grad():
        assert digits.accuracy(model(images), targets).item() == pytest.approx(summary["test_accuracy"], abs=1e-6)


def test_digits_keeps_its_three_sets_apart() -> None:
    splits = digits.load_splits()
    assert [len(split) for split in splits] == [1257, 180, 360]
    rows = [{image.numpy().tobytes() for image in split[:][0]} for split in splits]
    assert all(one.isdisjoint(other) for one, other in combinations(rows, 2))
    assert all(set(split[:][1].tolist()) == set(range(10)) for split in splits)


def test_digits_repeats_itself_to_the_bit_and_another_seed_does_not(tmp_path: Path) -> None:
    torch.rand(7)  # whatever was drawn before
    summaries = [digits.main(tmp_path / name, seed=seed, epochs=3) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    a, b, c = (weights_of(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert log_of(tmp_path / "a") == log_of(tmp_path / "b") != log_of(tmp_path / "c")
    assert without_clock(summaries[0]) == without_clock(summaries[1]) != without_clock(summaries[2])
    assert not torch.equal(a["0.weight"], c["0.weight"])


def test_digits_replaces_an_earlier_run_in_its_folder(tmp_path: Path) -> None:
    digits.main(tmp_path, epochs=3)
    digits.main(tmp_path, epochs=3)
    assert [event["event"] for event in log_of(tmp_path)].count("RunStarted") == 1


def test_resume_started_three_times_is_one_run_and_leaves_weights_that_can_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = resume.main(tmp_path / "straight")
    for until in (130, 170, resume.UPDATES):
        run = resume.main(tmp_path / "a", until)
    assert all(torch.equal(run.state.params[name], param) for name, param in straight.state.params.items())
    logs = [[event for event in log_of(tmp_path / name) if "until" not in event] for name in ("straight", "a")]
    saved_at_a_stop = [event for event in logs[1] if event not in logs[0]]
    assert {tuple(event["reasons"]) for event in saved_at_a_stop} == {("Updates(130)",), ("Updates(170)",)}
    assert [event for event in logs[1] if event not in saved_at_a_stop] == logs[0]

    share = float(re.findall(r"best: ([\d.]+)%", capsys.readouterr().out)[-1])
    assert share > 95
    model = resume.network().eval()
    safetensors.torch.load_model(model, tmp_path / "a" / "model.safetensors")
    points, which = zip(*resume.spirals(500, seed=2), strict=True)
    right = (model(torch.stack(points)).argmax(1) == torch.stack(which)).float().mean()
    assert float(right) == pytest.approx(share / 100, abs=1e-3)

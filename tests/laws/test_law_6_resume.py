"""Law 6: stopped after any micro-batch, loaded in another process and gone on with, a run is as if it had not stopped.

To the bit: parameters, buffers, optimizer, loss scale, averages, counters, results and the event log. One process makes
the whole run and one stopped at every micro-batch; another, with another hash seed, goes on from each.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import (
    Accumulate,
    AverageWeights,
    ClipByGlobalNorm,
    EmitEvents,
    Epochs,
    Evaluation,
    EveryUpdates,
    Forward,
    LossScale,
    MaybeStep,
    Optimizer,
    Run,
    ScaledBackward,
    SkipSpikes,
    TrainState,
    chain,
    fold,
    init,
    monitors,
    schedules,
    sinks,
    stream,
    supervised,
    tap,
)
from pipeline.checkpoint import Checkpoint, CheckpointStore
from pipeline.errors import LawError
from pipeline.records import OptimizerState, Window

BATCHES, EPOCHS, WINDOW = 11, 3, 4
MICRO_STEPS = BATCHES * EPOCHS


class Augmented(nn.Module):
    """BatchNorm, dropout and noise on the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + 0.1 * torch.randn_like(x) if self.training else x)


class Items(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Items, one of which is not finite."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(4 * BATCHES, 4, generator=generator)
        self.x[5] = math.inf  # the windows that it is in are skipped
        self.y = torch.randint(0, 3, (4 * BATCHES,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


def run(folder: Path, *, stop_at: int | None = None, seed: int = 1) -> Run:
    """The run, from its beginning or from its newest checkpoint; interrupted after micro-batch `stop_at`."""
    torch.manual_seed(3)
    model = Augmented()
    loss = supervised(F.cross_entropy)

    def stop(frame: Any) -> None:
        if frame.loss is not None and frame.state.progress.micro_steps == stop_at:
            signal.raise_signal(signal.SIGTERM)

    forward = Forward(model, loss)
    step = chain(
        forward,
        ScaledBackward(),
        Accumulate(WINDOW, at_end="carry"),
        SkipSpikes(over=4, least=2, multiple=100.0),
        ClipByGlobalNorm(0.5),
        MaybeStep(Optimizer(torch.optim.AdamW, lr=schedules.warmup_cosine(0.05, 2, 9), weight_decay=0.1)),
        AverageWeights(decay=0.9),
        EmitEvents(micro_batches=True),
        tap(stop),
    )
    items = Items()
    if folder.parent.name.startswith("twice"):  # a stream that knows its place; the other is read up to it
        batches = stream.batches(items, 4, shuffle=True, seed=5, ahead=3)
    else:
        batches = torch.utils.data.DataLoader(items, batch_size=4, shuffle=True)
    return fold(
        step,
        init(step, model, seed=seed, loss_scale=LossScale(scale=2.0**15, interval=2)),
        batches,
        until=Epochs(EPOCHS),
        evaluations=[
            Evaluation(forward, [(items.x[:4], items.y[:4])], when=EveryUpdates(1)),
            Evaluation(forward, [(items.x[:4], items.y[:4])], name="mean", average="average"),
        ],
        monitors=[
            monitors.MeanLoss(),
            monitors.GradNorm(),
            monitors.EarlyStopping("val_loss", patience=50),
            monitors.Plateau("val_loss", factor=0.5, patience=0),
            monitors.SaveEvery(updates=3),
        ],
        sinks=[sinks.EventLog(folder)],
        store=folder,
        resume="latest",
        publish_every=2,
        clock=lambda: 0.0,
    )


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def note(folder: Path, done: Run) -> None:
    """What can be compared from another process: the last checkpoint holds the state, the rest is in a file."""
    end = Checkpoint(done.state).taken_apart()
    bits = {name: tensor.detach().flatten().view(torch.uint8).tolist() for name, tensor in end.tensors.items()}
    noted = {"state": end.state["state"], "bits": bits, "results": repr(done.results), "by": done.stopped_by}
    (folder / "results.json").write_text(json.dumps(noted))


def main(root: Path, action: str) -> None:
    """What the two processes do."""
    torch.set_num_threads(1)
    if action == "stop":
        note(root / "whole", run(root / "whole"))
        for k in range(1, MICRO_STEPS + 1):
            run(root / f"{k}", stop_at=k)
    for k in range(1, MICRO_STEPS + 1):
        folder = root / f"{k}"
        if action == "twice" and k + 2 <= MICRO_STEPS:
            run(folder, stop_at=k + 2, seed=99)  # the checkpoint's seed counts
        elif action == "go on":
            note(folder, run(folder, seed=98))


def elsewhere(root: Path, action: str) -> None:
    code = "import sys, pathlib, tests.laws.test_law_6_resume as t; t.main(pathlib.Path(sys.argv[1]), sys.argv[2])"
    env = {**os.environ, "PYTHONHASHSEED": str(len(action)), "PYTHONPATH": "."}
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(root), action], check=True, env=env)


@pytest.fixture(scope="module", params=["once", "twice"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    elsewhere(root, "stop")
    if request.param == "twice":
        elsewhere(root, "twice")
    elsewhere(root, "go on")
    return root


def test_the_run_has_in_it_what_the_law_is_about(root: Path) -> None:
    whole = results(root / "whole")
    log = (root / "whole" / "events.jsonl").read_text()
    for kind in ("UpdateSkipped", "LossScaleChanged", "EvalDone", "CheckpointSaved", "EpochEnded"):
        assert f'"{kind}"' in log, kind
    assert whole["state"]["items"]["rate_factor"] < 1.0  # the plateau has cut
    assert whole["by"] == [f"Epochs({EPOCHS})"]


@pytest.mark.parametrize("k", range(1, MICRO_STEPS + 1))
def test_stopped_at_any_micro_batch_the_end_is_the_same_to_the_bit(root: Path, k: int) -> None:
    whole, resumed = results(root / "whole"), results(root / f"{k}")
    assert resumed == whole
    assert (root / f"{k}" / "events.jsonl").read_bytes() == (root / "whole" / "events.jsonl").read_bytes()


LEFT_OUT: dict[str, Any] = {
    "params": lambda s: attrs.evolve(s, params=s.params.map(torch.zeros_like)),
    "buffers": lambda s: attrs.evolve(s, buffers=s.buffers.map(torch.zeros_like)),
    "optimizer": lambda s: attrs.evolve(s, optimizer=OptimizerState()),
    "window": lambda s: attrs.evolve(s, window=Window()),
    "loss scale": lambda s: attrs.evolve(s, loss_scale=LossScale(scale=1.0, interval=2)),
    "progress": lambda s: attrs.evolve(s, progress=attrs.evolve(s.progress, updates=0)),
    "seed": lambda s: attrs.evolve(s, rng=attrs.evolve(s.rng, seed=77)),
    "slots": lambda s: attrs.evolve(s, slots={**s.slots, "average": s.slots["average"].map(torch.zeros_like)}),
}
OF_THE_RUN = ("place", "stream", "accumulators", "told", "pending", "is_told_of")
NOT_LEFT_OUT = {
    "rate_factor": "what the monitors had gathered asks for it again",
    "under_way": "0 where nothing is on an accelerator",
    "reasons": "only told of, and an interruption is not",
    "time": "0 by the clock that is given",
    "measures": "of no use to a run without a SaveBest",
    "run": "which checkpoints are deleted hangs on it, and no number",
}


def test_no_part_of_a_checkpoint_is_forgotten_in_the_control() -> None:
    of_state = {"loss scale": "loss_scale", "seed": "rng"}
    left_out = {of_state.get(part, part) for part in (*LEFT_OUT, *OF_THE_RUN)}
    there = {field.name for cls in (TrainState, Checkpoint) for field in attrs.fields(cls)} - {"state"}
    assert left_out | NOT_LEFT_OUT.keys() == there


@pytest.mark.parametrize("part", [*LEFT_OUT, *OF_THE_RUN])
def test_a_control_that_leaves_out_one_part_of_the_state_parts_from_it(part: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    note(whole, run(whole))
    stopped = tmp_path / "stopped"
    run(stopped, stop_at=18)
    store = CheckpointStore(stopped)
    path, found = store.find()
    if part in LEFT_OUT:
        found = attrs.evolve(found, state=LEFT_OUT[part](found.state))
    else:
        empty = Checkpoint(found.state)
        found = attrs.evolve(found, **{part: getattr(empty, part)})
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    store.save(found)
    try:
        note(stopped, run(stopped))
    except LawError:
        raise
    except Exception:
        return  # it could not even go on
    same_log = (stopped / "events.jsonl").read_bytes() == (whole / "events.jsonl").read_bytes()
    assert results(stopped) != results(whole) or not same_log

"""Checkpoints of earlier versions are read: one of each format lies here as it was written, and stays as it is.

A change to what is written is a new format: raise FORMAT, let `read` know both, and put a folder of the new one beside
the old, `CheckpointStore(…).save(of_format_1())` with what has changed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from pipeline import LossScale, Progress, Tensors, TrainState, Window
from pipeline.checkpoint import Checkpoint, load_checkpoint
from pipeline.checkpoint._folder import verify
from pipeline.checkpoint._manifest import FORMAT, STATE
from pipeline.events import BatchSkipped, EvalDone
from pipeline.place import Place
from pipeline.records import OptimizerState, Part, Rng
from pipeline.testing import assert_records_equal

FOLDER = Path(__file__).parent / "format-1"


def of_format_1() -> Checkpoint:
    """What lies in `format-1`: something of every kind."""
    weight, bias = torch.tensor([[1.0, -2.0], [0.5, 4.0]]), torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    entries = {"w/exp_avg": weight / 2, "w/step": torch.tensor(7.0), "b/exp_avg": bias / 4, "b/step": torch.tensor(7.0)}
    optimizer = OptimizerState(Tensors(entries), {"w/count": 3, "group default/k": 0.25})
    window = Window(
        grads=Tensors({"w": weight * 3}),
        weight=4.0,
        reference=2.0,
        loss=torch.tensor(1.25),
        measures={"accuracy": (torch.tensor(3.0), 4.0)},
        micro_batches=2,
        probes=(torch.tensor(0.5), 0.75),
        buffers=Tensors({"mean": torch.zeros(2)}),
    )
    slots = {
        "average": Tensors({"w": weight * 2, "b": bias.float()}),
        "generator": Part(optimizer, window, LossScale(scale=2.0), 5, 1, 0),
        "controller": {
            "numbers": (1, -2.5, math.nan, -math.inf, True, None, 1 << 80),
            "text": ["a", "ü", b"\x00\xff"],
            "complex": torch.tensor([1 + 2j]),
            "sparse": torch.sparse_coo_tensor(
                torch.tensor([[1, 1]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True
            ),
            "is": {"is": "tensor"},
        },
    }
    state = TrainState(
        params=Tensors({"w": weight.requires_grad_(), "b": bias}),
        buffers=Tensors({"mean": torch.ones(2), "count": torch.tensor(9)}),
        optimizer=optimizer,
        window=window,
        loss_scale=LossScale(scale=1024.0, interval=100, finite_windows=3),
        progress=Progress(30, 7, 1, 2, 240, 960, 1),
        rng=Rng(seed=11, rank=1),
        slots=slots,
        rate_factor=0.5,
    )
    at = {"micro_step": 29, "update": 7, "epoch": 2, "time": 99.5}
    return Checkpoint(
        state,
        place=Place(True, 10, 9, Progress(20, 5, 0, 2, 160, 640, 0), 0.125, 100.0, "Updates(20)", 1.0),
        stream={"version": 1, "read": 10, "state": {"order": [2, 0, 1]}},
        accumulators={"MeanLoss": (12.5, 28.0), "EarlyStopping": (0.5, 7, 1), "Skips": None},
        told=41,
        pending=(
            BatchSkipped(**at),
            EvalDone(**at, name="val", values={"val_loss": math.inf}, weight=8.0, batches=2),
        ),
        under_way=1,
        is_told_of=False,
        reasons=("every 7 updates",),
        time=100.25,
        measures={"val_loss": math.inf, "val_accuracy": 0.75},
        run="0123456789abcdef",
    )


def test_a_checkpoint_of_format_1_is_read_as_it_was_meant() -> None:
    assert_records_equal(load_checkpoint(FOLDER), of_format_1())
    assert verify(FOLDER).head.versions["foldtrain"] == "0.1.0"


def test_what_is_written_now_is_of_that_format_to_the_letter() -> None:
    assert FORMAT == 1
    written = of_format_1().taken_apart()
    assert json.dumps(written.state) == (FOLDER / STATE).read_text(encoding="utf-8")

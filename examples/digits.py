"""Train a small convolutional network to read handwritten digits, through a composed step.

The data are the 1,797 images of 8 × 8 pixels that scikit-learn ships. `make train` runs this; a run's folder gets
`events.jsonl`, `weights.npz` and `summary.json`; a further run there replaces them, but for the log, which moves aside.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pipeline import Evaluation, Frame, Optimizer, Updates, chain, fold, init, monitors, schedules, sinks
from pipeline.transforms import Accumulate, ClipByGlobalNorm, EmitEvents, Forward, MaybeStep, ScaledBackward, supervised


def load_splits() -> list[TensorDataset]:
    """1,257 images to train on, 180 to decide by, 360 to test with: the same for every seed, all digits in each."""
    images, labels = load_digits(return_X_y=True)
    rest, test = train_test_split(np.arange(len(labels)), test_size=360, stratify=labels, random_state=0)
    train, validation = train_test_split(rest, test_size=180, stratify=labels[rest], random_state=0)
    inputs = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    targets = torch.tensor(labels)
    return [TensorDataset(inputs[part], targets[part]) for part in (train, validation, test)]


def convnet() -> nn.Module:
    """Two convolutions and a linear layer: 29,000 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(64 * 4 * 4, 10)),
    )


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """The share of samples whose largest logit is the right one."""
    return (logits.argmax(dim=1) == targets).float().mean()


def shift_images(frame: Frame) -> Frame:
    """A transform of our own: move a micro-batch's images by up to a pixel, so that no two epochs are alike."""
    images, targets = frame.batch
    down, right = torch.randint(3, (2,)).tolist()
    moved = F.pad(images, (1, 1, 1, 1))[..., down : down + 8, right : right + 8]
    return frame.having(batch=(moved, targets))


def main(folder: str | Path = "runs/digits", seed: int = 0, epochs: int = 30) -> dict[str, Any]:
    """Train, test, write the run's folder, and return what `summary.json` holds."""
    torch.manual_seed(seed)  # for the initial weights; in the fold all follows from the state's seed
    train, validation, test = load_splits()
    model = convnet()
    batches = DataLoader(train, batch_size=32, shuffle=True)
    updates = epochs * -(-len(batches) // 4)
    rate = schedules.warmup_cosine(peak=5e-3, warmup=20, total=updates)
    forward = Forward(model, supervised(F.cross_entropy, measures={"accuracy": accuracy}))
    step = chain(
        shift_images,
        forward,
        ScaledBackward(),
        Accumulate(every=4),
        ClipByGlobalNorm(1.0),
        MaybeStep(Optimizer(torch.optim.AdamW, lr=rate, weight_decay=0.05)),
        EmitEvents(),
    )
    watch = [monitors.MeanLoss(), monitors.Mean("accuracy"), monitors.GradNorm()]
    watch += [monitors.LearningRate(), monitors.Throughput(), monitors.EarlyStopping("val_loss", patience=8)]
    folder = Path(folder)
    run = fold(
        step,
        init(step, model, seed=seed),
        batches,
        until=Updates(updates),
        evaluations=[Evaluation(forward, [validation[:]])],  # all of it as one batch
        monitors=watch,
        sinks=[sinks.Console(), sinks.EventLog(folder)],
    )
    tested = Evaluation(forward, [test[:]], name="test").run(run.state).values
    summary = {**tested, "updates": run.state.progress.updates, "stopped_by": run.stopped_by, **run.results}
    np.savez(folder / "weights.npz", **model.state_dict())  # the fold has trained the model itself
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"held-out accuracy {tested['test_accuracy']:.4f}, run written to {folder}")
    return summary


if __name__ == "__main__":
    torch.set_num_threads(1)  # layers this small are slower when cores share them
    main()

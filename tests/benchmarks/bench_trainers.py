"""The same job under other trainers: MLP 32-64-10, batch 32, window 4, clip 1.0, fused AdamW.

Each reads the same batches from a `DataLoader` in the same process, with logging, checkpoints, progress bars and
evaluation off. Measured is the time of 300 updates less that of 50, set-up left out; medians of rounds in which they
take turns. Needs `pip install '.[trainers]'`.
"""

# The other trainers are not in the development environment, nor are their types.
# pyright: basic, reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import accelerate
import lightning
import torch
import transformers
from ignite.engine import Engine
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from pipeline import (
    Accumulate,
    ClipByGlobalNorm,
    EmitEvents,
    Forward,
    MaybeStep,
    Optimizer,
    ScaledBackward,
    chain,
    fold,
    init,
    supervised,
)

WINDOW, FEW, MANY = 4, 50, 300

Loader = DataLoader[Any]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)


def plain(loader: Loader) -> nn.Module:
    """By hand."""
    model = make_model()
    optimizer, params = make_optimizer(model), list(model.parameters())
    for i, (x, y) in enumerate(loader):
        (F.cross_entropy(model(x), y) / WINDOW).backward()
        if (i + 1) % WINDOW == 0:
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model


def foldtrain(loader: Loader) -> nn.Module:
    """This library."""
    model = make_model()
    step = chain(
        Forward(model, supervised(F.cross_entropy)),
        ScaledBackward(),
        Accumulate(WINDOW),
        ClipByGlobalNorm(1.0),
        MaybeStep(Optimizer(torch.optim.AdamW, lr=1e-3, weight_decay=0.0)),
        EmitEvents(),
    )
    fold(step, init(step, model), loader)
    return model


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model)


def of_lightning(loader: Loader) -> nn.Module:
    """`lightning.Trainer.fit`."""
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=WINDOW,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    return module.model


def of_ignite(loader: Loader) -> nn.Module:
    """An `Engine` around the update written by hand."""
    model = make_model()
    optimizer, params = make_optimizer(model), list(model.parameters())

    def update(engine: Any, batch: tuple[Tensor, Tensor]) -> None:
        (F.cross_entropy(model(batch[0]), batch[1]) / WINDOW).backward()
        if engine.state.iteration % WINDOW == 0:
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    Engine(update).run(loader, max_epochs=1)
    return model


def of_accelerate(loader: Loader) -> nn.Module:
    """A loop around `Accelerator.accumulate`."""
    helper = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    whole = make_model()
    model, optimizer, batches = helper.prepare(whole, make_optimizer(whole), loader)
    for x, y in batches:
        with helper.accumulate(model):
            helper.backward(F.cross_entropy(model(x), y))
            if helper.sync_gradients:
                helper.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    helper.end_training()
    return whole


class _Trainer(transformers.Trainer):
    loader: Loader

    def get_train_dataloader(self) -> Loader:
        return self.loader

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **more: Any) -> Tensor:
        return F.cross_entropy(model(inputs["x"]), inputs["y"])


def of_transformers(loader: Loader) -> nn.Module:
    """`transformers.Trainer.train`."""
    model = make_model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=len(loader) // WINDOW,
            gradient_accumulation_steps=WINDOW,
            max_grad_norm=1.0,
            lr_scheduler_type="constant",
            learning_rate=1e-3,
            weight_decay=0.0,
            optim="adamw_torch_fused",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = _Trainer(model, arguments)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.loader = DataLoader([{"x": x, "y": y} for x, y in loader.dataset], batch_size=None)  # type: ignore[union-attr]
        trainer.train()
    return model


SIDES: dict[str, Callable[[Loader], nn.Module]] = {
    "by hand": plain,
    "foldtrain": foldtrain,
    f"Lightning {lightning.__version__}": of_lightning,
    "Ignite": of_ignite,
    f"Accelerate {accelerate.__version__}": of_accelerate,
    f"Transformers {transformers.__version__}": of_transformers,
}


def took(side: Callable[[Loader], nn.Module], loader: Loader) -> float:
    gc.collect()
    began = time.perf_counter()
    side(loader)
    return time.perf_counter() - began


def main(rounds: int) -> None:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "accelerate", "ignite", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    batches = [(torch.randn(32, 32), torch.randint(0, 10, (32,))) for _ in range(MANY * WINDOW)]
    few, many = (DataLoader(batches[: n * WINDOW], batch_size=None) for n in (FEW, MANY))  # type: ignore[arg-type]
    weights = {name: side(few)[0].weight.detach().clone() for name, side in SIDES.items()}  # type: ignore[index]
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(rounds):
        for name, side in SIDES.items():
            times[name].append((took(side, many) - took(side, few)) / ((MANY - FEW) * WINDOW) * 1e6)
    first = statistics.median(times["by hand"])
    for name, values in times.items():
        middle, off = statistics.median(values), float((weights[name] - weights["by hand"]).abs().max())
        print(f"{name:<22} {middle:7.0f} µs a micro-batch, {middle / first:5.2f} of by hand; weights off by {off:.0e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    main(parser.parse_args().rounds)

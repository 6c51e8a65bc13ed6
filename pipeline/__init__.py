"""foldtrain: training as a fold.

An immutable record passes through pure transforms; monitors are stateless reducers over the events.
Names are handed out lazily, so that `import pipeline.monitors` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline import errors, events, monitors, schedules, sinks, testing
    from pipeline.combinators import branch, every, repeat, tap, when
    from pipeline.evaluation import Evaluation, EveryEpoch, EveryUpdates
    from pipeline.initialisation import initialise
    from pipeline.loop import apply, fold, init, scan
    from pipeline.monitor import ScaleRate, Stop, replay
    from pipeline.optim import Group, Optimizer, layer_decay, no_decay
    from pipeline.records import Frame, Loss, LossScale, Progress, TrainState, Window
    from pipeline.run import Run, run_of
    from pipeline.tensors import Tensors
    from pipeline.transform import Transform, chain, named
    from pipeline.transforms import (
        Accumulate,
        AdaptiveClip,
        AverageWeights,
        ClipByGlobalNorm,
        ClipByGroupNorm,
        ClipByValue,
        ClipPerParameter,
        DropNonFinite,
        EmitEvents,
        Forward,
        MaybeStep,
        ScaledBackward,
        SharpnessAware,
        SkipSpikes,
        averaged,
        supervised,
    )
    from pipeline.until import Epochs, MicroBatches, Seconds, SkipsInRow, Tokens, Updates

__all__ = [
    "Accumulate",
    "AdaptiveClip",
    "AverageWeights",
    "ClipByGlobalNorm",
    "ClipByGroupNorm",
    "ClipByValue",
    "ClipPerParameter",
    "DropNonFinite",
    "EmitEvents",
    "Epochs",
    "Evaluation",
    "EveryEpoch",
    "EveryUpdates",
    "Forward",
    "Frame",
    "Group",
    "Loss",
    "LossScale",
    "MaybeStep",
    "MicroBatches",
    "Optimizer",
    "Progress",
    "Run",
    "ScaleRate",
    "ScaledBackward",
    "Seconds",
    "SharpnessAware",
    "SkipSpikes",
    "SkipsInRow",
    "Stop",
    "Tensors",
    "Tokens",
    "TrainState",
    "Transform",
    "Updates",
    "Window",
    "apply",
    "averaged",
    "branch",
    "chain",
    "errors",
    "events",
    "every",
    "fold",
    "init",
    "initialise",
    "layer_decay",
    "monitors",
    "named",
    "no_decay",
    "repeat",
    "replay",
    "run_of",
    "scan",
    "schedules",
    "sinks",
    "supervised",
    "tap",
    "testing",
    "when",
]

_HOMES = {
    "combinators": ("branch", "every", "repeat", "tap", "when"),
    "evaluation": ("Evaluation", "EveryEpoch", "EveryUpdates"),
    "initialisation": ("initialise",),
    "loop": ("apply", "fold", "init", "scan"),
    "monitor": ("ScaleRate", "Stop", "replay"),
    "optim": ("Group", "Optimizer", "layer_decay", "no_decay"),
    "records": ("Frame", "Loss", "LossScale", "Progress", "TrainState", "Window"),
    "run": ("Run", "run_of"),
    "tensors": ("Tensors",),
    "transform": ("Transform", "chain", "named"),
    "transforms": (
        "Accumulate",
        "AdaptiveClip",
        "AverageWeights",
        "ClipByGlobalNorm",
        "ClipByGroupNorm",
        "ClipByValue",
        "ClipPerParameter",
        "DropNonFinite",
        "EmitEvents",
        "Forward",
        "MaybeStep",
        "ScaledBackward",
        "SharpnessAware",
        "SkipSpikes",
        "averaged",
        "supervised",
    ),
    "until": ("Epochs", "MicroBatches", "Seconds", "SkipsInRow", "Tokens", "Updates"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"pipeline.{_HOME_OF[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"pipeline.{name}")
    raise AttributeError(f"module 'pipeline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

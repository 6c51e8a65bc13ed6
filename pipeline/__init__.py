"""foldtrain: training as a fold.

An immutable record passes through pure transforms; monitors are stateless reducers over the events.
Names are handed out lazily, so that `import pipeline.monitors` imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline._lazy import handing_out

if TYPE_CHECKING:
    from pipeline import checkpoint, errors, events, monitors, schedules, sinks, stream, testing
    from pipeline.checkpoint import CheckpointStore, export, load_weights
    from pipeline.combinators import branch, every, repeat, tap, when
    from pipeline.compilation import compiled
    from pipeline.ensembles import ensemble, sweep
    from pipeline.evaluation import Evaluation, EveryEpoch, EveryUpdates
    from pipeline.initialisation import initialise
    from pipeline.loop import apply, fold, init, scan
    from pipeline.monitor import Evaluate, Rewind, Save, ScaleRate, Stop
    from pipeline.observer import observe
    from pipeline.optim import Group, Optimizer, layer_decay, no_decay
    from pipeline.parts import part
    from pipeline.recording import read_events, replay
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
        MeasureGradients,
        MeasureNoise,
        MeasureUpdates,
        PenaliseL1,
        PenaliseL2,
        ScaledBackward,
        SharpnessAware,
        SkipSpikes,
        UpdateInBackward,
        averaged,
        supervised,
    )
    from pipeline.until import Epochs, MicroBatches, Seconds, SkipsInRow, Tokens, Updates

__all__ = [
    "Accumulate",
    "AdaptiveClip",
    "AverageWeights",
    "CheckpointStore",
    "ClipByGlobalNorm",
    "ClipByGroupNorm",
    "ClipByValue",
    "ClipPerParameter",
    "DropNonFinite",
    "EmitEvents",
    "Epochs",
    "Evaluate",
    "Evaluation",
    "EveryEpoch",
    "EveryUpdates",
    "Forward",
    "Frame",
    "Group",
    "Loss",
    "LossScale",
    "MaybeStep",
    "MeasureGradients",
    "MeasureNoise",
    "MeasureUpdates",
    "MicroBatches",
    "Optimizer",
    "PenaliseL1",
    "PenaliseL2",
    "Progress",
    "Rewind",
    "Run",
    "Save",
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
    "UpdateInBackward",
    "Updates",
    "Window",
    "apply",
    "averaged",
    "branch",
    "chain",
    "checkpoint",
    "compiled",
    "ensemble",
    "errors",
    "events",
    "every",
    "export",
    "fold",
    "init",
    "initialise",
    "layer_decay",
    "load_weights",
    "monitors",
    "named",
    "no_decay",
    "observe",
    "part",
    "read_events",
    "repeat",
    "replay",
    "run_of",
    "scan",
    "schedules",
    "sinks",
    "stream",
    "supervised",
    "sweep",
    "tap",
    "testing",
    "when",
]

_HOMES = {
    "checkpoint": ("CheckpointStore", "export", "load_weights"),
    "combinators": ("branch", "every", "repeat", "tap", "when"),
    "compilation": ("compiled",),
    "ensembles": ("ensemble", "sweep"),
    "evaluation": ("Evaluation", "EveryEpoch", "EveryUpdates"),
    "initialisation": ("initialise",),
    "loop": ("apply", "fold", "init", "scan"),
    "monitor": ("Evaluate", "Rewind", "Save", "ScaleRate", "Stop"),
    "observer": ("observe",),
    "optim": ("Group", "Optimizer", "layer_decay", "no_decay"),
    "parts": ("part",),
    "recording": ("read_events", "replay"),
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
        "MeasureGradients",
        "MeasureNoise",
        "MeasureUpdates",
        "PenaliseL1",
        "PenaliseL2",
        "ScaledBackward",
        "SharpnessAware",
        "SkipSpikes",
        "UpdateInBackward",
        "averaged",
        "supervised",
    ),
    "until": ("Epochs", "MicroBatches", "Seconds", "SkipsInRow", "Tokens", "Updates"),
}
__getattr__ = handing_out(__name__, _HOMES, __all__)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

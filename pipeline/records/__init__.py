"""The records that flow: immutable attrs classes, all of them pytrees.

`TrainState` is all that outlives a step; `Frame` is one micro-batch on its way through the transforms.
"""

from pipeline.records.counters import LossScale, Progress, Rng
from pipeline.records.frame import Frame, Skipped
from pipeline.records.optimizer_state import LiveOptimizer, OptimizerState
from pipeline.records.part import Part
from pipeline.records.state import TrainState
from pipeline.records.window import Loss, Scalar, Window

__all__ = [
    "Frame",
    "LiveOptimizer",
    "Loss",
    "LossScale",
    "OptimizerState",
    "Part",
    "Progress",
    "Rng",
    "Scalar",
    "Skipped",
    "TrainState",
    "Window",
]

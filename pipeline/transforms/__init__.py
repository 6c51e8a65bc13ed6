"""The transforms that come with the library, each a frozen attrs class of settings: data comes in the frame."""

from pipeline.transforms._norm import global_norm
from pipeline.transforms.accumulate import Accumulate
from pipeline.transforms.average import AverageWeights, averaged
from pipeline.transforms.backward import ScaledBackward
from pipeline.transforms.clip import ClipByGlobalNorm
from pipeline.transforms.clip_adaptive import AdaptiveClip
from pipeline.transforms.clip_groups import ClipByGroupNorm, ClipPerParameter
from pipeline.transforms.clip_value import ClipByValue
from pipeline.transforms.emit import EmitEvents
from pipeline.transforms.forward import Forward
from pipeline.transforms.guard import DropNonFinite, SkipSpikes
from pipeline.transforms.in_backward import UpdateInBackward
from pipeline.transforms.losses import supervised
from pipeline.transforms.measure import MeasureGradients, MeasureUpdates
from pipeline.transforms.noise import MeasureNoise
from pipeline.transforms.penalty import PenaliseL1, PenaliseL2
from pipeline.transforms.sharpness import SharpnessAware
from pipeline.transforms.step import MaybeStep, UpdateRule

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
    "UpdateRule",
    "averaged",
    "global_norm",
    "supervised",
]

"""The transforms that come with the library, each a frozen attrs class of settings: data comes in the frame."""

from pipeline.transforms._norm import global_norm
from pipeline.transforms.accumulate import Accumulate
from pipeline.transforms.backward import ScaledBackward
from pipeline.transforms.clip import ClipByGlobalNorm
from pipeline.transforms.emit import EmitEvents
from pipeline.transforms.forward import Forward, supervised
from pipeline.transforms.guard import DropNonFinite, SkipSpikes
from pipeline.transforms.step import MaybeStep, UpdateRule

__all__ = [
    "Accumulate",
    "ClipByGlobalNorm",
    "DropNonFinite",
    "EmitEvents",
    "Forward",
    "MaybeStep",
    "ScaledBackward",
    "SkipSpikes",
    "UpdateRule",
    "global_norm",
    "supervised",
]

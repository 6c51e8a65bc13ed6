"""Monitors: what a person watches, as reducers over events, and how to compose them. No torch here: they travel.

Names are handed out lazily: who uses two monitors does not wait for the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline._lazy import handing_out

if TYPE_CHECKING:
    from pipeline.monitors.best import Best
    from pipeline.monitors.combinators import every, filter, map, premap
    from pipeline.monitors.combined import combine
    from pipeline.monitors.functions import monitor
    from pipeline.monitors.layers import LayerGradNorms, UpdateRatios
    from pipeline.monitors.means import ExponentialMean, Mean, MeanLoss
    from pipeline.monitors.memory import Memory
    from pipeline.monitors.metric import Metric
    from pipeline.monitors.noise import GradNoiseScale
    from pipeline.monitors.norms import GradNorm, ParamNorm, UpdateNorm
    from pipeline.monitors.plateau import Plateau
    from pipeline.monitors.quantiles import Quantiles
    from pipeline.monitors.rates import LearningRate, LearningRates
    from pipeline.monitors.saving import SaveBest, SaveEvery
    from pipeline.monitors.scaling import LossScaleHistory
    from pipeline.monitors.stopping import EarlyStopping
    from pipeline.monitors.stretches import per_epoch, window
    from pipeline.monitors.throughput import Throughput
    from pipeline.monitors.time_left import TimeLeft
    from pipeline.monitors.windows import ClipShare, Skips

__all__ = [
    "Best",
    "ClipShare",
    "EarlyStopping",
    "ExponentialMean",
    "GradNoiseScale",
    "GradNorm",
    "LayerGradNorms",
    "LearningRate",
    "LearningRates",
    "LossScaleHistory",
    "Mean",
    "MeanLoss",
    "Memory",
    "Metric",
    "ParamNorm",
    "Plateau",
    "Quantiles",
    "SaveBest",
    "SaveEvery",
    "Skips",
    "Throughput",
    "TimeLeft",
    "UpdateNorm",
    "UpdateRatios",
    "combine",
    "every",
    "filter",
    "map",
    "monitor",
    "per_epoch",
    "premap",
    "window",
]

_HOMES = {
    "best": ("Best",),
    "combinators": ("every", "filter", "map", "premap"),
    "combined": ("combine",),
    "functions": ("monitor",),
    "layers": ("LayerGradNorms", "UpdateRatios"),
    "means": ("ExponentialMean", "Mean", "MeanLoss"),
    "memory": ("Memory",),
    "metric": ("Metric",),
    "noise": ("GradNoiseScale",),
    "norms": ("GradNorm", "ParamNorm", "UpdateNorm"),
    "plateau": ("Plateau",),
    "quantiles": ("Quantiles",),
    "rates": ("LearningRate", "LearningRates"),
    "saving": ("SaveBest", "SaveEvery"),
    "scaling": ("LossScaleHistory",),
    "stopping": ("EarlyStopping",),
    "stretches": ("per_epoch", "window"),
    "throughput": ("Throughput",),
    "time_left": ("TimeLeft",),
    "windows": ("ClipShare", "Skips"),
}

__getattr__ = handing_out(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__

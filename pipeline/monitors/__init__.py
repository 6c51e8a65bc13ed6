"""Monitors: what a person watches, as reducers over events. No torch here: they travel."""

from pipeline.monitors.measured import GradNorm, LearningRate, Mean, MeanLoss
from pipeline.monitors.plateau import Plateau
from pipeline.monitors.stopping import EarlyStopping
from pipeline.monitors.throughput import Throughput

__all__ = ["EarlyStopping", "GradNorm", "LearningRate", "Mean", "MeanLoss", "Plateau", "Throughput"]

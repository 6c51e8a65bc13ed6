"""Checkpoints: the state of a run on disk, whole or not at all, without pickle."""

from pipeline.checkpoint.record import Checkpoint
from pipeline.checkpoint.saved import Saved
from pipeline.checkpoint.store import CheckpointStore, CheckpointWarning, load_checkpoint
from pipeline.checkpoint.transfer import export, load_weights, weights

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "CheckpointWarning",
    "Saved",
    "export",
    "load_checkpoint",
    "load_weights",
    "weights",
]

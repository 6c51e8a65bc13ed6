"""Initialisation: a model's parameters drawn anew by He, Xavier or orthogonal, from a seed of their own."""

from pipeline.initialisation.draw import initialise
from pipeline.initialisation.gains import gain

__all__ = ["gain", "initialise"]

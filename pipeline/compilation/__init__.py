"""`compiled`: the parts of a step as graphs."""

from pipeline.compilation._graph import Graph
from pipeline.compilation._segments import EagerPartWarning
from pipeline.compilation._step import Compiled, compiled

__all__ = ["Compiled", "EagerPartWarning", "Graph", "compiled"]

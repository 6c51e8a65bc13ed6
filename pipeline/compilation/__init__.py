"""`compiled`: the parts of a step as graphs."""

from pipeline.compilation._graph import Graph
from pipeline.compilation._step import Compiled, EagerPartWarning, compiled

__all__ = ["Compiled", "EagerPartWarning", "Graph", "compiled"]

"""A graph made into something that runs."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

__all__ = ["Backend", "Call", "compile_graph", "known_options"]

Backend = Callable[[GraphModule, Sequence[Tensor]], Callable[..., Sequence[Tensor]]]
"""What makes a graph, given inputs like those to come, into a function of them: as for `torch.compile`."""

Call = Callable[[list[Tensor]], Sequence[Tensor]]
"""A graph as a function of a list of its inputs, which it may empty."""


def compile_graph(
    graph: GraphModule, inputs: Sequence[Tensor], backend: str | Backend, options: Mapping[str, Any]
) -> Call:
    """The graph as a function: through inductor, as it is ("eager"), or as `backend` makes it."""
    if backend == "inductor":
        return _inductor().through_inductor(graph, inputs, options)
    run = graph.forward if isinstance(backend, str) else backend(graph, inputs)
    return lambda given: run(*given)


def known_options() -> frozenset[str]:
    """The settings of inductor."""
    return _inductor().known_options()


def _inductor() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what torch uses of itself is for torch to mend
        return importlib.import_module("pipeline.compilation._inductor")  # only where needed: it takes seconds

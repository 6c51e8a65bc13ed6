"""A graph made into something that runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

__all__ = ["Backend", "Call", "compile_graph"]

Backend = Callable[[GraphModule, Sequence[Tensor]], Callable[..., Sequence[Tensor]]]
"""What makes a graph, given inputs like those to come, into a function of them: as for `torch.compile`."""

Call = Callable[[list[Tensor]], Sequence[Tensor]]
"""A graph as a function of a list of its inputs, which it may empty."""


def compile_graph(
    graph: GraphModule, inputs: Sequence[Tensor], backend: str | Backend, options: Mapping[str, Any]
) -> Call:
    """The graph as a function: through inductor, as it is ("eager"), or as `backend` makes it."""
    if backend == "inductor":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # what torch uses of itself is for torch to mend
            from pipeline.compilation._inductor import through_inductor  # noqa: PLC0415 - it takes seconds to import

            return through_inductor(graph, inputs, options)
    run = graph.forward if isinstance(backend, str) else backend(graph, inputs)
    return lambda given: run(*given)

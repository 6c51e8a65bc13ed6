"""Inductor over a graph that is known to be what it takes: no autograd, no views of inputs among the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, _guards
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.fx import GraphModule

from pipeline.compilation._backend import Call

__all__ = ["known_options", "through_inductor"]

_ALWAYS: Mapping[str, Any] = {
    "fallback_random": True,  # dropout draws the masks that it draws uncompiled
    "size_asserts": False,  # a graph is only given what its conditions hold for
}
_OF_THE_SMALL: Mapping[str, Any] = {"cpp_wrapper": True}
_SMALL = 300
"""Operations in a graph up to which what is around its kernels counts.

On the CPU what calls them is then compiled too, and what torch puts around the whole, for callers who know less of
their inputs, is left away. In larger ones this would gain little, and compiling the calls take minutes; but to get to
their kernels takes long itself, so that the whole is kept on disk, and not the kernels alone.
"""


def through_inductor(graph: GraphModule, inputs: Sequence[Tensor], options: Mapping[str, Any]) -> Call:
    """The graph through inductor."""
    is_small = len(graph.graph.nodes) <= _SMALL
    is_on_cpu = all(value.device.type == "cpu" for value in inputs)
    settings = {**_ALWAYS, **(_OF_THE_SMALL if is_small and is_on_cpu else {}), **options}
    mode: Any = inputs[0].fake_mode  # pyright: ignore[reportAttributeAccessIssue]
    with (
        _guards.tracing(_guards.TracingContext(mode)),
        functorch_config.patch(enable_autograd_cache=not is_small),
        torch.no_grad(),
    ):
        return (_inside if is_small else _whole)(graph, list(inputs), settings)


def _whole(graph: GraphModule, inputs: list[Tensor], settings: Mapping[str, Any]) -> Call:
    call: Any = compile_fx(graph, inputs, config_patches=dict(settings))
    return lambda given: call(*given)


def _inside(graph: GraphModule, inputs: list[Tensor], settings: Mapping[str, Any]) -> Call:
    """The kernels alone, where they take and give what the graph does: a tensor of its own is a further input."""
    kept: list[tuple[GraphModule, int, Any]] = []

    def keep(module: GraphModule, given: Sequence[Tensor], **more: Any) -> Any:
        kept.append((module, len(given), compile_fx_inner(module, given, **more)))
        return kept[-1][2]

    outputs = _outputs(graph)
    whole: Any = compile_fx(graph, inputs, inner_compile=keep, config_patches=dict(settings))
    if len(kept) == 1 and _outputs(kept[0][0]) == outputs and kept[0][1] == len(inputs):
        return kept[0][2].current_callable
    return lambda given: whole(*given)


def known_options() -> frozenset[str]:
    """The names that `options` may hold."""
    return frozenset(config.get_config_copy())


def _outputs(graph: GraphModule) -> int:
    return len(graph.graph.output_node().args[0])  # pyright: ignore[reportArgumentType]

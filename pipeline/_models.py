"""The modules that a step runs."""

from __future__ import annotations

from torch import nn

from pipeline.transform import Chain


def models_in(step: object) -> list[nn.Module]:
    """The modules that a step's transforms run, wrapped ones included."""
    if isinstance(step, Chain):
        return [model for transform in step.transforms for model in models_in(transform)]
    model = getattr(step, "model", None)
    if isinstance(model, nn.Module):
        return [model]
    parts = [getattr(step, name, None) for name in ("inner", "then", "otherwise")]
    return [model for part in parts if part is not None for model in models_in(part)]

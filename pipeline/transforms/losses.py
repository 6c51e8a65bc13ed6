"""`supervised`: the loss function of the common case, batches of inputs and targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from pipeline.records import Loss, Scalar
from pipeline.records.window import new_loss
from pipeline.transforms._batches import samples_in
from pipeline.transforms.forward import LossFunction

__all__ = ["supervised"]


@attrs.frozen(repr=False)
class _Supervised:
    loss: Callable[[Any, Any], Tensor]
    measures: Mapping[str, Callable[[Any, Any], Any]]
    weight: Callable[[Any, Any], Scalar] | None

    def __call__(self, model: Any, batch: Any) -> Loss:
        inputs, targets = batch
        output = model(inputs)
        value = self.loss(output, targets)
        samples = samples_in(batch)
        if self.weight is None and not self.measures:
            return new_loss(value, samples, {}, samples, 0, None)
        weight = samples if self.weight is None else self.weight(output, targets)
        if self.measures:
            with torch.no_grad():
                measures = {name: measure(output, targets) for name, measure in self.measures.items()}
            return Loss.mean(value, weight, measures=measures, samples=samples)
        return Loss.mean(value, weight, samples=samples)

    def __repr__(self) -> str:
        more = f", measures={sorted(self.measures)}" if self.measures else ""
        return f"supervised({getattr(self.loss, '__name__', repr(self.loss))}{more})"


def supervised(
    loss: Callable[[Any, Any], Tensor],
    *,
    measures: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    weight: Callable[[Any, Any], Scalar] | None = None,
) -> LossFunction:
    """The loss function of batches `(inputs, targets)`: `loss(model(inputs), targets)`, a mean over the samples.

    Args: loss: 0-d mean, such as `torch.nn.functional.cross_entropy`; measures: name -> `f(output, targets)`, a mean
          over the samples or a pair (sum, weight), computed without a graph; weight: `f(output, targets)`, the number
          of items that the mean is over, where that is not the number of samples (targets that are not ignored, say).
    """
    return _Supervised(loss, dict(measures or {}), weight)

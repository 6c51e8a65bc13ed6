"""A loss with its weight, and the window of micro-batches that make one update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from pipeline.errors import LossError
from pipeline.records._quick import Record, positional
from pipeline.records._trees import register
from pipeline.tensors import Tensors

__all__ = ["Loss", "Scalar", "Window"]

Scalar = float | Tensor
"""A number on the host, or a 0-d tensor that stays on its device."""

_EMPTY = Tensors()
_NOTHING: Mapping[str, Any] = {}
_LEAST = torch.finfo(torch.float32).tiny  # to divide a weight of 0 by


@attrs.frozen(eq=False)
class Loss(Record):
    """A mean over `weight` counted items (tokens, samples), with what else was measured on the way.

    Make one with `Loss.mean` or `Loss.sum`. `measures` maps a name to (sum, weight), so that means over a window, an
    epoch or an evaluation are exact. `samples` and `tokens` count into `Progress`; `output` is kept in the frame for
    transforms that want it.
    """

    value: Tensor
    weight: Scalar = 1.0
    measures: Mapping[str, tuple[Scalar, Scalar]] = _NOTHING
    samples: int | None = None
    tokens: int = 0
    output: Any = None

    @classmethod
    def mean(
        cls,
        value: Tensor,
        weight: Scalar = 1.0,
        *,
        measures: Mapping[str, Any] | None = None,
        samples: int | None = None,
        tokens: int = 0,
        output: Any = None,
    ) -> Loss:
        """A loss that is already a mean over `weight` items; `value` 0-d.

        A measure is a mean over the same items, or a pair (sum, weight).
        With `weight` 0 on the host the micro-batch counts for nothing, whatever `value` is. A weight on the device
        cannot be branched on: where it may be 0, use `Loss.sum`, since a mean over nothing is NaN, gradient included.

        Raises: LossError for a negative or non-finite host weight.
        """
        weight = _checked(weight, value)
        pairs = {k: v if isinstance(v, tuple) else (v * weight, weight) for k, v in (measures or _NOTHING).items()}
        return cls(value, weight, pairs, samples, tokens, output)

    @classmethod
    def sum(
        cls,
        value: Tensor,
        weight: Scalar,
        *,
        measures: Mapping[str, Any] | None = None,
        samples: int | None = None,
        tokens: int = 0,
        output: Any = None,
    ) -> Loss:
        """A loss that is a sum over `weight` items; `value` 0-d. A measure is a sum likewise, or a pair (sum, weight).

        Raises: LossError for a negative or non-finite host weight.
        """
        weight = _checked(weight, value)
        over = torch.where(weight > 0, weight, 1.0) if isinstance(weight, Tensor) else (weight or 1.0)
        pairs = {k: v if isinstance(v, tuple) else (v, weight) for k, v in (measures or _NOTHING).items()}
        return cls(value / over, weight, pairs, samples, tokens, output)


def _checked(weight: Scalar, value: Tensor) -> Scalar:
    """The weight, if it can be one; on the device in the loss's precision, so that counts divide as exactly as it.

    In memory of its own: what is given may lie in a batch whose memory is used again.
    """
    if isinstance(weight, Tensor):
        return weight.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
    if not 0 <= weight < float("inf"):
        raise LossError("Loss weight", "a finite number of items, 0 or more", repr(weight), "give the count of items")
    return weight


@attrs.frozen(eq=False)
class Window(Record):
    """The micro-batches of one update so far.

    Weights count relative to `reference`, that of the window's first micro-batch that has any: a loss scale then
    sees means, and not sums over 10^5 tokens.

    `grads` sums of relative weight × loss scale × gradient, in float32 or wider, for those parameters that got one;
    `weight` sum of weights; `loss` sum of relative weight × loss, 0-d; `measures` name -> (sum, weight);
    `probes` a value for each micro-batch, the first non-finite one of which tells who spoilt the window: its loss, or
    under a loss scale the norm of the sums after it; `buffers` as they were before the window, to go back to if it is
    skipped.
    """

    grads: Tensors = _EMPTY
    weight: Scalar = 0.0
    reference: Scalar | None = None
    loss: Scalar = 0.0
    measures: Mapping[str, tuple[Scalar, Scalar]] = _NOTHING
    micro_batches: int = 0
    probes: tuple[Scalar, ...] = ()
    buffers: Tensors | None = None

    @property
    def relative_weight(self) -> Scalar:
        """The window's weight relative to its first micro-batch: what the sums are to be divided by."""
        return 0.0 if self.reference is None else self.weight / self.reference

    def relative(self, weight: Scalar) -> Scalar:
        """`weight` relative to the window's first micro-batch that has any."""
        if self.reference is None:
            if isinstance(weight, Tensor):
                return (weight > 0).to(weight.dtype)
            return 1.0 if weight else 0.0
        return weight / self.reference_with(weight)

    def reference_with(self, weight: Scalar) -> Scalar:
        """What weights are relative to once a micro-batch of this one is counted.

        On the device nobody knows yet whether any that came before it had a weight: where none did, it is this one.
        """
        known = self.reference
        if known is not None and not isinstance(known, Tensor):
            return known
        if known is not None:
            return torch.where(torch.as_tensor(self.weight > 0), known, weight).clamp_min(_LEAST)
        return torch.where(weight > 0, weight, 1.0) if isinstance(weight, Tensor) else weight or 1.0


new_loss, new_window = positional(Loss), positional(Window)

register(Loss)
register(Window)

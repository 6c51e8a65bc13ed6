"""Guards: what keeps one bad micro-batch or one bad window out of the parameters."""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor

from pipeline._checks import is_number, whole
from pipeline.errors import MissingFieldError, SettingError
from pipeline.records import Frame, Skipped, TrainState
from pipeline.tensors import Tensors
from pipeline.transforms._norm import global_norm, normalised, sum_norm

__all__ = ["DropNonFinite", "SkipSpikes"]


@attrs.frozen
class DropNonFinite:
    """Leave a micro-batch with a non-finite loss or gradient out of its window, and keep the rest.

    Reads:    `grads`, `loss`, `weight`, `measures`: of one micro-batch.
    Writes:   the same: zeros, with weight 0 on the device, where anything is not finite. The host does not wait.
    Edges:    stands between ScaledBackward and Accumulate, which then do not run as one: a second set of gradients is
              in memory meanwhile. Weights count relative to the window's first micro-batch that is kept. A window of
              which nothing is left is skipped. BatchNorm statistics have seen the micro-batch.
    """

    reads = frozenset({"grads", "loss", "weight"})
    writes = frozenset({"grads", "loss", "weight", "measures"})

    def __call__(self, frame: Frame) -> Frame:
        if frame.grads is None or frame.loss is None:
            raise MissingFieldError("DropNonFinite", "grads", "put it after ScaledBackward")
        loss = frame.loss.detach()
        good = torch.isfinite(global_norm(frame.grads.flat)) & torch.isfinite(loss)

        def kept(value: float | Tensor) -> Tensor:
            value = torch.as_tensor(value, device=loss.device)
            dtype = value.dtype if value.is_floating_point() else loss.dtype
            return torch.where(good, value.detach().to(dtype), torch.zeros((), dtype=dtype, device=loss.device))

        return frame.having(
            grads=Tensors((name, _where(good, grad)) for name, grad in frame.grads.items()),
            loss=kept(loss),
            weight=kept(frame.weight),
            measures={name: (kept(total), kept(weight)) for name, (total, weight) in frame.measures.items()},
        )


def _where(good: Tensor, grad: Tensor) -> Tensor:
    if grad.layout is torch.sparse_coo:
        grad = grad.coalesce()
        values = torch.where(good, grad.values(), torch.zeros_like(grad.values()))
        return torch.sparse_coo_tensor(grad.indices(), values, grad.shape, is_coalesced=True)
    return torch.where(good, grad, torch.zeros_like(grad))


@attrs.frozen
class SkipSpikes:
    """Skip an update whose gradient norm, before clipping, is above `multiple` times the running median.

    Reads:    `window.grads`, `update_factor`; the norms of the last windows, from its slot.
    Writes:   `skip`, 0-d and true for a spike; its slot, "spike norms": the last `over` finite norms, spikes among
              them, so that a new level of the gradient is no spike for long. The host does not wait.
    Edges:    nothing while the window is open, nor before `least` norms are known.
    Args:     multiple: above 1; over: how many windows the median is taken over; least: how many it needs, at most
              `over`; slot: the name of its state, for two of them in one chain.
    Raises:   SettingError, when built, for anything else.
    """

    multiple: float = 10.0
    over: int = 100
    least: int = 20
    slot: str = "spike norms"

    reads = frozenset({"window.grads", "update_factor", "ready"})
    writes = frozenset({"skip", "slots"})

    def __attrs_post_init__(self) -> None:
        if not is_number(self.multiple) or not 1 < self.multiple < math.inf:
            raise SettingError("SkipSpikes.multiple", "above 1 and finite", self.multiple)
        whole("SkipSpikes.over", self.over)
        whole("SkipSpikes.least", self.least)
        if self.least > self.over:
            raise SettingError("SkipSpikes.least", f"from 1 to over ({self.over})", self.least)

    def init(self, state: TrainState) -> TrainState:
        """No norms yet."""
        device = state.params.flat[0].device if len(state.params) else None
        norms = torch.full((self.over,), math.nan, device=device)
        return attrs.evolve(state, slots={**state.slots, self.slot: norms})

    def __call__(self, frame: Frame) -> Frame:
        if not frame.ready:
            return frame
        if self.slot not in frame.state.slots:
            raise MissingFieldError(
                "SkipSpikes", f"state.slots[{self.slot!r}]", "make the state with `init(step, model)`"
            )
        norms: Tensor = frame.state.slots[self.slot]
        measured = frame.facts.get("grad_norm") if frame.sum_norm is not None else None  # by a clip before this
        norm = measured if isinstance(measured, Tensor) else normalised(sum_norm(frame), frame.update_factor)
        norm = norm.to(norms.dtype)
        known = (~norms.isnan()).sum()
        spike = (norm > self.multiple * norms.nanmedian()) & (known >= self.least)
        norms = torch.where(norm.isfinite(), torch.cat([norms[1:], norm[None]]), norms)
        state = attrs.evolve(frame.state, slots={**frame.state.slots, self.slot: norms})
        return frame.having(
            state=state,
            skip=spike if frame.skip is None else frame.skip | spike,
            skipped=Skipped(f"gradient norm above {self.multiple:g} times its median"),
        )

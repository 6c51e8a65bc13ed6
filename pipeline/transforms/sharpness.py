"""`SharpnessAware`: the gradient at the worst point nearby, in place of the one here (SAM)."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from pipeline import _randomness as randomness
from pipeline._checks import positive
from pipeline.errors import MissingFieldError, SettingError
from pipeline.records import Frame, TrainState
from pipeline.tensors import Tensors
from pipeline.transforms._norm import global_norm
from pipeline.transforms.backward import ScaledBackward
from pipeline.transforms.forward import Forward

__all__ = ["SharpnessAware"]


@attrs.frozen
class SharpnessAware:
    """Forward and ScaledBackward at parameters moved by `rho` along the gradient of the micro-batch.

    In place of `Forward(model, loss), ScaledBackward()`: two passes through the model.

    Reads:    what Forward and ScaledBackward read.
    Writes:   what they write: `loss`, `measures` and the buffers are those of the first pass, `grads` of the second.
    Edges:    a gradient of zero moves nothing. The perturbed parameters are another set in memory for the second pass,
              and the gradients too. Both passes draw the same dropout masks.
    Args:     forward: a `Forward`; rho: the radius, positive.
    Raises:   SettingError, when built, for anything else.
    Source:   Foret et al. 2021, arXiv:2010.01412, algorithm 1.
    """

    forward: Forward
    rho: float = 0.05

    reads = Forward.reads | ScaledBackward.reads - Forward.writes
    writes = Forward.writes | ScaledBackward.writes

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.forward, Forward):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SettingError("SharpnessAware.forward", "a Forward(model, loss)", self.forward)
        positive("SharpnessAware.rho", self.rho)

    @property
    def model(self) -> torch.nn.Module:
        """The model that the Forward runs."""
        return self.forward.model

    def init(self, state: TrainState) -> TrainState:
        """As Forward."""
        return self.forward.init(state)

    def __call__(self, frame: Frame) -> Frame:
        backward = ScaledBackward()
        generators = randomness.default_generators(frame.state)
        drawn = randomness.read(generators)
        first = backward(self.forward(frame))
        if not first.grads:
            return first
        if first.loss is None:
            raise MissingFieldError("SharpnessAware", "loss", "give it a Forward")
        moved = self._moved(first.state.params, first.grads)
        after, frozen = randomness.read(generators), first.state.buffers.copy()
        randomness.write(generators, drawn)  # the same masks in both passes
        there = attrs.evolve(first.state, params=moved, buffers=frozen)
        second = backward(self.forward(first.having(state=there)))
        randomness.write(generators, after)
        return first.having(grads=second.grads, loss=first.loss.detach())

    def _moved(self, params: Tensors, grads: Tensors) -> Tensors:
        """The parameters, `rho` further up the gradient, as leaves of their own."""
        norm = global_norm(grads.flat)
        step = self.rho / (norm + 1e-12)

        def at(name: str, param: Tensor) -> Tensor:
            if name not in grads:
                return param
            return torch.add(param.detach(), grads[name] * step.to(param.dtype)).requires_grad_()

        return Tensors((name, at(name, param)) for name, param in params.items())

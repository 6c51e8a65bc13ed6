"""`PenaliseL1` and `PenaliseL2`: the gradient of a penalty on the weights, added to that of the loss."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from pipeline._checks import not_negative
from pipeline.errors import SettingError
from pipeline.records import Frame, Scalar, TrainState
from pipeline.tensors import Tensors
from pipeline.transforms._clipping import has_something, is_due
from pipeline.transforms._gradients import widened
from pipeline.transforms._norm import global_norm

__all__ = ["PenaliseL1", "PenaliseL2"]

_Match = str | Callable[[str, Tensor], bool]


@attrs.frozen
class _Penalty:
    """What the two share: which weights they are about, and when and where the gradient is added."""

    strength: float
    match: _Match = "*"

    reads = frozenset({"window.grads", "update_factor", "ready", "params"})
    writes = frozenset({"window.grads", "update_factor", "facts"})
    fact = ""

    def __attrs_post_init__(self) -> None:
        not_negative(f"{type(self).__name__}.strength", self.strength)
        if not isinstance(self.match, str) and not callable(self.match):  # pyright: ignore[reportUnnecessaryIsInstance]
            setting = f"{type(self).__name__}.match"
            raise SettingError(setting, "a pattern on names or a function f(name, tensor)", self.match)

    def init(self, state: TrainState) -> TrainState:
        """Check the match against the parameters."""
        if not self._matching(state.params, state.params):
            known = ", ".join(list(state.params)[:8])
            setting = f"{type(self).__name__}.match"
            raise SettingError(setting, "one that some parameter matches", self.match, f"{known}.")
        return state

    def __call__(self, frame: Frame) -> Frame:
        if not is_due(frame, type(self).__name__) or not has_something(frame):
            return frame
        state, factor = frame.state, frame.update_factor
        weights = self._matching(state.window.grads, state.params)
        if not weights:
            return frame
        first = state.window.grads.flat[0].device
        penalty = self.strength * self._sum(list(weights.values())).to(first)
        sums = state.window.grads.writable(frame.began.updates)
        sums = sums.replace([self._added(grad, factor, weights.get(name)) for name, grad in sums.items()])
        counted = (factor != 0).to(factor.dtype) if isinstance(factor, Tensor) else 1.0
        return frame.having(
            state=attrs.evolve(state, window=attrs.evolve(state.window, grads=sums)),
            update_factor=counted,
            sum_norm=_norm_of(sums, frame.sum_norm),
            facts={**frame.facts, self.fact: frame.facts.get(self.fact, 0.0) + penalty},
        )

    def _matching(self, names: Tensors, params: Tensors) -> dict[str, Tensor]:
        """Those parameters among `names` that are penalised, without their graph."""
        match = self.match
        if isinstance(match, str):
            return {name: params[name].detach() for name in names if fnmatch.fnmatchcase(name, match)}
        return {name: params[name].detach() for name in names if match(name, params[name])}

    def _added(self, grad: Tensor, factor: Scalar, weight: Tensor | None) -> Tensor:
        """`grad` × `factor` + the penalty's gradient, in the place of `grad` unless that is sparse."""
        if not (isinstance(factor, float) and factor == 1.0):
            grad.mul_(factor.to(grad.device) if isinstance(factor, Tensor) else factor)
        if weight is None:
            return grad
        if grad.layout is torch.sparse_coo:
            grad = grad.to_dense()
        return grad.add_(self._slope(weight), alpha=self.strength)

    def _sum(self, weights: list[Tensor]) -> Tensor:
        """The penalty at strength 1, 0-d."""
        raise NotImplementedError

    def _slope(self, weight: Tensor) -> Tensor:
        """Its gradient."""
        raise NotImplementedError


def _norm_of(sums: Tensors, before: tuple[Tensors, Tensor] | None) -> tuple[Tensors, Tensor] | None:
    """The norm of `sums` where a clip has measured one before; what that found not to be finite stays so."""
    if before is None:
        return None
    return sums, torch.where(before[1].isfinite(), global_norm(sums.flat), before[1])


@attrs.frozen
class PenaliseL1(_Penalty):
    """Add the gradient of `strength` · Σ|w| to the window's mean gradient.

    Reads:    `window.grads`, one tensor per parameter: any shape, dense or sparse, real or complex; `update_factor`,
              what normalises them; `params`.
    Writes:   `window.grads`, normalised and with strength · sign(w) added; `update_factor`, 1, or 0 on the device where
              nothing counted.
    Measures: `l1_penalty`, what was added to the loss in this way, 0-d, in float32 or wider; stays on its device. The
              loss itself remains that of the data.
    Edges:    nothing while the window is open; once a window, whatever its size and the loss scale. A weight of 0 has
              the slope 0. A parameter without a gradient in this window is not penalised. A sparse gradient becomes
              dense, since every row is penalised. A narrow parameter counts with the value that it is rounded to.
    Args:     strength: 0 or more, finite; match: which parameters, a pattern on names as in `fnmatch` or
              `f(name, tensor) -> bool`.
    Raises:   SettingError, when built, for anything else; when the state is made, for a match that fits no parameter.
    Source:   Tibshirani 1996, "Regression shrinkage and selection via the lasso".
    """

    fact = "l1_penalty"

    def _sum(self, weights: list[Tensor]) -> Tensor:
        return global_norm(map(widened, weights), 1)

    def _slope(self, weight: Tensor) -> Tensor:
        return weight.sgn()


@attrs.frozen
class PenaliseL2(_Penalty):
    """Add the gradient of `strength` / 2 · Σ|w|² to the window's mean gradient: `weight_decay` of SGD and Adam.

    Reads:    `window.grads`, one tensor per parameter: any shape, dense or sparse, real or complex; `update_factor`,
              what normalises them; `params`.
    Writes:   `window.grads`, normalised and with strength · w added; `update_factor`, 1, or 0 on the device where
              nothing counted.
    Measures: `l2_penalty`, what was added to the loss in this way, 0-d, in float32 or wider; stays on its device. The
              loss itself remains that of the data.
    Edges:    nothing while the window is open; once a window, whatever its size and the loss scale. A parameter without
              a gradient in this window is not penalised. A sparse gradient becomes dense, since every row is
              penalised. A narrow parameter counts with the value that it is rounded to.
    Args:     strength: 0 or more, finite; match: which parameters, a pattern on names as in `fnmatch` or
              `f(name, tensor) -> bool`.
    Raises:   SettingError, when built, for anything else; when the state is made, for a match that fits no parameter.
    Source:   Krogh, Hertz 1991, "A simple weight decay can improve generalization".
    """

    fact = "l2_penalty"

    def _sum(self, weights: list[Tensor]) -> Tensor:
        return global_norm(map(widened, weights)).square() / 2

    def _slope(self, weight: Tensor) -> Tensor:
        return weight

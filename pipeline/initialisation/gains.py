"""The gain of a nonlinearity."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipeline.errors import SettingError

__all__ = ["Nonlinearity", "gain"]

Nonlinearity = str | nn.Module | Callable[[Tensor], Tensor]
"""A name as in `torch.nn.functional`, or "linear"; a module; or an elementwise function."""

# As torch.nn.init.calculate_gain, but for SELU: 1 is what Klambauer et al. 2017 (arXiv:1706.02515) derive, and what
# torch's documentation of its own 3/4 says to use for networks that are to normalise themselves.
_KNOWN = {"linear": 1.0, "identity": 1.0, "sigmoid": 1.0, "tanh": 5 / 3, "selu": 1.0}
_NAMES = ("elu", "gelu", "hardswish", "leaky_relu", "mish", "relu", "relu6", "silu", "softplus")


def gain(nonlinearity: Nonlinearity) -> float:
    """What the weights before `nonlinearity` are multiplied by, so that the signal keeps its size on the way through.

    For f it is 1 / √E[f(z)²] with z standard normal: √2 for ReLU, √(2 / (1 + slope²)) for leaky ReLU, 1.534 for GELU,
    1.677 for SiLU, 1 for SELU. Sigmoid (1) and tanh (5/3), which hold the signal by themselves, have the gains of
    `torch.nn.init.calculate_gain`.

    Args:   nonlinearity: "linear", or a name in `torch.nn.functional`; a module such as `nn.LeakyReLU(0.2)`; or an
            elementwise function of a tensor.
    Raises: SettingError for a name that it does not know, or a function that gives nothing back to scale.
    Source: He et al. 2015, arXiv:1502.01852, equations 7 to 10, for any f.
    """
    if isinstance(nonlinearity, nn.PReLU):
        return math.sqrt(2 / (1 + nonlinearity.init**2))
    name = nonlinearity if isinstance(nonlinearity, str) else getattr(nonlinearity, "__name__", None)
    name = type(nonlinearity).__name__.lower() if isinstance(nonlinearity, nn.Module) else name
    if name in _KNOWN:
        return _KNOWN[name]
    function = nonlinearity
    if isinstance(function, str):
        if function not in _NAMES:
            known = ", ".join(sorted({*_KNOWN, *_NAMES}))
            cure = "Any other elementwise function can be given itself: `nonlinearity=torch.sin`."
            raise SettingError("gain(nonlinearity)", f"one of {known}", function, cure)
        function = getattr(nn.functional, function)
    moment = _second_moment(function)
    if not 0 < moment < math.inf:
        expected = "an elementwise function that gives finite values, not all 0"
        raise SettingError("gain(nonlinearity)", expected, nonlinearity)
    return 1 / math.sqrt(moment)


def _second_moment(function: Callable[[Tensor], Tensor]) -> float:
    """E[f(z)²] for z standard normal, by the trapezoid rule: kinks at multiples of 0.005 cost nothing."""
    with torch.no_grad():
        z = torch.linspace(-12, 12, 4801, dtype=torch.float64, device="cpu")
        density = torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        values = function(z)
        return float(torch.trapezoid(values * values * density, z)) if values.shape == z.shape else math.nan

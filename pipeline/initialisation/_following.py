"""Which nonlinearity follows a layer, as far as a model's Sequentials tell."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from pipeline.initialisation.gains import Nonlinearity

_ELEMENTWISE = (
    *(nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid, nn.Mish),
    *(nn.PReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanh),
)
_NORMALISED = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin)  # an output, not a nonlinearity to make up for


def followers(model: nn.Module) -> dict[nn.Module, Nonlinearity | None]:
    """What follows each module of the model's Sequentials: a nonlinearity, "linear", or None where it cannot be told.

    Torch's modules without parameters, such as dropout and pooling, and the norms pass the signal on.
    """
    found: dict[nn.Module, Nonlinearity | None] = {}
    for module in model.modules():  # outer before inner: the end of an inner Sequential is not the end of the line
        if isinstance(module, nn.Sequential):
            line = list(_leaves(module))
            for place, leaf in enumerate(line):
                found.setdefault(leaf, _first(line[place + 1 :]))
    return found


def _leaves(sequential: nn.Sequential) -> Iterator[nn.Module]:
    for module in sequential:
        if isinstance(module, nn.Sequential):
            yield from _leaves(module)
        else:
            yield module


def _first(line: list[nn.Module]) -> Nonlinearity | None:
    for module in line:
        if isinstance(module, _ELEMENTWISE):
            return module
        of_torch = type(module).__module__.startswith("torch.nn.modules.")
        if isinstance(module, (nn.GLU, nn.RReLU)) or not of_torch:
            return None
        if isinstance(module, _NORMALISED):
            return "linear"
        if not is_norm(module) and next(module.parameters(), None) is not None:
            return "linear" if next(module.children(), None) is None else None
    return "linear"


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises, with a weight around 1 and a bias around 0."""
    norms = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)  # pyright: ignore[reportPrivateUsage]
    return isinstance(module, norms)

"""`initialise`: each layer's weights by its scheme, from a generator of its own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import attrs
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pipeline.errors import SettingError
from pipeline.initialisation._following import followers, is_norm
from pipeline.initialisation.gains import Nonlinearity, gain

__all__ = ["initialise"]

M = TypeVar("M", bound=nn.Module)
Scheme = Literal["he", "xavier", "orthogonal"]
Distribution = Literal["normal", "uniform"]

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def initialise(
    model: M,
    scheme: Scheme = "he",
    *,
    nonlinearity: Nonlinearity | None = None,
    seed: int = 0,
    distribution: Distribution = "normal",
) -> M:
    """Draw the model's parameters anew, in place, and return the model.

    Weights of linear, convolution, attention and recurrent layers have the variance gain² / fan_in ("he"),
    gain² · 2 / (fan_in + fan_out) ("xavier"), or are gain times a (semi-)orthogonal matrix ("orthogonal"). Embeddings
    have variance 1; biases are 0; norms are 1 and 0, their running statistics at the start. Other parameters, and all
    that do not require a gradient, keep their values. A weight that layers share is drawn once, as a layer's and not
    as an embedding's.

    What a parameter is given depends on `seed`, its name and its shape alone: neither on the device nor on the other
    layers; torch's own generators are left as they are.

    Args:   nonlinearity: what follows every layer, as in `gain`; by default what follows each one in its `Sequential`,
            and for layers outside of one "relu" with the scheme "he" and "linear" with the others. Attention and
            recurrent layers have gain 1 in any case; seed: a whole number; distribution: "normal" or "uniform", of the
            same variance; nothing to choose for "orthogonal".
    Raises: SettingError for a scheme, distribution or nonlinearity that it does not know, and for parameters that have
            no shape yet, lie on the meta device, or are computed from others in a way that cannot be turned around.
    Source: He et al. 2015, arXiv:1502.01852; Glorot, Bengio 2010; Saxe et al. 2013, arXiv:1312.6120.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SettingError("initialise(model)", "a torch.nn.Module", model)
    if scheme not in ("he", "xavier", "orthogonal"):
        raise SettingError("initialise(scheme)", "'he', 'xavier' or 'orthogonal'", scheme)
    if distribution not in ("normal", "uniform"):
        raise SettingError("initialise(distribution)", "'normal' or 'uniform'", distribution)
    if scheme == "orthogonal" and distribution == "uniform":
        raise SettingError("initialise(distribution)", "left out with scheme 'orthogonal'", distribution)
    drawing = _Drawing(scheme, distribution, seed)
    unknown = "relu" if scheme == "he" else "linear"
    found = {} if nonlinearity is not None else followers(model)
    gains: dict[nn.Module, float] = {}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            gains[module.out_proj] = 1.0
        elif isinstance(module, _LAYERS) and module not in gains:
            follows = found.get(module) if nonlinearity is None else nonlinearity
            gains[module] = gain(unknown if follows is None else follows)
    # Embeddings last: one that shares its weight with the output layer is drawn as that layer's.
    for embeddings in (False, True):
        for name, module in model.named_modules():
            if isinstance(module, _EMBEDDINGS) == embeddings:
                drawing.module(f"{name}." if name else "", module, gains.get(module, 1.0))
    return model


@attrs.define
class _Drawing:
    scheme: Scheme
    distribution: Distribution
    seed: int
    done: set[int] = attrs.field(factory=set)

    def module(self, prefix: str, module: nn.Module, gain: float) -> None:
        """Everything that stands in this very module, if it is of a kind that is known."""
        if isinstance(module, _LAYERS):
            fans = _fans(module)
            self.put(prefix, module, "weight", lambda shape, g: self.weights(shape, fans, gain, g))
            self.put(prefix, module, "bias", _zeros)
        elif isinstance(module, nn.MultiheadAttention):
            for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
                self.put(prefix, module, name, self.blocks(3 if name == "in_proj_weight" else 1))
            for name in ("in_proj_bias", "bias_k", "bias_v"):
                self.put(prefix, module, name, _zeros)
        elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            for name, param in list(module.named_parameters(recurse=False)):
                gates = 1 if "weight_hr" in name else param.shape[0] // module.hidden_size
                self.put(prefix, module, name, _zeros if "bias" in name else self.blocks(gates))
        elif isinstance(module, _EMBEDDINGS):
            self.put(prefix, module, "weight", lambda shape, g: self.embedding(shape, module.padding_idx, g))
        elif is_norm(module):
            self.norm(prefix, module)
        elif isinstance(module, nn.PReLU):
            self.put(prefix, module, "weight", lambda shape, _: torch.full(shape, module.init))

    def norm(self, prefix: str, module: Any) -> None:
        """1 and 0, and the running statistics at the start, unless the layer is frozen."""
        self.put(prefix, module, "weight", lambda shape, _: torch.ones(shape))
        self.put(prefix, module, "bias", _zeros)
        weight = getattr(module, "weight", None)
        if hasattr(module, "reset_running_stats") and (weight is None or weight.requires_grad):
            module.reset_running_stats()

    def put(
        self, prefix: str, module: nn.Module, name: str, draw: Callable[[torch.Size, torch.Generator], Tensor]
    ) -> None:
        """Give a parameter what `draw` makes for its shape, unless it is frozen, absent, or was given something."""
        param = getattr(module, name, None)
        if param is None or id(param) in self.done:
            return
        computed = name not in dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if computed and not parametrize.is_parametrized(module, name):
            cure = "Initialise the model before what makes them computed, such as torch.nn.utils.weight_norm."
            raise SettingError("initialise(model)", "of parameters that can be written", f"{prefix}{name}", cure)
        originals = module.parametrizations[name].parameters() if computed else [param]  # type: ignore[index]
        if not all(original.requires_grad for original in originals):
            return
        if nn.parameter.is_lazy(param):
            cure = "Run one batch through the model first."
            raise SettingError("initialise(model)", "of parameters that have a shape", f"{prefix}{name}", cure)
        if param.is_meta:
            cure = "Give them memory first: `model.to_empty(device=...)`."
            raise SettingError("initialise(model)", "of parameters off the meta device", f"{prefix}{name}", cure)
        if not param.is_floating_point():
            raise SettingError("initialise(model)", "of real floating parameters", f"{prefix}{name}: {param.dtype}")
        self.done.add(id(param))
        digest = hashlib.blake2b(f"{self.seed} {prefix}{name}".encode(), digest_size=8).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest) >> 1)
        with torch.no_grad(), torch.device("cpu"):
            value = draw(param.shape, generator)
            if computed:
                setattr(module, name, value.to(param))
            else:
                param.copy_(value)

    # -- values, in float32 on the CPU whatever the parameter is ----------------------------------------------------

    def weights(self, shape: torch.Size, fans: tuple[float, float], gain: float, generator: torch.Generator) -> Tensor:
        """A layer's weights for these fans."""
        if self.scheme == "orthogonal":
            return nn.init.orthogonal_(torch.empty(shape, dtype=torch.float32), gain, generator=generator)
        fan = fans[0] if self.scheme == "he" else (fans[0] + fans[1]) / 2
        return self.noise(shape, gain / math.sqrt(max(fan, 1)), generator)

    def blocks(self, count: int) -> Callable[[torch.Size, torch.Generator], Tensor]:
        """Several matrices that are kept as one, each drawn for itself with gain 1: gates, or queries, keys, values."""

        def draw(shape: torch.Size, generator: torch.Generator) -> Tensor:
            one = torch.Size((shape[0] // count, *shape[1:]))
            return torch.cat([self.weights(one, (one[1], one[0]), 1.0, generator) for _ in range(count)])

        return draw

    def embedding(self, shape: torch.Size, padding: int | None, generator: torch.Generator) -> Tensor:
        """Looked up and not summed over: variance 1 for every scheme, as torch has it."""
        value = self.noise(shape, 1.0, generator)
        if padding is not None:
            value[padding] = 0
        return value

    def noise(self, shape: torch.Size, std: float, generator: torch.Generator) -> Tensor:
        """Independent values of mean 0."""
        value = torch.empty(shape, dtype=torch.float32)
        if self.distribution == "normal":
            return value.normal_(0, std, generator=generator)
        return value.uniform_(-math.sqrt(3) * std, math.sqrt(3) * std, generator=generator)


def _zeros(shape: torch.Size, _: torch.Generator) -> Tensor:
    return torch.zeros(shape)


def _fans(module: Any) -> tuple[float, float]:
    """How many inputs an output sums over, and how many outputs an input goes to (stride left out, as is usual)."""
    if isinstance(module, nn.Bilinear):
        return module.in1_features * module.in2_features, module.out_features
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    kernel = math.prod(module.kernel_size)
    inputs, outputs = (c // module.groups for c in (module.in_channels, module.out_channels))
    if isinstance(module, _TRANSPOSED):  # a stride spreads the kernel over the outputs: each sees a part of it
        seen = math.prod(max(k / s, 1) for k, s in zip(module.kernel_size, module.stride, strict=True))
        return inputs * seen, outputs * kernel
    return inputs * kernel, outputs * kernel

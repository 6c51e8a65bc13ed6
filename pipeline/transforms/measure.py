"""`MeasureGradients` and `MeasureUpdates`: norms layer by layer, of what flows back and of what it moves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from pipeline._checks import whole
from pipeline._declared import fields, name_of, show
from pipeline.records import Frame, Scalar, TrainState
from pipeline.tensors import Tensors
from pipeline.transform import Transform, chain
from pipeline.transforms._clipping import has_something, is_due
from pipeline.transforms._gradients import trainable, widened
from pipeline.transforms._norm import normalised, norms

__all__ = ["MeasureGradients", "MeasureUpdates"]


def _is_measured(frame: Frame, every: int) -> bool:
    """Whether the window at work is an n-th one, counted from the start of training as `every` counts."""
    return (frame.began.windows + 1) % every == 0


def _layer_of(name: str, depth: int) -> str:
    """The first `depth` components of the name of the module that has the parameter; its own name where none has."""
    module = name.split(".")[:-1]
    return ".".join(module[:depth]) or name


@functools.lru_cache
def _layers(names: tuple[str, ...], depth: int | None) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Each layer with the places of its parameters in `names`."""
    found: dict[str, tuple[int, ...]] = {}
    for place, name in enumerate(names):
        layer = name if depth is None else _layer_of(name, depth)
        found[layer] = (*found.get(layer, ()), place)
    return tuple(found.items())


def _layer_norms(
    kind: str, tensors: Mapping[str, Tensor], depth: int | None, factor: Scalar = 1.0
) -> dict[str, Tensor]:
    """`factor` × the L2 norm of each layer, 0-d, as `kind`/layer."""
    layers, flat = _layers(tuple(tensors), depth), tuple(tensors.values())
    sizes = norms([flat[place] for _, places in layers for place in places])
    if depth is not None:
        sizes = norms(sizes.split([len(places) for _, places in layers]))
    sizes = normalised(sizes, factor).unbind()
    return {f"{kind}/{layer}": size for (layer, _), size in zip(layers, sizes, strict=True)}


@attrs.frozen
class MeasureGradients:
    """Measure the L2 norm of each layer's gradient.

    Reads:    `window.grads`, one tensor per parameter: any shape, dense or sparse, real or complex; `update_factor`,
              what normalises them.
    Writes:   `facts`, and nothing else.
    Measures: `grad_norm/<layer>`, 0-d, in units of the normalised gradient, whatever the window and the loss scale; all
              stay on their device. Before a clip these are the norms that it finds, behind it those that it leaves.
    Edges:    nothing while the window is open, and nothing where nothing counted. A parameter without a gradient in
              this window has no norm, and counts for nothing in its layer's.
    Args:     every: which windows are measured, each n-th from the start of training; depth: None for each parameter by
              its name, or how many components of its module's name make a layer: with 2, `blocks.3.mlp.weight` counts
              for `blocks.3`, and `head.bias` for `head`.
    Raises:   SettingError, when built, for anything else.
    """

    every: int = 1
    depth: int | None = None

    reads = frozenset({"window.grads", "update_factor", "ready"})
    writes = frozenset({"facts"})

    def __attrs_post_init__(self) -> None:
        _check("MeasureGradients", self.every, self.depth)

    def __call__(self, frame: Frame) -> Frame:
        if not is_due(frame, "MeasureGradients") or not has_something(frame) or not _is_measured(frame, self.every):
            return frame
        measured = _layer_norms("grad_norm", frame.state.window.grads, self.depth, frame.update_factor)
        return frame.having(facts={**frame.facts, **measured})


def _transform(inner: Transform) -> Transform:
    """`inner` as it is, once a chain has taken it for a transform."""
    chain(inner)
    return inner


@attrs.frozen
class MeasureUpdates:
    """Run `inner`, and measure for each layer what its update changed: `MeasureUpdates(MaybeStep(optimizer))`.

    The numbers of the training stay as they are, to the bit. In a chain it goes by the name of `inner`.

    Reads:    `params`, and what `inner` reads.
    Writes:   `facts`, and what `inner` writes.
    Measures: `param_norm/<layer>`, the L2 norm of the parameters after the update; `update_norm/<layer>`, that of their
              change; 0-d, in float32 or wider, all stay on their device. The one over the other is how far a step goes.
    Edges:    nothing while the window is open, and where no update was made. Frozen parameters are left out. In the
              windows that are measured a copy of the other ones, in float32 or wider, is in memory while `inner` runs;
              where `inner` does not say that it reads `ready`, in each of their micro-batches.
    Args:     inner: what updates the parameters; every, depth: as for MeasureGradients.
    Raises:   SettingError, when built, for anything else; NotATransformError for an `inner` that is none.
    """

    inner: Transform = attrs.field(converter=_transform, repr=show)
    every: int = 1
    depth: int | None = None

    def __attrs_post_init__(self) -> None:
        _check("MeasureUpdates", self.every, self.depth)

    def __call__(self, frame: Frame) -> Frame:
        return self._measured(self.inner, frame)

    def _measured(self, call: Callable[[Frame], Frame], frame: Frame) -> Frame:
        if not _is_measured(frame, self.every) or not (frame.ready or "ready" not in fields(self.inner, "reads")):
            return call(frame)
        change = _copied(frame.state.params)
        frame = call(frame)
        if not frame.applied:
            return frame
        now = {name: widened(frame.state.params[name]) for name in change}
        torch._foreach_sub_(list(change.values()), list(now.values()))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        measured = {
            **_layer_norms("param_norm", now, self.depth),
            **_layer_norms("update_norm", change, self.depth),
        }
        return frame.having(facts={**frame.facts, **measured})

    # Each is there where `inner` has it: `hasattr` is how a chain asks.
    @property
    def name(self) -> str:
        """The name of `inner`, by which the chain is edited."""
        return name_of(self.inner)

    @property
    def reads(self) -> frozenset[str]:
        """What `inner` reads, and the parameters."""
        return self._of_inner("reads") | {"params"}

    @property
    def writes(self) -> frozenset[str]:
        """What `inner` writes, and the facts."""
        return self._of_inner("writes") | {"facts"}

    @property
    def uses_up(self) -> frozenset[str]:
        """What `inner` uses up."""
        return self._of_inner("uses_up")

    @property
    def init(self) -> Callable[[TrainState], TrainState]:
        """That of `inner`."""
        return self._of_inner("init")

    @property
    def finish(self) -> Callable[[Frame], Frame]:
        """That of `inner`, measured."""
        return functools.partial(self._measured, self._of_inner("finish"))

    def _of_inner(self, attribute: str) -> Any:
        return getattr(self.inner, attribute)


def _copied(params: Tensors) -> dict[str, Tensor]:
    """The parameters that can change, by name, in float32 or wider and in memory of their own."""
    names, tensors = trainable(params)
    dtypes = [torch.promote_types(param.dtype, torch.float32) for param in tensors]
    copies = [param.detach().to(dtype, copy=True) for param, dtype in zip(tensors, dtypes, strict=True)]
    return dict(zip(names, copies, strict=True))


def _check(owner: str, every: int, depth: int | None) -> None:
    whole(f"{owner}.every", every)
    if depth is not None:
        whole(f"{owner}.depth", depth)

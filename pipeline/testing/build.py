"""A frame in a line, for a test of one transform."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipeline.records import Frame, LossScale, Progress, Rng, Scalar, TrainState, Window
from pipeline.tensors import Tensors

__all__ = ["frame"]

Values = Mapping[str, Any]


def _tensors(values: Values | None, *, requires_grad: bool = False) -> Tensors:
    """Tensors as they are; numbers and lists of numbers as float32."""
    made = {
        name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)
        for name, value in (values or {}).items()
    }
    if requires_grad:
        made = {n: t if isinstance(values and values[n], Tensor) else t.requires_grad_() for n, t in made.items()}
    return Tensors(made)


def frame(
    params: Values | None = None,
    *,
    grads: Values | None = None,
    sums: Values | None = None,
    buffers: Values | None = None,
    batch: Any = None,
    loss: Any = None,
    weight: Scalar = 1.0,
    micro_batches: int | None = None,
    window_weight: Scalar | None = None,
    ready: bool = False,
    update_factor: Scalar = 1.0,
    loss_scale: LossScale | None = None,
    progress: Progress | None = None,
    slots: Mapping[str, Any] | None = None,
    seed: int = 0,
    **more: Any,
) -> Frame:
    """A frame built by hand: transforms leave it untouched and return new tensors.

    `frame({"w": [1.0, 2.0]}, sums={"w": [3.0, 4.0]}, ready=True)` is one whose window holds the gradient sum (3, 4).
    Numbers and lists become float32 tensors, parameters among them with `requires_grad`; tensors are taken as they are.

    Args: grads: of this micro-batch, from ScaledBackward; sums: those of the window; micro_batches: in the window, 1
          where there are sums; window_weight: their summed weight, `micro_batches` by default; more: any other
          field of a frame, such as `facts`, `measures`, `closed`.
    """
    count = (1 if sums else 0) if micro_batches is None else micro_batches
    window = Window(
        grads=_tensors(sums),
        weight=float(count) if window_weight is None else window_weight,
        reference=1.0 if count else None,
        micro_batches=count,
    )
    state = TrainState(
        _tensors(params, requires_grad=True),
        _tensors(buffers),
        window=window,
        loss_scale=loss_scale,
        progress=progress or Progress(),
        rng=Rng(seed),
        slots=slots or {},
    )
    return Frame(
        state,
        batch,
        loss=loss if loss is None or isinstance(loss, Tensor) else torch.tensor(float(loss)),
        weight=weight,
        grads=None if grads is None else _tensors(grads),
        ready=ready,
        update_factor=update_factor,
        **more,
    )

"""The window in a trace, so that one graph serves the micro-batch that begins a window and those that follow."""

from __future__ import annotations

import sys
from typing import Any

import attrs
import torch
from torch import Tensor

from pipeline.compilation._numbers import Number
from pipeline.records import Frame, Scalar, TrainState, Window
from pipeline.tensors import Tensors
from pipeline.transforms._gradients import counts_for_nothing, trainable
from pipeline.transforms.accumulate import Accumulate

__all__ = ["Form", "Gathering", "TracedWindow", "contents", "supposed"]


@attrs.frozen(eq=False)
class TracedWindow(Window):
    """A window whose `reference` is 0 while no micro-batch has been counted."""

    def relative(self, weight: Scalar) -> Scalar:
        """`weight` relative to the window's first micro-batch, which may be the one at work."""
        return weight / self.begun(weight)

    def begun(self, weight: Scalar) -> Scalar:
        """The reference, once a micro-batch of this weight is counted."""
        reference: Any = self.reference
        if isinstance(reference, Tensor) or isinstance(weight, Tensor):
            first = torch.where(weight > 0, weight, 1.0) if isinstance(weight, Tensor) else weight
            known = reference if isinstance(reference, Tensor) else reference.tensor(weight)
            return torch.where(known > 0, known, first)
        assert isinstance(reference, Number)
        return reference.otherwise(weight)  # pyright: ignore[reportReturnType]

    def counting(self, weight: Scalar) -> Window:
        """The window as Accumulate is to see it: with a reference, whether this micro-batch begins it or not."""
        return Window(
            self.grads,
            self.weight,
            self.reference if counts_for_nothing(weight) else self.begun(weight),
            self.loss,
            self.measures,
            self.micro_batches,
            self.probes,
            self.buffers,
        )


@attrs.frozen
class Gathering:
    """Accumulate as it is traced: whether the window is full is left to the host; knows what was added last."""

    accumulate: Accumulate
    _added: list[Any] = attrs.field(factory=list[Any], init=False)

    def __call__(self, frame: Frame) -> Frame:
        state, window = frame.state, frame.state.window
        self._added[:] = [(set(frame.grads or ()), set(frame.measures))]
        if isinstance(window, TracedWindow):
            frame = frame.having(state=attrs.evolve(state, window=window.counting(frame.weight)))
        return attrs.evolve(self.accumulate, every=sys.maxsize)(frame)

    def fits(self, held: tuple[set[str], set[str]]) -> bool:
        """Whether what was added last is all that a window holds, so that it might have begun it."""
        return self._added == [held]


def supposed(frame: Frame) -> Frame:
    """In the place of ScaledBackward: gradients of no value for every parameter that is trained."""
    names, params = trainable(frame.state.params)
    return frame.having(grads=Tensors((name, torch.empty_like(p)) for name, p in zip(names, params, strict=True)))


def contents(window: Window) -> tuple[set[str], set[str]]:
    """Whose gradients a window holds, and which measures."""
    return set(window.grads), set(window.measures)


class Form:
    """What a window holds once a micro-batch of some kind has begun it, and memory for its sums.

    A window begins with zeros in the place of everything. The memory of its sums serves window after window.
    """

    def __init__(self, window: Window, device: torch.device) -> None:
        """That of `window`, as a micro-batch has left it; it may be a traced one."""
        self.kind, self.contents = _kind(window), contents(window)
        self._zeros: tuple[Any, ...] = (
            _zero(window.weight, device),
            None if window.reference is None else _zero(window.reference, device),
            _zero(window.loss, device),
            {name: (_zero(a, device), _zero(b, device)) for name, (a, b) in window.measures.items()},
        )
        self._has_buffers = window.buffers is not None
        self._lent = window.grads.map(_empty)
        self._owned = self._lent.map(_empty).owned()
        self._devices = [total.device for total in window.grads.flat]
        self._spare: list[tuple[Tensor, ...]] = []

    def is_of(self, window: Window) -> bool:
        """Whether that window is of this form."""
        return _kind(window) == self.kind

    def has_made(self, sums: Tensors) -> bool:
        """Whether these lie in its memory."""
        return sums.index is self._owned.index

    def begin(self, frame: Frame) -> Frame:
        """The frame with a window that is about to begin."""
        state, buffers = frame.state, None
        if not self._spare:
            pairs = zip(self._lent.flat, self._devices, strict=True)
            self._spare.append(tuple(torch.zeros_like(total, device=device) for total, device in pairs))
        sums = (self._owned if state.params.is_owned else self._lent).replace(self._spare[-1])
        if self._has_buffers:
            buffers = state.buffers.copy() if state.buffers.is_owned else state.buffers
        weight, reference, loss, measures = self._zeros
        window = Window(sums, weight, reference, loss, measures, 0, (), buffers)
        return frame.having(state=_with_window(state, window))

    def take(self, sums: Tensors) -> None:
        """Leave the memory that `begin` has given to the window, which has begun."""
        if sums.is_owned:
            self._spare.pop()

    def give_back(self, sums: tuple[Tensor, ...]) -> None:
        """Memory of a window that has ended."""
        if sums:
            torch._foreach_zero_(sums)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        self._spare.append(sums)


def _empty(tensor: Tensor) -> Tensor:
    """One of that shape without any memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _with_window(state: TrainState, window: Window) -> TrainState:
    """`attrs.evolve`, at a third of its cost."""
    return TrainState(
        state.params,
        state.buffers,
        state.optimizer,
        window,
        state.loss_scale,
        state.progress,
        state.rng,
        state.slots,
        state.rate_factor,
    )


def _zero(value: Scalar, device: torch.device) -> Scalar:
    return torch.zeros((), dtype=value.dtype, device=device) if isinstance(value, Tensor) else _type(value)()


def _type(value: Any) -> type[Any]:
    """Whether a number of the host, traced or not, is an int or a float."""
    return type(value.value) if isinstance(value, Number) else int if isinstance(value, torch.SymInt) else type(value)


def _kind(window: Window) -> tuple[Any, ...]:
    """What tells windows of different forms apart."""
    numbers = [window.weight, window.reference, window.loss]
    for name, pair in window.measures.items():
        numbers += [name, *pair]
    kinds = [v if isinstance(v, str) or v is None else v.dtype if isinstance(v, Tensor) else _type(v) for v in numbers]
    return (*kinds, window.buffers is None, *((n, t.shape, t.dtype) for n, t in window.grads.items()))

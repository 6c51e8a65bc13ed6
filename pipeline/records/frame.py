"""`Frame`: one micro-batch on its way through the transforms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import attrs
from torch import Tensor

from pipeline.records._trees import register
from pipeline.records.counters import Progress
from pipeline.records.state import TrainState
from pipeline.records.window import Scalar, Window
from pipeline.tensors import Tensors

__all__ = ["Frame", "Skipped"]

_NOTHING: Mapping[str, Any] = {}


@attrs.frozen
class Skipped:
    """Why a window ended without an update, and what brought it, where that is known."""

    reason: str
    micro_batch: int | None = None
    parameter: str | None = None


@attrs.frozen(eq=False, slots=False)
class Frame:
    """One micro-batch on its way through the transforms: the state, the batch, and what has been added so far.

    `began` is the progress when the pass began, `time` the clock's reading then, and `waited` how long the
    batches since the last window have kept the loop waiting (seconds; inputs, never read here).
    From Forward: `loss` (0-d mean), `weight`, `measures`, `samples`, `tokens`, `output`.
    From ScaledBackward: `grads`, this micro-batch's gradients × relative weight × loss scale.
    From Accumulate: `ready`, the window is full, and `update_factor`, what the gradients are to be multiplied by.
    From a clip: `sum_norm`, the window's gradient sums and their global norm, so that one pass over them serves all.
    From what finds an update unwanted: `skip`, 0-d and true where it is to be skipped, and `skipped`, why.
    From MaybeStep: `applied`, whether an update was made, None when none was due; `closed`, the window that it closed;
    `rates`, group -> learning rate used; `scaled_by`, the loss scale that the window had; `skipped`, if it was.
    From any of them: `facts`, measured scalars by name, and `events`, what happened.
    """

    state: TrainState
    batch: Any = None
    time: float = 0.0
    waited: float = 0.0
    began: Progress = attrs.field(default=attrs.Factory(lambda frame: frame.state.progress, takes_self=True))
    output: Any = None
    loss: Tensor | None = None
    weight: Scalar = 1.0
    measures: Mapping[str, tuple[Scalar, Scalar]] = _NOTHING
    samples: int = 0
    tokens: int = 0
    grads: Tensors | None = None
    ready: bool = False
    update_factor: Scalar = 1.0
    sum_norm: tuple[Tensors, Tensor] | None = None
    applied: bool | None = None
    closed: Window | None = None
    rates: Mapping[str, float] = _NOTHING
    scaled_by: float | None = None
    skip: Tensor | None = None
    skipped: Skipped | None = None
    facts: Mapping[str, Scalar] = _NOTHING
    events: tuple[Any, ...] = ()

    @classmethod
    def begin(cls, state: TrainState, batch: Any = None, time: float = 0.0, waited: float = 0.0) -> Frame:
        """`Frame(state, batch, time, waited)`, at a third of its cost."""
        new = object.__new__(cls)
        given = {"state": state, "batch": batch, "time": time, "waited": waited, "began": state.progress}
        fields = {**_FRAME_DEFAULTS, **given}
        object.__setattr__(new, "__dict__", fields)
        return new

    def having(self, **changes: Any) -> Self:
        """The same frame with other values in some fields: `attrs.evolve`, at a third of its cost.

        Raises: TypeError for a field that a Frame does not have.
        """
        fields = self.__dict__ | changes
        if len(fields) != len(_FRAME_FIELDS):
            unknown = ", ".join(sorted(fields.keys() - _FRAME_FIELDS))
            raise TypeError(f"a Frame has no field {unknown}; durable state of your own belongs in state.slots")
        new = object.__new__(type(self))
        object.__setattr__(new, "__dict__", fields)
        return new

    def __repr__(self) -> str:
        shown = [f"micro-step {self.began.micro_steps}"]
        shown += [f"{k}={v!r}" for k in ("loss", "weight", "grads") if (v := getattr(self, k)) is not None]
        shown += [k for k in ("ready", "applied") if getattr(self, k)]
        shown += [f"{len(self.events)} events"] if self.events else []
        return f"Frame({', '.join(shown)})"


_FRAME_FIELDS = frozenset(field.name for field in attrs.fields(Frame))
_FRAME_DEFAULTS = {field.name: field.default for field in attrs.fields(Frame)}


register(Frame)

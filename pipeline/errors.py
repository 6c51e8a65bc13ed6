"""Every error that the library raises on purpose, in one tree.

    FoldtrainError
    ├── SettingError (ValueError)            a setting out of range, when the object is built
    ├── CompositionError (ValueError)        a chain that cannot work
    │   ├── NotATransformError (TypeError)   something in a chain that is no `Frame -> Frame`
    │   ├── DuplicateNameError               two parts of one name
    │   ├── UnknownNameError (LookupError)   no part of that name
    │   └── OrderError                       a transform reads what nothing before it writes
    ├── FrameError (ValueError)              one micro-batch that cannot be processed
    │   ├── MissingFieldError                the frame lacks what the transform reads
    │   ├── LossError                        a loss that is not 0-d, a negative weight, a measure that is not 0-d
    │   ├── NoGraphError                     the loss depends on no parameter that requires a gradient
    │   └── DeviceError                      batch and parameters lie on different devices
    ├── StateError (ValueError)
    │   ├── StaleStateError (RuntimeError)   buffers that a later record has taken over
    │   ├── StateMismatchError               a state of another model
    │   └── OptimizerMismatchError           optimizer state of another class
    ├── StreamError (ValueError)             a stream that gave nothing where batches were expected
    ├── MeasureError (LookupError)           a monitor asks for a measure that nothing reports
    └── LawError (AssertionError)            a law of `pipeline.testing` does not hold

Each says who, what was expected, what came and what to do, and carries the same facts as attributes.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

__all__ = [
    "CompositionError",
    "DeviceError",
    "DuplicateNameError",
    "FoldtrainError",
    "FrameError",
    "LawError",
    "LossError",
    "MeasureError",
    "MissingFieldError",
    "NoGraphError",
    "NotATransformError",
    "OptimizerMismatchError",
    "OrderError",
    "SettingError",
    "StaleStateError",
    "StateError",
    "StateMismatchError",
    "StreamError",
    "UnknownNameError",
]


class FoldtrainError(Exception):
    """The root of the tree: catch it to catch all that the library raises on purpose."""


@attrs.define(slots=False, eq=False)
class SettingError(FoldtrainError, ValueError):
    """A setting out of range, found when the object is built."""

    setting: str
    expected: str
    got: object
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.setting} must be {self.expected}, got {self.got!r}." + (f" {self.cure}" if self.cure else "")


class CompositionError(FoldtrainError, ValueError):
    """A chain that cannot work, found when it is composed."""


@attrs.define(slots=False, eq=False)
class NotATransformError(CompositionError, TypeError):
    """Something in a chain that is no callable `Frame -> Frame`, or that did not return a frame."""

    where: str
    got: object
    cure: str

    def __str__(self) -> str:
        return f"{self.where} {self.got!r}: {self.cure}"


@attrs.define(slots=False, eq=False)
class DuplicateNameError(CompositionError):
    """Two transforms, monitors or evaluations of one name."""

    kind: str
    name: str

    def __str__(self) -> str:
        cure = 'give one a name of its own, `named("other", ...)` around it'
        if self.kind != "transform":
            cure = 'give one a name of its own, `name="other"`'
        return f"Two {self.kind}s are called {self.name!r}: {cure}."


@attrs.define(slots=False, eq=False)
class UnknownNameError(CompositionError, LookupError):
    """No part of that name."""

    owner: str
    name: str
    known: Sequence[str]

    def __str__(self) -> str:
        return f"{self.owner} has no part called {self.name!r}: it has {', '.join(self.known) or 'none'}."


@attrs.define(slots=False, eq=False)
class OrderError(CompositionError):
    """A transform that reads what nothing before it writes, or what was used up before it."""

    transform: str
    field: str
    problem: str
    cure: str

    def __str__(self) -> str:
        return f"{self.transform} reads {self.field}, which {self.problem}: {self.cure}."


class FrameError(FoldtrainError, ValueError):
    """One micro-batch that cannot be processed; the state before it is as it was."""


@attrs.define(slots=False, eq=False)
class MissingFieldError(FrameError):
    """The frame lacks what the transform reads."""

    transform: str
    field: str
    cure: str

    def __str__(self) -> str:
        return f"{self.transform} reads {self.field}, and this frame has none: {self.cure}."


@attrs.define(slots=False, eq=False)
class LossError(FrameError):
    """What the loss function returned is not a loss, or its weight is negative."""

    what: str
    expected: str
    got: str
    cure: str

    def __str__(self) -> str:
        return f"{self.what} must be {self.expected}, got {self.got}: {self.cure}."


@attrs.define(slots=False, eq=False)
class NoGraphError(FrameError):
    """The loss depends on no parameter that requires a gradient."""

    reason: str

    def __str__(self) -> str:
        return (
            f"ScaledBackward has nothing to differentiate: {self.reason}. Unfreeze a parameter that the loss uses, "
            "or compute the loss without `torch.no_grad()` and `.detach()`; to pass over such a batch give `None`."
        )


@attrs.define(slots=False, eq=False)
class DeviceError(FrameError):
    """Batch and parameters lie on different devices."""

    batch_devices: Sequence[str]
    param_device: str

    def __str__(self) -> str:
        return (
            f"Forward got a batch on {', '.join(self.batch_devices)} for parameters on {self.param_device}: move the "
            f'batch before the fold, `tree_map(lambda x: x.to("{self.param_device}"), batch)`, or the model.'
        )


class StateError(FoldtrainError, ValueError):
    """A state that cannot be used here."""


@attrs.define(slots=False, eq=False)
class StaleStateError(StateError, RuntimeError):
    """The buffers of this record were taken over by a later one."""

    update: int | None = None

    def __str__(self) -> str:
        when = "" if self.update is None else f" at update {self.update}"
        return (
            f"This state's buffers were reused by the fold{when}. Take `state.copy()` before handing it over, "
            "or fold with donate=False."
        )


@attrs.define(slots=False, eq=False)
class StateMismatchError(StateError):
    """A state of another model: names, shapes or tied values differ."""

    owner: str
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    differing: Sequence[str] = ()

    def __str__(self) -> str:
        parts = [
            f"{label} {', '.join(names[:8])}{' …' if len(names) > 8 else ''}"
            for label, names in (
                ("the state lacks", self.missing),
                ("the model has no", self.unexpected),
                ("they differ in", self.differing),
            )
            if names
        ]
        cure = "Make it with `init(step, model)`, of the module that Forward holds."
        return f"This state is not one of {self.owner}: {'; '.join(parts)}. {cure}"


@attrs.define(slots=False, eq=False)
class OptimizerMismatchError(StateError):
    """Optimizer state that another class made: its moments mean something else."""

    optimizer: str
    entry: str

    def __str__(self) -> str:
        return (
            f"{self.optimizer} finds no {self.entry!r} in the state's optimizer entries: another optimizer made them. "
            "Keep that one, or begin them anew: `attrs.evolve(state, optimizer=OptimizerState())`."
        )


class StreamError(FoldtrainError, ValueError):
    """A stream that gave nothing where batches were expected."""


@attrs.define(slots=False, eq=False)
class MeasureError(FoldtrainError, LookupError):
    """A monitor asks for a measure that nothing reports."""

    monitor: str
    measure: str
    known: Sequence[str]

    def __str__(self) -> str:
        known = ", ".join(sorted(self.known)) or "none: give the fold an Evaluation"
        return f"{self.monitor} watches {self.measure!r}, which nothing reports. What is reported: {known}."


class LawError(FoldtrainError, AssertionError):
    """A law of `pipeline.testing` does not hold; the message says where the two sides part."""

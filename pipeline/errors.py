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
    │   ├── HiddenGraphError                 a part of the loss that the gradients cannot be found through
    │   └── DeviceError                      batch and parameters lie on different devices
    ├── StateError (ValueError)
    │   ├── StaleStateError (RuntimeError)   buffers that a later record has taken over
    │   ├── StateMismatchError               a state of another model
    │   └── OptimizerMismatchError           optimizer state of another class
    ├── StreamError (ValueError)             a stream that cannot give what it was asked for
    │   ├── PlaceError                       a place that a stream cannot go to
    │   └── WorkerError (RuntimeError)       a worker that died, or that nothing can be sent to or from
    ├── MeasureError (LookupError)           a monitor asks for a measure that nothing reports
    ├── LogError (ValueError)                an event log that cannot be written, read or continued
    │   ├── EventFormError (TypeError)       an event that has no form in JSON
    │   ├── UnknownEventError (LookupError)  an event of a class that the reader was not given
    │   ├── DamagedLogError                  a line that is no event
    │   ├── LogFormatError                   a log in the format of a later version
    │   ├── LogTooShortError                 a log that ends before the place where a run goes on
    │   └── LogInUseError (RuntimeError)     a log that another run is writing
    ├── CheckpointError (ValueError)         a checkpoint that cannot be written, found, read or used
    │   ├── DamagedCheckpointError           its files are not those that were written
    │   ├── CheckpointFormatError            a checkpoint in the format of a later version
    │   └── StoreInUseError (RuntimeError)   a folder that another run is saving to
    └── LawError (AssertionError)            a law of `pipeline.testing` does not hold

Each says who, what was expected, what came and what to do, and carries the same facts as attributes.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

__all__ = [
    "CheckpointError",
    "CheckpointFormatError",
    "CompositionError",
    "DamagedCheckpointError",
    "DamagedLogError",
    "DeviceError",
    "DuplicateNameError",
    "EventFormError",
    "FoldtrainError",
    "FrameError",
    "HiddenGraphError",
    "LawError",
    "LogError",
    "LogFormatError",
    "LogInUseError",
    "LogTooShortError",
    "LossError",
    "MeasureError",
    "MissingFieldError",
    "NoGraphError",
    "NotATransformError",
    "OptimizerMismatchError",
    "OrderError",
    "PlaceError",
    "SettingError",
    "StaleStateError",
    "StateError",
    "StateMismatchError",
    "StoreInUseError",
    "StreamError",
    "UnknownEventError",
    "UnknownNameError",
    "WorkerError",
]


class FoldtrainError(Exception):
    """The root of the tree: catch it to catch all that the library raises on purpose."""


@attrs.define(slots=False, eq=False, repr=False)
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


@attrs.define(slots=False, eq=False, repr=False)
class NotATransformError(CompositionError, TypeError):
    """Something in a chain that is no callable `Frame -> Frame`, or that did not return a frame."""

    where: str
    got: object
    cure: str

    def __str__(self) -> str:
        return f"{self.where} {self.got!r}: {self.cure}"


@attrs.define(slots=False, eq=False, repr=False)
class DuplicateNameError(CompositionError):
    """Two transforms, monitors or evaluations of one name."""

    kind: str
    name: str

    def __str__(self) -> str:
        cure = 'give one a name of its own, `named("other", ...)` around it'
        if self.kind != "transform":
            cure = 'give one a name of its own, `name="other"`'
        return f"Two {self.kind}s are called {self.name!r}: {cure}."


@attrs.define(slots=False, eq=False, repr=False)
class UnknownNameError(CompositionError, LookupError):
    """No part of that name."""

    owner: str
    name: str
    known: Sequence[str]

    def __str__(self) -> str:
        return f"{self.owner} has no part called {self.name!r}: it has {', '.join(self.known) or 'none'}."


@attrs.define(slots=False, eq=False, repr=False)
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


@attrs.define(slots=False, eq=False, repr=False)
class MissingFieldError(FrameError):
    """The frame lacks what the transform reads."""

    transform: str
    field: str
    cure: str

    def __str__(self) -> str:
        return f"{self.transform} reads {self.field}, and this frame has none: {self.cure}."


@attrs.define(slots=False, eq=False, repr=False)
class LossError(FrameError):
    """What the loss function returned is not a loss, or its weight is negative."""

    what: str
    expected: str
    got: str
    cure: str

    def __str__(self) -> str:
        return f"{self.what} must be {self.expected}, got {self.got}: {self.cure}."


@attrs.define(slots=False, eq=False, repr=False)
class NoGraphError(FrameError):
    """The loss depends on no parameter that requires a gradient."""

    reason: str

    def __str__(self) -> str:
        return (
            f"There is nothing to differentiate: {self.reason}. Unfreeze a parameter that the loss uses, "
            "or compute the loss without `torch.no_grad()` and `.detach()`; to pass over such a batch give `None`."
        )


class HiddenGraphError(FrameError):
    """The model recomputes activations in a way in which the parameters in between get no gradient."""

    def __str__(self) -> str:
        return (
            "The loss goes through a reentrant checkpoint, behind which no parameter would get a gradient: call "
            "`torch.utils.checkpoint.checkpoint` with `use_reentrant=False`, or tell `Forward` what to recompute."
        )


@attrs.define(slots=False, eq=False, repr=False)
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


@attrs.define(slots=False, eq=False, repr=False)
class StaleStateError(StateError, RuntimeError):
    """The buffers of this record were taken over by a later one."""

    update: int | None = None

    def __str__(self) -> str:
        when = "" if self.update is None else f" at update {self.update}"
        return (
            f"This state's buffers were reused by the fold{when}. Take `state.copy()` before handing it over, "
            "or fold with donate=False."
        )


@attrs.define(slots=False, eq=False, repr=False)
class StateMismatchError(StateError):
    """A state of another model: names, shapes or tied values differ."""

    owner: str
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    differing: Sequence[str] = ()
    cure: str = "Make it with `init(step, model)`, of the module that Forward holds."

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
        return f"This state is not one of {self.owner}: {'; '.join(parts)}. {self.cure}"


@attrs.define(slots=False, eq=False, repr=False)
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
    """A stream that cannot give what it was asked for: batches where there are none, a second pass over a generator."""


@attrs.define(slots=False, eq=False, repr=False)
class PlaceError(StreamError):
    """A place that a stream cannot go to."""

    stream: str
    expected: str
    got: object
    cure: str = ""

    def __str__(self) -> str:
        said = f"{self.stream} can go to a place {self.expected}, got {self.got!r}."
        return said + (f" {self.cure}" if self.cure else "")


@attrs.define(slots=False, eq=False, repr=False)
class WorkerError(StreamError, RuntimeError):
    """A worker process that died, or that nothing can be sent to or from."""

    what: str
    why: str
    cure: str

    def __str__(self) -> str:
        return f"{self.what} {self.why}: {self.cure}."


@attrs.define(slots=False, eq=False, repr=False)
class MeasureError(FoldtrainError, LookupError):
    """A monitor asks for a measure that nothing reports."""

    monitor: str
    measure: str
    known: Sequence[str]

    def __str__(self) -> str:
        known = ", ".join(sorted(self.known)) or "none: give the fold an Evaluation"
        return f"{self.monitor} watches {self.measure!r}, which nothing reports. What is reported: {known}."


class LogError(FoldtrainError, ValueError):
    """An event log that cannot be written, read or continued."""


@attrs.define(slots=False, eq=False, repr=False)
class EventFormError(LogError, TypeError):
    """An event, or a class of events, that has no form in JSON."""

    event: str
    problem: str
    cure: str

    def __str__(self) -> str:
        return f"{self.event} has no form in JSON: {self.problem}. {self.cure}"


@attrs.define(slots=False, eq=False, repr=False)
class UnknownEventError(LogError, LookupError):
    """An event of a class that the reader was not given."""

    event: str
    where: str = "this line"

    def __str__(self) -> str:
        return (
            f"{self.where}: {self.event!r} is no event of the library's own. Hand its class to the reader "
            f"(types=[{self.event}]; on a command line --event module:{self.event}), or pass over such events "
            "(skip_unknown=True, --skip-unknown)."
        )


@attrs.define(slots=False, eq=False, repr=False)
class DamagedLogError(LogError):
    """A line that is no event."""

    problem: str
    where: str = "this line"

    def __str__(self) -> str:
        return f"{self.where} is no event: {self.problem}."


@attrs.define(slots=False, eq=False, repr=False)
class LogFormatError(LogError):
    """A log in the format of a later version."""

    format: object
    known: int
    where: str = "this line"

    def __str__(self) -> str:
        return (
            f"{self.where}: the log is in format {self.format!r}, and this version of foldtrain knows up to "
            f"{self.known}. Read it with a newer one."
        )


@attrs.define(slots=False, eq=False, repr=False)
class LogTooShortError(LogError):
    """A log that ends before the place where a run goes on."""

    path: str
    holds: int
    asked: int

    def __str__(self) -> str:
        return (
            f"{self.path} holds {self.holds} whole events, and the run goes on after {self.asked}. "
            "Put the log of that run there, or go on from an earlier checkpoint."
        )


@attrs.define(slots=False, eq=False, repr=False)
class LogInUseError(LogError, RuntimeError):
    """A log that another run is writing."""

    path: str

    def __str__(self) -> str:
        return (
            f"{self.path} is being written by another EventLog. Give each run a folder of its own, "
            "and in a run of several ranks give the log to one of them."
        )


class CheckpointError(FoldtrainError, ValueError):
    """A checkpoint that cannot be written, found, read or used. What failed underneath is its cause."""


@attrs.define(slots=False, eq=False, repr=False)
class DamagedCheckpointError(CheckpointError):
    """The files of a checkpoint are not those that were written."""

    path: str
    problem: str

    def __str__(self) -> str:
        return (
            f"{self.path} is damaged: {self.problem}. Go on from an earlier one: `latest()` passes over those that are."
        )


@attrs.define(slots=False, eq=False, repr=False)
class CheckpointFormatError(CheckpointError):
    """A checkpoint in the format of a later version."""

    path: str
    format: object
    known: int

    def __str__(self) -> str:
        return (
            f"{self.path} is in format {self.format!r}, and this version of foldtrain knows up to {self.known}. "
            "Read it with a newer one."
        )


@attrs.define(slots=False, eq=False, repr=False)
class StoreInUseError(CheckpointError, RuntimeError):
    """A folder that another run is saving to."""

    folder: str

    def __str__(self) -> str:
        return f"Another run is saving to {self.folder}: give this one a folder of its own, or wait for that to end."


class LawError(FoldtrainError, AssertionError):
    """A law of `pipeline.testing` does not hold; the message says where the two sides part."""

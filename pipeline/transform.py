"""A transform is any callable `Frame -> Frame`. `chain` composes them, checks their order, and is one itself.

Optional, by name: `init(state) -> state` for durable state, `finish(frame) -> frame` for one that holds a window
open (a pass at the end of the stream starts there), `reads` / `writes` / `uses_up` for the order check,
`fuse(before)` for a pair that is cheaper as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast, runtime_checkable

import attrs

from pipeline._declared import fields, is_declared, name_of, show
from pipeline.errors import DuplicateNameError, NotATransformError, OrderError, UnknownNameError
from pipeline.records import Frame, TrainState

__all__ = ["Chain", "Transform", "chain", "named"]


@runtime_checkable
class Transform(Protocol):
    """Anything that takes a frame and returns a frame: a plain function will do."""

    def __call__(self, frame: Frame, /) -> Frame: ...


_FROM_THE_START = frozenset(
    {
        "state", "batch", "time", "began", "facts", "events",
        "params", "buffers", "optimizer", "window", "loss_scale", "progress", "rng", "slots",
    }
)  # fmt: skip
"""What every frame has before the first transform."""

_WRITERS = {
    "loss": "Forward",
    "grads": "ScaledBackward",
    "window.grads": "ScaledBackward and Accumulate",
    "ready": "Accumulate",
    "update_factor": "Accumulate",
    "applied": "MaybeStep",
    "closed": "MaybeStep",
}


@attrs.frozen
class _Named:
    """`inner` under another name; everything else is as `inner` has it."""

    name: str
    inner: Transform

    def __call__(self, frame: Frame) -> Frame:
        return self.inner(frame)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(self.inner, attribute)

    def __repr__(self) -> str:
        return f"named({self.name!r}, {show(self.inner)})"


def named(name: str, transform: Transform) -> Transform:
    """`transform` under a name of its own, for chains that hold two of a kind and for editing by name."""
    return _Named(name, _as_transform(transform))


def _as_transform(candidate: object) -> Transform:
    if isinstance(candidate, type) or not callable(candidate):
        cure = "a transform is a callable Frame -> Frame"
        if isinstance(candidate, type):
            cure += f"; did you mean {candidate.__name__}(...), an instance?"
        raise NotATransformError("a chain cannot hold", candidate, cure)
    return cast(Transform, candidate)


@attrs.frozen
class _Checked:
    """A transform that is not ours, held to the protocol: what it returns must be a frame."""

    inner: Transform

    def __call__(self, frame: Frame) -> Frame:
        result = self.inner(frame)
        if not isinstance(result, Frame):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise NotATransformError(
                f"the transform {name_of(self.inner)!r} returned", result, "return the frame, changed or not"
            )
        return result


def _flatten(transforms: Iterable[object]) -> Iterable[Transform]:
    for candidate in transforms:
        if isinstance(candidate, Chain):
            yield from candidate.transforms
        else:
            yield _as_transform(candidate)


def _check_names(transforms: tuple[Transform, ...]) -> None:
    seen: set[str] = set()
    for transform in transforms:
        name = name_of(transform)
        if name in seen:
            raise DuplicateNameError("transform", name)
        seen.add(name)


def _rank(field: str) -> tuple[int, str]:
    """What says most first: the fields in the order in which a step comes to have them."""
    known = list(_WRITERS)
    return known.index(field) if field in known else len(known), field


def _writer(field: str, found: list[str]) -> str:
    """What to put a reader of `field` after: the transform found in the chain, and what that one needs itself."""
    usual = _WRITERS.get(field, "what writes it")
    return usual if not found or found[-1] in usual else found[-1]


def _check_order(transforms: tuple[Transform, ...]) -> None:
    """Raise OrderError when a transform reads what comes later, what was used up, or what nothing provides.

    A fragment (one whose first transform reads what no frame starts with) is checked for the first two only: the
    rest is checked when it is joined to what comes before. Transforms that declare nothing may provide anything.
    """
    available = set(_FROM_THE_START)
    used_up: dict[str, str] = {}
    first = next((r for t in transforms if (r := fields(t, "reads"))), frozenset[str]())
    whole = first <= _FROM_THE_START
    anything = False
    for place, transform in enumerate(transforms):
        name = name_of(transform)
        anything = anything or not is_declared(transform)
        for field in sorted(fields(transform, "reads") - available, key=_rank):
            writers = [
                name_of(t)
                for t in transforms[place + 1 :]
                if field in fields(t, "writes") and field not in fields(t, "reads")  # one that reads it only changes it
            ]
            if field in used_up:
                raise OrderError(name, field, f"{used_up[field]} has used up", f"put it before {used_up[field]}")
            if writers or (whole and not anything):
                raise OrderError(name, field, "nothing before it writes", f"put it after {_writer(field, writers)}")
        available |= fields(transform, "writes")
        for field in fields(transform, "uses_up"):
            available.discard(field)
            used_up[field] = name


def _resolve(transforms: tuple[Transform, ...]) -> tuple[tuple[str, Callable[[Frame], Frame]], ...]:
    """What is called, in order, each with its name: pairs that are cheaper as one are fused here, once."""
    calls: list[tuple[str, Callable[[Frame], Frame]]] = []
    for place, transform in enumerate(transforms):
        fuse = getattr(transform, "fuse", None)
        pair = fuse(transforms[place - 1]) if fuse is not None and place else None
        if pair is not None:
            calls[-1] = (f"{calls[-1][0]} and {name_of(transform)}", pair)
        else:
            calls.append((name_of(transform), transform if is_declared(transform) else _Checked(transform)))
    return tuple(calls)


@attrs.frozen(init=False, repr=False)
class Chain:
    """Transforms in a row, itself a transform. Made by `chain`; edited by name into other chains."""

    transforms: tuple[Transform, ...]
    _calls: tuple[tuple[str, Callable[[Frame], Frame]], ...] = attrs.field(eq=False)

    def __init__(self, transforms: tuple[Transform, ...]) -> None:
        _check_names(transforms)
        _check_order(transforms)
        self.__attrs_init__(transforms, _resolve(transforms))  # pyright: ignore[reportAttributeAccessIssue]

    def __call__(self, frame: Frame) -> Frame:
        name = ""
        try:
            for name, call in self._calls:  # noqa: B007 - read when a call fails
                frame = call(frame)
        except Exception as error:
            error.add_note(f"in {name} at micro-step {frame.began.micro_steps}")
            raise
        return frame

    def init(self, state: TrainState) -> TrainState:
        """Let each transform with durable state add it, in order."""
        for transform in self.transforms:
            if hasattr(transform, "init"):
                state = transform.init(state)  # type: ignore[attr-defined]
        return state

    def finish(self, frame: Frame) -> Frame:
        """Close what is open at the end of the stream: the pass starts at the first transform that holds a window."""
        open_ = False
        transform: Transform | None = None
        try:
            for transform in self.transforms:
                if hasattr(transform, "finish"):
                    open_, frame = True, transform.finish(frame)  # type: ignore[attr-defined]
                elif open_:
                    frame = transform(frame)
        except Exception as error:
            error.add_note(f"in {name_of(transform)} at the end of the stream")
            raise
        return frame

    def windows(self, batches: int) -> int | None:
        """How many windows a pass over so many batches closes, where one transform, and no other, knows."""
        known = [transform.windows(batches) for transform in self.transforms if hasattr(transform, "windows")]  # type: ignore[attr-defined]
        return known[0] if len(known) == 1 else None

    # What it reads and writes as a whole, so that `when(…, chain(…))` is checked like any other transform.
    @property
    def reads(self) -> frozenset[str]:
        """What the chain needs from before it."""
        needed: set[str] = set()
        written: set[str] = set()
        for transform in self.transforms:
            needed |= fields(transform, "reads") - written
            written |= fields(transform, "writes")
        return frozenset(needed)

    @property
    def writes(self) -> frozenset[str]:
        """What any of its transforms writes."""
        return frozenset[str]().union(*(fields(t, "writes") for t in self.transforms))

    @property
    def uses_up(self) -> frozenset[str]:
        """What is gone after it."""
        return frozenset[str]().union(*(fields(t, "uses_up") for t in self.transforms))

    # -- editing by name: each returns another chain, checked anew --------------------------------------------------

    def insert_before(self, name: str, *transforms: Transform) -> Chain:
        """The chain with `transforms` in front of the one called `name`."""
        i = self._place(name)
        return chain(*self.transforms[:i], *transforms, *self.transforms[i:])

    def insert_after(self, name: str, *transforms: Transform) -> Chain:
        """The chain with `transforms` behind the one called `name`."""
        i = self._place(name) + 1
        return chain(*self.transforms[:i], *transforms, *self.transforms[i:])

    def replace(self, name: str, *transforms: Transform) -> Chain:
        """The chain with `transforms` in place of the one called `name`."""
        i = self._place(name)
        return chain(*self.transforms[:i], *transforms, *self.transforms[i + 1 :])

    def without(self, *names: str) -> Chain:
        """The chain without the transforms of these names."""
        places = {self._place(name) for name in names}
        return chain(*(t for i, t in enumerate(self.transforms) if i not in places))

    def __getitem__(self, name: str) -> Transform:
        return self.transforms[self._place(name)]

    def _place(self, name: str) -> int:
        names = [name_of(t) for t in self.transforms]
        if name not in names:
            raise UnknownNameError("The chain", name, names)
        return names.index(name)

    def __repr__(self) -> str:
        return f"chain({', '.join(show(t) for t in self.transforms)})"

    def __str__(self) -> str:
        """The pipeline, one transform a line, with what each reads and writes."""
        if not self.transforms:
            return "chain(): the identity"
        rows = [(show(t), _declared(t)) for t in self.transforms]
        width = min(max(len(row[0]) for row in rows), 60)
        return "\n".join(f"{i}. {shown:<{width}}  {says}" for i, (shown, says) in enumerate(rows, 1))


def _declared(transform: Transform) -> str:
    if not is_declared(transform):
        return "(says nothing of what it reads and writes)"
    reads, writes = sorted(fields(transform, "reads")), sorted(fields(transform, "writes"))
    return f"{', '.join(reads) or 'nothing'} → {', '.join(writes) or 'nothing'}"


def chain(*transforms: Transform) -> Chain:
    """Compose transforms: each gets the frame that the one before it returned. Nested chains are flattened.

    The order is checked here: a transform that declares what it reads must come after what writes it.
    `chain()` is the identity.

    Raises: NotATransformError, DuplicateNameError, OrderError, each with the cure.

    >>> print(chain())
    chain(): the identity
    """
    return Chain(tuple(_flatten(transforms)))

"""Transforms made of transforms: `when`, `every`, `branch`, `repeat`, `tap`.

Optional behaviour is a wrapper, not a flag. Each passes on what its inner transform declares, so that the order
of a chain is checked through it, and `init` and `finish` reach inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import attrs

from pipeline._checks import whole
from pipeline._declared import fields, is_declared, name_of, show
from pipeline.errors import NotATransformError, SettingError
from pipeline.records import Frame, TrainState
from pipeline.transform import Transform, chain

__all__ = ["branch", "every", "repeat", "tap", "when"]

Predicate = Callable[[Frame], bool]


def _one(transform: Transform) -> Transform:
    """`transform` itself, checked: a chain of one that holds it to the protocol."""
    whole = chain(transform)
    return whole if len(whole.transforms) != 1 or not is_declared(transform) else transform


class _Wrapper:
    """What all combinators share: the inner transforms' declarations, `init` and `finish`."""

    __slots__ = ()

    @property
    def _inner(self) -> tuple[Transform, ...]:
        raise NotImplementedError

    @property
    def _always(self) -> bool:
        return True

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "uses_up" and not self._always:
            return frozenset[str]()  # what is used up only now and then may be there for the next one
        if attribute in ("reads", "writes", "uses_up") and all(is_declared(t) for t in self._inner):
            return frozenset[str]().union(*(fields(t, attribute) for t in self._inner))
        if attribute == "init" and any(hasattr(t, "init") for t in self._inner):
            return self._init
        if attribute == "finish" and any(hasattr(t, "finish") for t in self._inner):
            return self._finish
        raise AttributeError(attribute)

    def _init(self, state: TrainState) -> TrainState:
        for transform in self._inner:
            if hasattr(transform, "init"):
                state = transform.init(state)  # type: ignore[attr-defined]
        return state

    def _finish(self, frame: Frame) -> Frame:
        raise NotImplementedError


def _finish_or_call(transform: Transform, frame: Frame) -> Frame:
    return getattr(transform, "finish", transform)(frame)


@attrs.frozen
class _When(_Wrapper):
    predicate: Predicate
    then: Transform
    otherwise: Transform | None
    name: str
    text: str = attrs.field(eq=False)

    @property
    def _inner(self) -> tuple[Transform, ...]:
        return (self.then,) if self.otherwise is None else (self.then, self.otherwise)

    @property
    def _always(self) -> bool:
        return self.otherwise is not None

    def __call__(self, frame: Frame) -> Frame:
        if self.predicate(frame):
            return self.then(frame)
        return frame if self.otherwise is None else self.otherwise(frame)

    def _finish(self, frame: Frame) -> Frame:
        if self.predicate(frame):
            return _finish_or_call(self.then, frame)
        return frame if self.otherwise is None else _finish_or_call(self.otherwise, frame)

    def __repr__(self) -> str:
        return self.text


def when(predicate: Predicate, transform: Transform) -> Transform:
    """`transform` on the frames for which `predicate(frame)` is true; the others pass unchanged.

    A predicate that looks at a tensor's value makes the host wait for the device.
    """
    text = f"when({show(predicate)}, {show(transform)})"
    return _When(predicate, _one(transform), None, name_of(transform), text)


def branch(predicate: Predicate, then: Transform, otherwise: Transform) -> Transform:
    """`then` where `predicate(frame)` is true, `otherwise` where it is not."""
    text = f"branch({show(predicate)}, {show(then)}, {show(otherwise)})"
    return _When(predicate, _one(then), _one(otherwise), "branch", text)


@attrs.frozen
class _Nth:
    n: int
    of: str

    def __call__(self, frame: Frame) -> bool:
        began = frame.began
        count = began.micro_steps if self.of == "micro_batches" else began.updates + began.skipped
        return (count + 1) % self.n == 0


def every(n: int, transform: Transform, of: Literal["windows", "micro_batches"] = "windows") -> Transform:
    """`transform` in every n-th window (the n-th, 2n-th, …), or on every n-th micro-batch.

    Counted from the start of training, so that resuming changes nothing.

    Raises: SettingError unless n is a whole number of at least 1, or for another `of`.
    """
    whole("every(n)", n)
    if of not in ("windows", "micro_batches"):
        raise SettingError("every(of)", "'windows' or 'micro_batches'", of)
    text = f"every({n}, {show(transform)}{'' if of == 'windows' else f', of={of!r}'})"
    return _When(_Nth(n, of), _one(transform), None, name_of(transform), text)


@attrs.frozen
class _Repeat(_Wrapper):
    n: int
    inner: Transform
    name: str

    @property
    def _inner(self) -> tuple[Transform, ...]:
        return (self.inner,)

    def __call__(self, frame: Frame) -> Frame:
        for _ in range(self.n):
            frame = self.inner(frame)
        return frame

    def _finish(self, frame: Frame) -> Frame:
        return _finish_or_call(self.inner, frame)

    def __repr__(self) -> str:
        return f"repeat({self.n}, {show(self.inner)})"


def repeat(n: int, transform: Transform) -> Transform:
    """`transform` n times in a row on the same frame: several updates from one batch, say.

    Raises: SettingError unless n is a whole number of at least 1.
    """
    whole("repeat(n)", n)
    return _Repeat(n, _one(transform), name_of(transform))


@attrs.frozen
class _Tap:
    look: Callable[[Frame], object]
    name: str
    reads = frozenset[str]()
    writes = frozenset[str]()

    def __call__(self, frame: Frame) -> Frame:
        returned = self.look(frame)
        if isinstance(returned, Frame) and returned is not frame:
            raise NotATransformError(
                f"tap({show(self.look)}) returned",
                returned,
                "a tap only looks; put the function itself into the chain to change the frame",
            )
        return frame

    def __repr__(self) -> str:
        return f"tap({show(self.look)})"


def tap(look: Callable[[Frame], object]) -> Transform:
    """Call `look(frame)` and pass the frame on as it is: a `print`, a list's `append`, a breakpoint.

    The loss in the frame has a graph: look at `frame.loss.detach()`. In the pass that closes a short window at the
    end of the stream, what stands behind Accumulate sees a frame without batch and loss.
    """
    if not callable(look):
        raise NotATransformError("tap cannot call", look, "give it a callable that takes a frame")
    return _Tap(look, f"tap {name_of(look)}")  # type: ignore[arg-type]

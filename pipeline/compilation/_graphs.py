"""Parts in a row that run as graphs, one for each kind of frame that comes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import attrs
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from pipeline._declared import name_of
from pipeline._models import models_in
from pipeline.compilation._backend import Backend, compile_graph
from pipeline.compilation._graph import NO_CONDITION, Graph, Working
from pipeline.compilation._lifting import Condition, Lifting
from pipeline.compilation._numbers import Untraceable
from pipeline.compilation._source import Source
from pipeline.compilation._stepping import NotYetError, Stepping
from pipeline.compilation._tracing import PartError, Traced, trace
from pipeline.compilation._window import Form
from pipeline.records import Frame
from pipeline.transform import Transform, chain

__all__ = ["FailedError", "Graphs", "Listener", "Settings", "reason_of"]


@attrs.frozen
class Settings:
    """How graphs are made."""

    backend: str | Backend
    dynamic: bool | None
    limit: int
    options: Mapping[str, Any]


class Listener(Protocol):
    """Who is told where graphs end."""

    def fell_back(self, parts: Sequence[Transform], reason: str) -> None:
        """These parts run as they are from now on."""
        ...

    def gave_up(self, parts: Sequence[Transform], reason: str) -> None:
        """No further graphs of these parts are made."""
        ...


class FailedError(Exception):
    """No graph could be made: which parts are to run as they are, and why."""

    def __init__(self, parts: Sequence[Transform], reason: str) -> None:
        super().__init__(reason)
        self.parts, self.reason = parts, reason


class _LimitError(Exception):
    """As many graphs were made as there may be."""


class Graphs:
    """Parts in a row as graphs; where one cannot be made, they run as they are."""

    unseen = frozenset({"optimizer"})
    """The fields of a frame that the parts are not given."""

    def __init__(self, parts: Sequence[Transform], settings: Settings, listener: Listener) -> None:
        self.parts, self.made = parts, list[Working]()
        self._settings, self._listener = settings, listener
        self._as_they_are = chain(*parts)
        self._modules = [module for model in models_in(self._as_they_are) for module in model.modules()]
        self._shapes: dict[str, list[int | None]] = {}
        self._is_full = False
        self._ending: Stepping | None = None

    def __call__(self, frame: Frame) -> Frame:
        return self._through(frame)

    def _through(self, frame: Frame) -> Any:
        """What the graph that serves the frame makes of it, or the parts as they are."""
        try:
            working, begun = self._found(frame)
        except FailedError as failed:
            after = self._as_they_are(frame)  # an error of the user's own comes out here
            self._listener.fell_back(failed.parts, failed.reason)
            return after
        except _LimitError:
            return self._as_they_are(frame)
        return working.run(begun)

    def _found(self, frame: Frame) -> tuple[Working, Frame]:
        """The graph that serves the frame, and the frame as it is to have it."""
        return self._serving(frame) or self._made(frame), frame

    def _serving(self, frame: Frame, form: Form | None = None) -> Working | None:
        for working in self.made:
            try:
                if (form is None or working.form is form) and working.serves(frame):
                    return working
            except NO_CONDITION:
                continue
        return None

    # -- making one -------------------------------------------------------------------------------------------------

    def _made(self, frame: Frame) -> Working:
        lifting = self._lifted(frame)
        began = time.perf_counter()
        traced = self._traced(lifting)
        return self._compiled(lifting, traced, frame, time.perf_counter() - began)

    def _lifted(self, frame: Frame) -> Lifting:
        if len(self.made) >= self._settings.limit:
            self._give_up(frame)
        writes = self._as_they_are.writes
        if torch.is_grad_enabled() and "loss" in writes and "grads" not in writes:
            reason = "the loss would leave the graph before its gradients are taken; compile ScaledBackward with it"
            raise FailedError(self.parts, reason)
        try:
            return Lifting(frame, Source(), self._free, self.unseen)
        except Untraceable as error:
            raise FailedError(self.parts, str(error)) from error
        except Exception as error:  # whatever a container of the user's makes of being made anew
            raise FailedError(self.parts, f"what the frame holds cannot be made anew: {error!r}") from error

    def _traced(self, lifting: Lifting) -> Traced:
        try:
            return trace(self._to_trace(), lifting, self._ending)
        except PartError as error:
            if isinstance(error.__cause__, NotYetError):
                raise error.__cause__ from None
            raise FailedError([self.parts[error.place]], reason_of(error)) from error
        except Untraceable as error:
            raise FailedError(self.parts, str(error)) from error

    def _to_trace(self) -> Sequence[Transform]:
        return self.parts

    def _compiled(self, lifting: Lifting, traced: Traced, frame: Frame, seconds: float) -> Working:
        began = time.perf_counter()
        inputs = [*lifting.fakes, lifting.numbers(len(lifting.ledger.met))]
        given = [inputs[place].detach() for place in traced.used]
        try:
            call = compile_graph(traced.graph, given, self._settings.backend, self._settings.options)
        except Exception as error:
            reason = f"{self._settings.backend} cannot compile their graph ({_first_line(error)})"
            raise FailedError(self.parts, reason) from error
        names = tuple(map(name_of, self.parts))
        about = Graph(names, self._why(frame), seconds, time.perf_counter() - began)
        working = Working(lifting, traced, call, self._modes(frame, lifting.source), about)
        self.made.append(working)
        return working

    def _free(self, path: str, shape: Sequence[int]) -> frozenset[int]:
        """The dimensions of a tensor of the batch whose sizes are inputs: those that have changed, unless told else."""
        dynamic = self._settings.dynamic
        if not path.startswith("f.batch") or dynamic is False:
            return frozenset()
        if dynamic:
            return frozenset(range(len(shape)))
        seen = self._shapes.get(path)
        if seen is None or len(seen) != len(shape):
            seen = self._shapes[path] = list(shape)
        for place, size in enumerate(shape):
            if seen[place] != size:
                seen[place] = None
        return frozenset(place for place, size in enumerate(seen) if size is None)

    def _modes(self, frame: Frame, source: Source) -> Condition:
        """What a trace depends on that lies in no frame."""
        kind = frame.state.params.flat[0].device.type
        autocast = f"torch.get_autocast_dtype({kind!r}) if torch.is_autocast_enabled({kind!r}) else None"
        training = f"[module.training for module in {source.name(self._modules)}]"
        code = f"(torch.is_grad_enabled(), {autocast}, {training})"
        now = source.function([f"return {code}"])(frame)
        return Condition(code, now, "the modes of modules, autocast or gradients")

    def _why(self, frame: Frame) -> str:
        if not self.made:
            return "the first"
        nearest = min((working.failing(frame) for working in self.made), key=len)
        return "; ".join(nearest[:3])

    def _give_up(self, frame: Frame) -> NoReturn:
        if not self._is_full:
            self._is_full = True
            self._listener.gave_up(self.parts, self._why(frame))
        raise _LimitError


def reason_of(error: PartError) -> str:
    """Why a part cannot be in a graph, in words."""
    cause = error.__cause__
    if isinstance(cause, (DataDependentOutputException, DynamicOutputShapeException)):
        return "it looks at the value of a tensor"
    return str(cause) if isinstance(cause, Untraceable) else f"{_first_line(cause)}"


def _first_line(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__

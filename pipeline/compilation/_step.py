"""`compiled`: a step whose parts run as graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from pipeline._checks import whole
from pipeline.compilation._backend import Backend, known_options
from pipeline.compilation._graph import Graph
from pipeline.compilation._graphs import Settings
from pipeline.compilation._micro_batches import OfMicroBatches
from pipeline.compilation._segments import Segments
from pipeline.errors import SettingError
from pipeline.records import Frame, TrainState
from pipeline.transform import Chain, Transform, chain

__all__ = ["Compiled", "compiled"]


@attrs.frozen(repr=False)
class Compiled:
    """What `compiled` makes of a step: a transform that runs its parts as graphs."""

    inner: Chain
    backend: str | Backend = "inductor"
    dynamic: bool | None = None
    limit: int = 16
    options: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    _segments: Segments = attrs.field(init=False, eq=False)

    def __attrs_post_init__(self) -> None:
        if any(isinstance(part, Compiled) for part in self.inner.transforms):
            raise SettingError("compiled(step)", "a step of which nothing is compiled yet", self.inner)
        if self.backend not in ("inductor", "eager") and not callable(self.backend):
            raise SettingError("compiled(backend)", "'inductor', 'eager' or a function of a graph", self.backend)
        if self.dynamic not in (None, True, False):
            raise SettingError("compiled(dynamic)", "True, False or None", self.dynamic)
        whole("compiled(limit)", self.limit)
        if self.options:
            _check_options(self.options, self.backend)
        settings = Settings(self.backend, self.dynamic, self.limit, self.options)
        object.__setattr__(self, "_segments", Segments(self.inner.transforms, settings))

    def __call__(self, frame: Frame) -> Frame:
        segments = self._segments.now
        for segment in segments:
            frame = segment(frame)
        for segment in segments:
            if isinstance(segment, OfMicroBatches):
                segment.ended(frame)
        return frame

    def init(self, state: TrainState) -> TrainState:
        """As the step itself."""
        return self.inner.init(state)

    def finish(self, frame: Frame) -> Frame:
        """As the step itself, without a graph: it comes once a pass."""
        return self.inner.finish(frame)

    def windows(self, batches: int) -> int | None:
        """As the step itself."""
        return self.inner.windows(batches)

    @property
    def reads(self) -> frozenset[str]:
        """As the step itself."""
        return self.inner.reads

    @property
    def writes(self) -> frozenset[str]:
        """As the step itself."""
        return self.inner.writes

    @property
    def uses_up(self) -> frozenset[str]:
        """As the step itself."""
        return self.inner.uses_up

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs made so far, and why each."""
        return tuple(working.about for segment in self._segments.graphs for working in segment.made)

    @property
    def eager(self) -> Mapping[str, str]:
        """The parts that run as they are though they were to be compiled: name -> reason."""
        return dict(self._segments.eager)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, in another process too, makes its graphs anew."""
        return type(self), (self.inner, self.backend, self.dynamic, self.limit, self.options)

    def __repr__(self) -> str:
        return f"compiled({self.inner!r})"


def _check_options(options: Mapping[str, Any], backend: str | Backend) -> None:
    if backend != "inductor":
        raise SettingError("compiled(options)", "left out: only inductor has options", dict(options))
    unknown = [name for name in options if name not in known_options()]
    if unknown:
        expected = "settings of torch._inductor.config, such as 'max_autotune'"
        raise SettingError("compiled(options)", expected, unknown[0])


def compiled(
    step: Transform,
    *,
    backend: str | Backend = "inductor",
    dynamic: bool | None = None,
    limit: int = 16,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """`step` with its parts run as graphs of tensor operations: one while a window is open, one where it is full.

    Put into graphs: what stands before Accumulate and that, forward and backward in one; and what stands behind it up
    to MaybeStep. Left as they are: EmitEvents, `tap`, what comes behind MaybeStep, the `finish` of a stream, the first
    update, which makes the optimizer's state; and, with more than 32 parameters, an optimizer with a fused kernel or
    compiled by itself, and a ClipByGlobalNorm directly before it. Any other part that cannot be in a graph runs as it
    is, with one EagerPartWarning that says why; so does one whose result is needed where no graph can give it.

    Inputs of a graph, which may change without another one: the tensors of the state and of the batch, the counters,
    rates and other scheduled settings, the loss scale, weights, and numbers in a batch. What a graph is made for: the
    shapes and kinds of tensors, the form of the batch, strings and flags in it, which parameters are trained, the
    modes of the modules, autocast, and which way the code went where a number decided. A frame that differs in these
    gets a graph of its own, and `graphs` says why each was made.

    Random numbers are drawn as the step itself draws them, by seed and micro-step. The step's numbers are those of the
    step itself but for rounding: within 1e-5 relative over a hundred updates.

    Args:   step: any transform; a chain is taken apart.
            backend: "inductor" makes code and keeps it on disk for the next start; "eager" runs the graphs as they
            are, to see what becomes of a step without waiting for a compiler; or a function of a graph and of inputs
            like those to come, as for `torch.compile`.
            dynamic: which sizes in a batch are inputs: None, those that have been seen to change; True, all; False,
            none.
            limit: graphs that may be made of the same parts; what none of these serves then runs as it is, with a
            warning.
            options: settings of inductor, as for `torch.compile(options=...)`.
    Raises: SettingError, when built, for any other backend, dynamic or limit, for options that inductor does not have,
            and for a step that is compiled, or partly, already.
    """
    return Compiled(chain(step), backend, dynamic, limit, dict(options or {}))

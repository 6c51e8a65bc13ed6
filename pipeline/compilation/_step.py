"""`compiled`: a step whose parts run as graphs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from pipeline._checks import whole
from pipeline._declared import fields, name_of
from pipeline._models import models_in
from pipeline.combinators import _Tap  # pyright: ignore[reportPrivateUsage]
from pipeline.compilation._backend import Backend, known_options
from pipeline.compilation._graph import Graph
from pipeline.compilation._graphs import Graphs, OfMicroBatches, OfUpdates, OfWindows, Settings
from pipeline.compilation._stepping import has_its_own_kernel
from pipeline.errors import SettingError
from pipeline.records import Frame, TrainState
from pipeline.transform import Chain, Transform, _Named, chain  # pyright: ignore[reportPrivateUsage]
from pipeline.transforms import Accumulate, ClipByGlobalNorm, EmitEvents, MaybeStep

__all__ = ["Compiled", "EagerPartWarning", "compiled"]


class EagerPartWarning(UserWarning):
    """Parts of a compiled step run as they are."""


class _Segments:
    """The parts of a step in segments, and which of them were found to run as they are."""

    def __init__(self, parts: Sequence[Transform], settings: Settings) -> None:
        self.eager: dict[str, str] = {}  # name -> reason
        self._parts, self._settings = parts, settings
        self.now: Sequence[Graphs | Chain] = ()
        self._split()

    def fell_back(self, parts: Sequence[Transform], reason: str) -> None:
        names = [name_of(part) for part in parts]
        self.eager.update(dict.fromkeys(names, reason))
        self._split()
        verb = "runs as it is" if len(names) == 1 else "run as they are"
        warnings.warn(f"{_listed(names)} in a compiled step {verb}: {reason}.", EagerPartWarning, stacklevel=2)

    def gave_up(self, parts: Sequence[Transform], reason: str) -> None:
        names = _listed([name_of(part) for part in parts])
        warnings.warn(
            f"{self._settings.limit} graphs of {names} were made, and another would be needed: {reason}. What none of "
            "them serves runs as it is; make what changes a tensor, or give `compiled` a higher limit.",
            EagerPartWarning,
            stacklevel=2,
        )

    def _split(self) -> None:
        known = {tuple(map(name_of, segment.parts)): segment for segment in self.graphs}
        self.now = [
            self._segment(parts, behind, known) if is_graph else chain(*parts)
            for parts, is_graph, behind in _split(self._parts, frozenset(self.eager))
        ]

    @property
    def graphs(self) -> list[Graphs]:
        """The segments that are graphs."""
        return [segment for segment in self.now if isinstance(segment, Graphs)]

    def _segment(self, parts: Sequence[Transform], behind: bool, known: Mapping[tuple[str, ...], Graphs]) -> Graphs:
        names = tuple(map(name_of, parts))
        if names in known:
            return known[names]
        last = _bare(parts[-1])
        if isinstance(last, Accumulate):
            return OfMicroBatches(parts, last, self._settings, self)
        if isinstance(last, MaybeStep):
            return OfUpdates(parts, last, self._settings, self)
        return (OfWindows if behind else Graphs)(parts, self._settings, self)


def _split(parts: Sequence[Transform], eager: frozenset[str]) -> list[tuple[list[Transform], bool, bool]]:
    """The parts in segments, each with whether it is a graph, and whether it stands behind Accumulate.

    Accumulate ends a segment, so that what comes behind it, once a window, is a graph of its own, which no batch
    shapes. The step, and what comes behind it or speaks to the host, runs as it is. The loss does not leave a graph
    before its gradients are taken.
    """
    bare = [_bare(part) for part in parts]
    steps = [(i, part) for i, part in enumerate(bare) if isinstance(part, MaybeStep)]
    last = steps[0][0] if steps else len(parts)
    apart = {i for i, part in enumerate(parts) if i > last or name_of(part) in eager}
    for i, step in steps:
        if has_its_own_kernel(step.optimizer, _parameters(parts)):
            apart.add(i)
            if isinstance(bare[i - 1], ClipByGlobalNorm):  # so has the norm, and the factor is the optimizer's
                apart.add(i - 1)
    apart |= {i for i, part in enumerate(bare) if isinstance(part, (EmitEvents, _Tap))}
    for loss in (i for i, part in enumerate(bare) if "loss" in fields(part, "writes")):
        grads = next((i for i in range(loss, len(parts)) if "grads" in fields(bare[i], "writes")), loss)
        if apart.intersection(range(loss, grads + 1)):
            apart.update(range(loss, grads + 1))
    found: list[tuple[list[Transform], bool, bool]] = []
    behind = False
    for i, part in enumerate(parts):
        is_graph = i not in apart
        if not found or found[-1][1:] != (is_graph, behind):
            found.append(([], is_graph, behind))
        found[-1][0].append(part)
        behind = behind or isinstance(bare[i], Accumulate)
    return found


def _parameters(parts: Sequence[Transform]) -> int:
    models = {id(model): model for model in models_in(chain(*parts))}
    return sum(param.requires_grad for model in models.values() for param in model.parameters())


def _bare(part: Transform) -> Transform:
    return part.inner if isinstance(part, _Named) else part


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


@attrs.frozen(repr=False)
class Compiled:
    """What `compiled` makes of a step: a transform that runs its parts as graphs."""

    inner: Chain
    backend: str | Backend = "inductor"
    dynamic: bool | None = None
    limit: int = 16
    options: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    _segments: _Segments = attrs.field(init=False, eq=False)

    def __attrs_post_init__(self) -> None:
        if self.backend not in ("inductor", "eager") and not callable(self.backend):
            raise SettingError("compiled(backend)", "'inductor', 'eager' or a function of a graph", self.backend)
        if self.dynamic not in (None, True, False):
            raise SettingError("compiled(dynamic)", "True, False or None", self.dynamic)
        whole("compiled(limit)", self.limit)
        if self.options:
            _check_options(self.options, self.backend)
        settings = Settings(self.backend, self.dynamic, self.limit, self.options)
        object.__setattr__(self, "_segments", _Segments(self.inner.transforms, settings))

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
    Raises: SettingError, when built, for any other backend, dynamic or limit.
    """
    return Compiled(chain(step), backend, dynamic, limit, dict(options or {}))

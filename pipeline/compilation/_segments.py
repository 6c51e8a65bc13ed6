"""The parts of a step in segments: what is a graph, what never is, and what was found not to be."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from pipeline._declared import fields, name_of
from pipeline._models import models_in
from pipeline.combinators import _Tap  # pyright: ignore[reportPrivateUsage]
from pipeline.compilation._graphs import Graphs, Settings
from pipeline.compilation._micro_batches import OfMicroBatches
from pipeline.compilation._stepping import has_its_own_kernel
from pipeline.compilation._updates import OfUpdates, OfWindows
from pipeline.transform import Chain, Transform, _Named, chain  # pyright: ignore[reportPrivateUsage]
from pipeline.transforms import Accumulate, ClipByGlobalNorm, EmitEvents, MaybeStep

__all__ = ["EagerPartWarning", "Segments"]


class EagerPartWarning(UserWarning):
    """Parts of a compiled step run as they are."""


class Segments:
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

"""`part`: a step for one part of a model, with an optimizer, a window and counts of its own."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import attrs

from pipeline._declared import fields, is_declared, show
from pipeline._patterns import as_patterns, places
from pipeline.errors import MissingFieldError, SettingError
from pipeline.events import Event
from pipeline.records import Frame, Part, Progress, TrainState
from pipeline.transform import Chain, Transform, chain

__all__ = ["part"]

_OUTSIDE = frozenset({"params", "buffers", "slots", "progress", "applied", "events"})
"""What a part changes of the frame; the rest is its own affair."""


@attrs.frozen
class _Part:
    name: str
    patterns: tuple[str, ...]
    inner: Chain
    text: str = attrs.field(eq=False)

    @property
    def _slot(self) -> str:
        return f"part {self.name}"

    def __getattr__(self, attribute: str) -> Any:
        declared = all(is_declared(t) for t in self.inner.transforms)
        if attribute == "reads" and declared:
            return fields(self.inner, "reads")
        if attribute == "writes" and declared:
            return _OUTSIDE
        raise AttributeError(attribute)

    def init(self, state: TrainState) -> TrainState:
        """Give the part a state of its own, and let its transforms add theirs."""
        self._others(state)
        inside = self.inner.init(state)
        own = Part(optimizer=inside.optimizer, loss_scale=state.loss_scale)
        slots = {**inside.slots, self._slot: own}
        return attrs.evolve(inside, optimizer=state.optimizer, slots=slots)

    def __call__(self, frame: Frame) -> Frame:
        return self._within(frame, self.inner)

    def finish(self, frame: Frame) -> Frame:
        """Close the part's open window at the end of the stream."""
        if not self._own(frame.state).window.micro_batches:
            return frame
        return self._within(frame, self.inner.finish)

    def _within(self, frame: Frame, call: Any) -> Frame:
        """`call` on the frame as the part sees it, and what came of it as the rest of the step sees it."""
        state, own = frame.state, self._own(frame.state)
        p, began = state.progress, frame.began
        mine = Progress(
            began.micro_steps, own.updates, own.skipped, p.epoch, began.samples, began.tokens, own.skips_in_row
        )
        inside = attrs.evolve(
            state, optimizer=own.optimizer, window=own.window, loss_scale=own.loss_scale, progress=mine
        )
        others = self._others(state)
        with _constant(state, others) as freed:
            seen: Frame = call(frame.having(state=inside, began=mine, applied=None, events=()))
            freed.append(seen.state)
        after = seen.state
        own = Part(
            after.optimizer,
            after.window,
            after.loss_scale,
            after.progress.updates,
            after.progress.skipped,
            after.progress.skips_in_row,
        )
        slots = {**after.slots, self._slot: own}
        done = attrs.evolve(
            after,
            optimizer=state.optimizer,
            window=state.window,
            loss_scale=state.loss_scale,
            progress=_joined(p, mine, after.progress, slots),
            slots=slots,
        )
        events = [self._told(event, p.updates - mine.updates) for event in seen.events]
        applied = seen.applied if frame.applied is None else frame.applied or bool(seen.applied)
        return frame.having(state=done, applied=applied, events=(*frame.events, *events))

    def _own(self, state: TrainState) -> Part:
        own = state.slots.get(self._slot)
        if not isinstance(own, Part):
            raise MissingFieldError(
                f"part {self.name!r}", f"state.slots[{self._slot!r}]", "make the state with `init(step, model)`"
            )
        return own

    def _others(self, state: TrainState) -> list[str]:
        """The names of the parameters that are not the part's."""
        names, none = tuple(state.params.index), len(self.patterns)
        others = [name for name, place in zip(names, places(self.patterns, names), strict=True) if place == none]
        if len(others) == len(names):
            known = ", ".join(names[:8])
            raise SettingError(f"part({self.name!r}).match", "one that some parameter matches", self.patterns, known)
        return others

    def _told(self, event: Event, ahead: int) -> Event:
        """The event of the part as one of the whole run."""
        changed: dict[str, Any] = {"update": event.update + ahead}
        if hasattr(event, "part"):
            changed["part"] = self.name
        return attrs.evolve(event, **changed)

    def __repr__(self) -> str:
        return self.text


@contextmanager
def _constant(state: TrainState, names: list[str]) -> Generator[list[TrainState]]:
    """No gradients for the parameters of these names; afterwards their flags are as before, in the states given too."""
    flat, index = state.params.flat, state.params.index
    frozen = [index[name] for name in names if flat[index[name]].requires_grad]
    reached = [flat]
    states: list[TrainState] = []
    for place in frozen:
        flat[place].requires_grad_(False)
    try:
        yield states
        reached += [state.params.flat for state in states]
    finally:
        for tensors in reached:
            for place in frozen:
                tensors[place].requires_grad_(True)


def _joined(whole: Progress, before: Progress, after: Progress, slots: Any) -> Progress:
    """The counts of the run, with what the part has done since `before`."""
    return Progress(
        max(whole.micro_steps, after.micro_steps),
        whole.updates + after.updates - before.updates,
        whole.skipped + after.skipped - before.skipped,
        whole.epoch,
        max(whole.samples, after.samples),
        max(whole.tokens, after.tokens),
        max(slot.skips_in_row for slot in slots.values() if isinstance(slot, Part)),
    )


def part(name: str, match: str | Iterable[str], transform: Transform) -> Transform:
    """`transform` as the step of one part of the model: a generator, an encoder, the embeddings.

    Inside, only the part's parameters get gradients, and optimizer, window, loss scale and counts are its own: a
    schedule counts the part's updates. Outside, `progress` counts the updates of all parts together and each
    micro-batch once, and events carry the part's name. Parts take their turn as they stand in the chain; `when` and
    `every(n, ..., of="micro_batches")` change that (the windows that `every` counts by itself are those of all parts),
    and `repeat` takes one several times on the same batch.

    Put the whole step inside, from Forward to EmitEvents, and what measures it too. A part's own loss scale begins as
    that of the state; `Optimizer(masters=True)` keeps float32 copies of the whole model in each part. Where two parts
    write to the same buffers (BatchNorm), a skipped window takes back what both wrote since it began.

    Args:   name: what events and `state.slots["part <name>"]` call it; match: patterns on parameter names, as in
            `fnmatch`.
    Raises: SettingError where no parameter matches.
    """
    if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SettingError("part(name)", "a name", name)
    patterns = as_patterns("part(match)", match)
    if not patterns:
        raise SettingError("part(match)", "at least one pattern", match)
    return _Part(name, patterns, chain(transform), f"part({name!r}, {match!r}, {show(transform)})")

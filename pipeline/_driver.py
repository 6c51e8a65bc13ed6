"""The loop itself: micro-batches, epochs and evaluations in their order, as a generator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import attrs
import torch

from pipeline import _randomness as randomness
from pipeline._publisher import Clock, Watched, stamp
from pipeline.events import BatchSkipped, EpochEnded, EpochStarted, Event, RunEnded, RunStarted
from pipeline.place import Place
from pipeline.probes import Probe
from pipeline.records import Frame, Progress, TrainState
from pipeline.stream import Node, is_read_once
from pipeline.transform import Chain
from pipeline.until import Epochs, Limit

Item = tuple[TrainState, tuple[Event, ...]]

_END = object()
_STREAM, _FINISH = 1, 3  # purposes of draws, told apart from those of a step and (2) of an evaluation


def one(
    step: Chain, state: TrainState, batch: Any, now: float, waited: float, generators: Sequence[torch.Generator]
) -> Item:
    """One micro-batch, seeded by its number, and counted where the step does not count it (it has no Accumulate)."""
    progress = state.progress
    randomness.seed(generators, state.rng.key(progress.micro_steps))
    frame = step(Frame.begin(state, batch, now, waited))
    state = frame.state
    if state.progress.micro_steps == progress.micro_steps:
        counted = attrs.evolve(state.progress, micro_steps=progress.micro_steps + 1)
        state = attrs.evolve(state, progress=counted)
    return state, frame.events


class Driver:
    """One run. Between two items it stands still: `watched` has the newest state, and `place` says where it is.

    It goes on from the state that it finds there, and ends if it is asked to. Where `pauses`, it stands still once more
    when it is about to end, with nothing to tell, before it closes what is open.
    """

    def __init__(
        self,
        step: Chain,
        watched: Watched,
        stream: Iterable[Any],
        until: Limit | None,
        evaluations: tuple[Probe, ...],
        clock: Clock,
        *,
        pauses: bool = False,
    ) -> None:
        self.step, self.watched, self.stream, self.evaluations, self.clock = step, watched, stream, evaluations, clock
        self.limit = Epochs(watched.state.progress.epoch + 1) if until is None else until
        self.generators = randomness.default_generators(watched.state)
        self.started, self.pauses = clock(), pauses
        self.ended: tuple[str, ...] = ()
        self._told: str | None = None  # of which limit the events have told
        self._in_epoch, self._read, self._batches, self._began = False, 0, 0, watched.state.progress
        self._to_pass_over = self._empty_passes = 0
        self._waited = 0.0  # for data, since the last window was closed

    @property
    def place(self) -> Place:
        """Where the run stands now."""
        return Place(
            self._in_epoch,
            self._read,
            self._batches,
            self._began,
            self._waited,
            self.clock() - self.started,
            repr(self.limit),
            self.watched.base,
        )

    def go_on_from(self, place: Place, to_pass_over: int) -> None:
        """Begin at a place that another run has reached; the stream stands there but for `to_pass_over` items."""
        self._in_epoch, self._read, self._batches = place.in_epoch, place.read, place.batches
        self._began, self._waited, self.started = place.began, place.waited, self.clock() - place.seconds
        self._told, self._to_pass_over = place.until, to_pass_over
        self.watched.base = place.rate_base

    def __iter__(self) -> Iterator[Item]:
        now = self.clock()
        if self._told != repr(self.limit):
            length = _length(self.stream)
            windows = None if length is None else self.step.windows(length)
            total = self.limit.total_updates(self._began, windows)
            yield self._item(RunStarted(**stamp(self._progress, now), until=repr(self.limit), total_updates=total))
        self.ended = self._reasons(now)
        while self._in_epoch or not self.ended:
            yield from self._epoch()
        yield self._item(RunEnded(**stamp(self._progress, self.clock()), reasons=self.ended))

    @property
    def _progress(self) -> Progress:
        return self.watched.state.progress

    def _item(self, *events: Event) -> Item:
        return self.watched.state, events

    def _reasons(self, now: float) -> tuple[str, ...]:
        watched = self.watched
        reached, stops = self.limit.reasons(watched.state.progress, now - self.started), watched.stops
        return (*reached, *stops) if stops else reached

    def _epoch(self) -> Iterator[Item]:
        if not self._in_epoch:
            self._in_epoch, self._read, self._batches, self._began = True, 0, 0, self._progress
            yield self._item(EpochStarted(**stamp(self._began, self.clock())))
        if not self.ended:
            yield from self._micro_batches()
        if self.pauses and self.ended:
            yield self._item()
        events = self._closed()
        if events:
            yield self._item(*events)
        if not self.ended:
            self.ended = self._reasons(self.clock()) or self._no_use()
            if self.pauses and self.ended:
                yield self._item()

    def _micro_batches(self) -> Iterator[Item]:
        watched, clock, generators, epoch = self.watched, self.clock, self.generators, self._began.epoch
        draws = not isinstance(self.stream, (list, tuple))  # those draw nothing
        iterator = self._iterator()
        while True:
            asked = clock()
            batch = next(iterator, _END)
            if batch is _END:
                return
            self._read += 1
            now = clock()
            if batch is None:
                yield self._item(BatchSkipped(**stamp(self._progress, now)))
            else:
                self._batches += 1
                self._waited += now - asked
                before = watched.state.progress
                state, events = one(self.step, watched.scaled(watched.state), batch, now, self._waited, generators)
                watched.state = state
                after = state.progress
                if after.updates != before.updates or after.skipped != before.skipped:  # a window was closed
                    self._waited = 0.0
                del batch  # nothing of this micro-batch stays alive while the next one is read
                if self.evaluations and after.updates != before.updates:
                    events = self._and_evaluated(events, before)
                yield state, events
            self.ended = self._reasons(now)
            if self.ended:
                return
            if draws:
                randomness.seed(generators, self.watched.state.rng.key((epoch << 32) + self._read, _STREAM))

    def _iterator(self) -> Iterator[Any]:
        """The stream from where the run stands. What it draws hangs on its place alone, and not on who drew before."""
        first = self._began.epoch << 32
        skip, self._to_pass_over = self._to_pass_over, 0
        if skip and isinstance(self.stream, (list, tuple)):
            return iter(cast("Sequence[Any]", self.stream)[skip:])
        passed = self._read - skip
        randomness.seed(self.generators, self.watched.state.rng.key(first + passed, _STREAM))
        iterator = iter(self.stream)
        for n in range(passed, self._read):
            next(iterator, None)
            randomness.seed(self.generators, self.watched.state.rng.key(first + n + 1, _STREAM))
        return iterator

    def _closed(self) -> tuple[Event, ...]:
        """The end of a pass: the open window closed, the epoch counted, and what is due then evaluated."""
        events: tuple[Event, ...] = ()
        before = self._progress
        if self.watched.state.is_open:
            randomness.seed(self.generators, self.watched.state.rng.key(before.micro_steps, _FINISH))
            frame = self.step.finish(Frame.begin(self.watched.state, time=self.clock(), waited=self._waited))
            self.watched.state, self._waited = frame.state, 0.0
            events = self._and_evaluated(frame.events, before)
        if not self.ended or self._read == _length(self.stream):
            before = self._progress
            counted = attrs.evolve(before, epoch=before.epoch + 1)
            self.watched.state = attrs.evolve(self.watched.state, progress=counted)
            events = self._and_evaluated(events, before)
            events = (*events, EpochEnded(**stamp(counted, self.clock()), batches=self._batches))
            if self.ended and isinstance(self.stream, Node):  # it has given all, and was not asked for more
                next(iter(self.stream), None)
        self._in_epoch = False
        return events

    def _and_evaluated(self, events: tuple[Event, ...], before: Progress) -> tuple[Event, ...]:
        """The events, and those of the evaluations that are due."""
        self.watched.undelivered = events
        for evaluation in self.evaluations:
            if evaluation.when.due(before, self._progress):
                self.watched.undelivered += (evaluation.run(self.watched.state, time=self.clock()),)
        events, self.watched.undelivered = self.watched.undelivered, ()
        return events

    def _no_use(self) -> tuple[str, ...]:
        """Why another pass would be no use: it would give nothing, or get no nearer to the limit."""
        if not self._batches:  # one that knows its place may just have stood at an epoch's end
            self._empty_passes += 1
            at_an_end = isinstance(self.stream, Node) and self._empty_passes == 1
            return () if at_an_end else ("the stream gave no batches",)
        self._empty_passes = 0
        if is_read_once(self.stream):
            return ("the stream is a generator, which can be read only once",)
        if self.limit.stuck(self._began, self._progress) and not self.watched.state.is_open:  # a carried one will end
            skipped = self._progress.skipped - self._began.skipped
            return (f"{self.limit!r} is out of reach: a whole epoch came no nearer ({skipped} windows skipped)",)
        return ()


def _length(stream: Iterable[Any]) -> int | None:
    """How many batches a pass gives, where the stream knows."""
    try:
        return len(cast("Sequence[Any]", stream))
    except (TypeError, NotImplementedError):
        return None

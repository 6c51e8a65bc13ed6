"""Checkpoints of a fold: saved between two micro-batches, and gone on from."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Iterable
from pathlib import Path

import attrs

from pipeline._driver import Driver
from pipeline._publisher import Publisher, stamp
from pipeline.checkpoint import Checkpoint, CheckpointStore, CheckpointWarning, load_checkpoint
from pipeline.checkpoint._adopted import adopted
from pipeline.errors import CheckpointError, SettingError
from pipeline.events import CheckpointSaved, EvalDone, Event, Rewound
from pipeline.monitor import Monitor
from pipeline.monitors import SaveBest
from pipeline.records import Window
from pipeline.stream import go_to, place_of

Here = tuple[int, int, bool]


def store_for(given: CheckpointStore | str | Path | None, monitors: Iterable[Monitor]) -> CheckpointStore | None:
    """The store, once it is known to be one that the monitors can use."""
    needy = [monitor.name for monitor in monitors if getattr(monitor, "needs_store", False)]
    if given is None:
        if needy:
            cure = 'fold(..., store="runs/a")'
            raise CheckpointError(f"{needy[0]} asks for checkpoints, and the fold has no store: {cure}.")
        return None
    bests = {(monitor.measure, monitor.mode): monitor for monitor in monitors if isinstance(monitor, SaveBest)}
    if len(bests) > 1:
        cure = "A store keeps the best by one measure: save for the others with SaveEvery, or in a run of its own."
        raise SettingError("fold(monitors)", "without a SaveBest for another measure", list(bests), cure)
    best = next(iter(bests.values()), None)
    if not isinstance(given, CheckpointStore):
        return CheckpointStore(given) if best is None else CheckpointStore(given, best=best.measure, mode=best.mode)
    if best is not None and (given.keeping.measure, given.keeping.mode) != (best.measure, best.mode):
        cure = f"CheckpointStore(folder, best={best.measure!r}, mode={best.mode!r}): otherwise it may delete the best."
        raise SettingError("fold(store)", f"one that goes by the measure of {best!r}", given.keeping.measure, cure)
    return given


def to_go_on_from(store: CheckpointStore | None, resume: str | Path | None) -> tuple[Path, Checkpoint] | None:
    """The checkpoint that `resume` means, and where it lies; None for a run that begins."""
    if resume is None:
        if store is not None and store.folders():
            cure = 'Say "latest" to go on, the first time too, or give the run a folder of its own.'
            raise SettingError("fold(resume)", f"said, since {store.path} has checkpoints", resume, cure)
        return None
    if not isinstance(resume, (str, Path)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SettingError("fold(resume)", '"latest", "best", a checkpoint\'s path, or None', resume)
    if store is None:
        if resume in ("latest", "best"):
            expected = "a checkpoint's path where there is no store"
            raise SettingError("fold(resume)", expected, resume, 'Give store="runs/a".')
        return Path(resume), load_checkpoint(resume)
    if resume == "latest":
        return store.find() if store.folders() else None
    found = store.find(resume)
    if not store.is_newest(found[0]):
        cure = "Give this run a folder of its own: what was saved after that checkpoint would be mixed with it."
        raise SettingError("fold(resume)", f"the newest checkpoint in {store.path}", str(found[0]), cure)
    return found


class Keeper:
    """Saves what is asked for, and puts a run where another one was."""

    def __init__(self, store: CheckpointStore | None, driver: Driver, publisher: Publisher) -> None:
        self.store, self.driver, self.publisher = store, driver, publisher
        self.watched = driver.watched
        self.run = secrets.token_hex(8)
        self._measures: dict[str, float] = {}
        self._measured_at = 0  # the update whose weights these are of
        self._kept: Here | None = None  # the boundary of the newest checkpoint

    def note(self, events: Iterable[Event]) -> None:
        """Remember what the evaluations gave for the weights as they are."""
        for event in events:
            if isinstance(event, EvalDone):
                if event.update != self._measured_at:
                    self._measures, self._measured_at = {}, event.update
                self._measures |= {name: float(value) for name, value in event.values.items()}
                self._kept = None  # a checkpoint of these weights does not have them yet

    def asked_for(self) -> tuple[Event, ...]:
        """Save or rewind, if a monitor asked for it; what then happened."""
        rewinds, self.watched.rewinds = self.watched.rewinds, []
        saves, self.watched.saves = self.watched.saves, []
        if rewinds:
            return (self._rewound(rewinds[0].to, tuple(rewind.reason for rewind in rewinds)),)
        return self._saved(tuple(saves)) if saves else ()

    def at_the_end(self) -> tuple[Event, ...]:
        """Save before the run closes what is open. No event tells of an interruption: going on undoes it."""
        if self.store is None:
            return ()
        return self._saved(self.driver.ended, is_told_of=not self.watched.interrupted)

    def _here(self) -> Here:
        progress = self.watched.state.progress
        return progress.micro_steps, progress.windows, self.driver.place.in_epoch

    def _saved(self, reasons: tuple[str, ...], *, is_told_of: bool = True) -> tuple[Event, ...]:
        if self._here() == self._kept:
            return ()
        store = self._store(f"save a checkpoint ({', '.join(reasons)})")
        self.publisher.audience.sync()
        checkpoint = self._checkpoint(reasons, is_told_of)
        path = store.save(checkpoint)
        self._kept = self._here()
        return (_told_of(checkpoint, path.name),) if is_told_of else ()

    def _store(self, what: str) -> CheckpointStore:
        if self.store is None:
            raise CheckpointError(f'A monitor asks to {what}, and the fold has no store: fold(..., store="runs/a").')
        return self.store

    def _checkpoint(self, reasons: tuple[str, ...], is_told_of: bool) -> Checkpoint:
        publisher, state = self.publisher, self.watched.state
        late, pending = publisher.unpublished()
        is_measured = self._measured_at == state.progress.updates
        place = self.driver.place
        return Checkpoint(
            state=state,
            place=place,
            stream=place_of(self.driver.stream, place.read if place.in_epoch else 0),
            accumulators=publisher.audience.by_name(),
            told=publisher.told,
            pending=(*late, *pending),
            under_way=len(late),
            is_told_of=is_told_of,
            reasons=reasons,
            time=self.driver.clock(),
            measures=dict(self._measures) if is_measured else {},
            run=self.run,
        )

    def _rewound(self, to: str, reasons: tuple[str, ...]) -> Event:
        store = self._store(f"rewind ({', '.join(reasons)})")
        store.wait()
        path, checkpoint = store.find(to)
        before = self.watched.state
        self._measures, self._kept = {}, None
        state = adopted(before, checkpoint.state)
        self.watched.state = attrs.evolve(
            state, progress=before.progress, rng=before.rng, window=Window(), rate_factor=before.rate_factor
        )
        return Rewound(**stamp(before.progress, self.driver.clock()), path=path.name, reasons=reasons)

    def go_on_from(self, checkpoint: Checkpoint, name: str) -> tuple[Event, ...]:
        """Put the run where the checkpoint was saved; what has to be told of again."""
        watched, stream = self.watched, self.driver.stream
        to_pass_over = 0 if checkpoint.stream is None else go_to(stream, checkpoint.stream)
        watched.state = adopted(watched.state, checkpoint.state)
        self.driver.go_on_from(checkpoint.place, to_pass_over)
        for who in self.publisher.go_on_from(checkpoint):
            warnings.warn(who, CheckpointWarning, stacklevel=3)
        self.run = checkpoint.run or self.run
        self._measures, self._measured_at = dict(checkpoint.measures), watched.state.progress.updates
        self._kept = self._here()
        return (_told_of(checkpoint, name),) if checkpoint.is_told_of else ()


def _told_of(checkpoint: Checkpoint, name: str) -> CheckpointSaved:
    at = stamp(checkpoint.state.progress, checkpoint.time)
    return CheckpointSaved(**at, path=name, reasons=checkpoint.reasons)

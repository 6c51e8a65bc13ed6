"""`CheckpointStore`: the checkpoints of one run, in a folder."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import IO, Any, Literal, Self

from pipeline._lock import let_go_in_children, lock
from pipeline.checkpoint._aside import Aside
from pipeline.checkpoint._disk import clear_away, discard
from pipeline.checkpoint._folder import Written, read, snapshot, verify, write
from pipeline.checkpoint.record import Checkpoint
from pipeline.checkpoint.saved import Keeping, Saved
from pipeline.errors import CheckpointError, DamagedCheckpointError, SettingError, StoreInUseError

__all__ = ["CheckpointStore", "CheckpointWarning", "load_checkpoint"]

_CHECKPOINTS = "checkpoints"
_NAME = re.compile(r"([0-9]{10,})([es]?)")


class CheckpointWarning(UserWarning):
    """A checkpoint, or something in it, was passed over, and why."""


class CheckpointStore:
    """The checkpoints of one run, in `<folder>/checkpoints`, each in a folder named by its micro-step.

    A checkpoint is whole or not there. One process saves to a store at a time. Behind the number of the micro-step, "e"
    says that the epoch had ended, and "s" that the next had started.

    Args:   folder: the run's; keep_last: how many of the newest are kept; best: the measure of an evaluation
            ("val_loss") by which `keep_best` more are kept, with `mode` "min" or "max"; keep_every: also those whose
            update is a multiple of it; background: write from a copy of the state in host memory while training goes
            on. The newest and the best are never deleted, and what is no checkpoint of this run is left alone.
    Raises: SettingError, when built.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int = 3,
        best: str | None = None,
        keep_best: int = 1,
        mode: Literal["min", "max"] = "min",
        keep_every: int | None = None,
        background: bool = False,
    ) -> None:
        if not isinstance(folder, (str, Path)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SettingError("CheckpointStore(folder)", "a path", folder)
        self.folder = Path(folder)
        self.path = self.folder / _CHECKPOINTS
        self.keeping = Keeping(keep_last, best, keep_best, mode, keep_every)
        self.background = background
        self._lock: IO[Any] | None = None
        self._holders = 0
        self._at_work: Aside | None = None
        let_go_in_children(self._forget)

    # -- saving -------------------------------------------------------------------------------------------------

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write the checkpoint, and then delete those that are no longer kept. With `background`, start to, where the
        store is held in a `with` block, as by a fold.

        One of the same micro-step that is there already makes room for it.

        Raises: CheckpointError when it cannot be written, with `background` the one before; earlier ones are as they
                were. StoreInUseError while another process saves here.
        """
        self.wait()
        path = self.path / _name(checkpoint)
        written = checkpoint.taken_apart()
        with self:
            if self.background:
                self._write_aside(path, written)
            else:
                self._write(path, written)
        return path

    def wait(self) -> None:
        """Until nothing is being written any more.

        Raises: CheckpointError if what was being written could not be.
        """
        failed = None if self._at_work is None else self._at_work.wait()
        self._at_work = None
        if failed is not None:
            raise failed

    def _write_aside(self, path: Path, written: Written) -> None:
        """Write in a thread, from copies."""
        copied = snapshot(path, written)

        def work() -> None:
            try:
                self._write(path, copied)
            finally:
                if not self._holders:  # whoever held the store was interrupted while waiting
                    self._let_go()

        self._at_work = Aside(work, "checkpoint")

    def _write(self, path: Path, written: Written) -> None:
        """Write it, then delete what it replaces: of this run, and no newer, as one is that was damaged."""
        write(path, written)
        older = self.folders()
        older = older[: older.index(path) + 1]
        found = [saved for saved in self.list() if saved.path in older and saved.run == written.head.run]
        kept = self.keeping.kept(found)
        for saved in found:
            if saved not in kept:
                try:
                    discard(saved.path)
                except OSError as error:
                    raise CheckpointError(f"the checkpoint {saved.path} could not be deleted: {error}.") from error

    # -- loading ------------------------------------------------------------------------------------------------

    def load(self, which: str | Path = "latest") -> Checkpoint:
        """The newest checkpoint that is whole, the best one, or the one of this path.

        One that is damaged is passed over in the first two cases, with a `CheckpointWarning`.

        Raises: CheckpointError where there is none, DamagedCheckpointError, CheckpointFormatError.
        """
        return self.find(which)[1]

    def find(self, which: str | Path = "latest") -> tuple[Path, Checkpoint]:
        """What `load` loads, with where it lies."""
        if which not in ("latest", "best"):
            return Path(which), load_checkpoint(which)
        for path in self._candidates(str(which)):
            try:
                return path, load_checkpoint(path)
            except DamagedCheckpointError as error:
                warnings.warn(f"passed over: {error}", CheckpointWarning, stacklevel=3)
        raise CheckpointError(f"there is no {'best' if which == 'best' else 'whole'} checkpoint in {self.path}")

    def latest(self) -> Path | None:
        """The newest checkpoint that is whole; those that are damaged are passed over, with a `CheckpointWarning`."""
        for path in self._candidates("latest"):
            try:
                verify(path)
            except DamagedCheckpointError as error:
                warnings.warn(f"passed over: {error}", CheckpointWarning, stacklevel=2)
            else:
                return path
        return None

    def list(self) -> list[Saved]:
        """The checkpoints here, the oldest first, as their manifests tell; one without a manifest is left out."""
        found: list[Saved] = []
        for path in self.folders():
            try:
                found.append(Saved.at(path))
            except CheckpointError:
                continue
        return found

    def folders(self) -> list[Path]:
        """The folder of every checkpoint here, of damaged ones too, the oldest first."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}.") from error
        named = [(match, self.path / name) for name in names if (match := _NAME.fullmatch(name))]
        found = [(int(match[1]), match[2], path) for match, path in named if path.is_dir() and not path.is_symlink()]
        return [path for *_, path in sorted(found)]

    def is_newest(self, path: Path) -> bool:
        """Whether no whole checkpoint here is newer than the one at `path`; one of another folder is older than any."""
        here, mine = [folder.resolve() for folder in self.folders()], path.resolve()
        return not any(map(_is_whole, here[here.index(mine) + 1 :] if mine in here else here))

    def _candidates(self, which: str) -> list[Path]:
        if which == "latest":
            return self.folders()[::-1]
        if self.keeping.measure is None:
            cure = 'Name the measure: CheckpointStore(folder, best="val_loss").'
            raise CheckpointError(f"the store {self.path} does not know what is best. {cure}")
        return [saved.path for saved in self.keeping.ranked(self.list())]

    # -- one at a time ------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Hold the store for this process, and clear away what a killed one has left.

        Raises: StoreInUseError while another holds it, CheckpointError where it cannot be written to.
        """
        if not self._holders:
            self._lock = self._taken()
        self._holders += 1
        return self

    def _taken(self) -> IO[Any]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            held = lock(self.path / ".lock")
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be saved to: {error}.") from error
        if held is None:
            raise StoreInUseError(str(self.path))
        try:
            clear_away(self.path, lambda name: _NAME.fullmatch(name) is not None)
        except OSError as error:
            held.close()
            raise CheckpointError(f"{self.path} cannot be cleared of what a killed process left: {error}.") from error
        return held

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Wait, and let go; what could not be written becomes a note on an error that there is already."""
        self._holders -= 1
        if self._holders:
            return
        try:
            self.wait()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"and then: {failed}")
        finally:
            if self._at_work is None:
                self._let_go()

    def __repr__(self) -> str:
        return f"CheckpointStore({str(self.folder)!r})"

    def _let_go(self) -> None:
        held, self._lock, self._holders = self._lock, None, 0
        if held is not None:
            held.close()

    def _forget(self) -> None:
        """Let go of the store, as a process does that was forked from the one that holds it."""
        self._let_go()
        self._at_work = None


def load_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint in the folder `path`, verified.

    Its tensors are those of the files, mapped into memory: what is written to them does not reach the files.

    Raises: CheckpointError where there is none, DamagedCheckpointError, CheckpointFormatError.
    """
    path = Path(path)
    run = path.parent if path.name == _CHECKPOINTS else path
    if (run / _CHECKPOINTS).is_dir():
        cure = f"`CheckpointStore({str(run)!r}).latest()` is the newest of its checkpoints."
        raise CheckpointError(f"{path} is the folder of a run and not of one checkpoint. {cure}")
    written = read(path)
    try:
        return Checkpoint.put_together(written)
    except CheckpointError as error:
        error.add_note(f"in {path}")
        raise


def _is_whole(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def _name(checkpoint: Checkpoint) -> str:
    place = checkpoint.place
    suffix = "e" if not place.in_epoch else "" if place.read else "s"
    return f"{checkpoint.state.progress.micro_steps:010d}{suffix}"

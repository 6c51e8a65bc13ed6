"""What a worker process runs."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import traceback
from collections.abc import Iterable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, Protocol

import attrs
import torch

from pipeline.errors import WorkerError


class Job(Protocol):
    """What is to be done with each payload; picklable for processes."""

    @property
    def skipped(self) -> int:
        """Items that were skipped for an error so far."""
        ...

    def __call__(self, *payload: Any) -> Any: ...


@attrs.frozen
class Done:
    """A result, and how many items were skipped on the way, where the job's own count is out of reach."""

    value: Any
    skipped: int = 0


@attrs.frozen
class Failed:
    """An error in place of a result."""

    error: BaseException


Outcome = Done | Failed


def serve(line: Connection, job: Job, copied: Iterable[Connection]) -> None:
    """Do the jobs that come over the line, until it is cut.

    A fork has copies of the main process's ends of the lines: while they are open, no line is ever cut.
    """
    for other in copied:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    jobs: SimpleQueue[tuple[bytes, bytes]] = SimpleQueue()
    threading.Thread(target=_receive, args=(line, jobs), daemon=True).start()
    while True:
        number, data = jobs.get()
        outcome = _outcome(job, data)
        try:
            line.send_bytes(number)
            line.send_bytes(outcome)
        except OSError:
            os._exit(0)  # the line is cut


def _receive(line: Connection, jobs: SimpleQueue[tuple[bytes, bytes]]) -> None:
    """Take jobs off the line at all times, so that whoever gives them never waits for one who waits to hand one in.

    When the line is cut, the main process has closed it, or is gone: so goes this one.
    """
    try:
        while True:
            number = line.recv_bytes()
            jobs.put((number, line.recv_bytes()))
    except (EOFError, OSError):
        os._exit(0)


def _outcome(job: Job, data: bytes) -> Any:
    try:
        before = job.skipped
        value = job(*pickle.loads(data))
        outcome = Done(value, job.skipped - before)
    except Exception as error:
        return _told(error)
    try:
        return ForkingPickler.dumps(outcome)
    except Exception as error:
        why = f"cannot be sent from a worker process ({type(error).__name__}: {error})"
        return _told(WorkerError("A result", why, "use Threads, or return tensors and plain values"))


def _told(error: Exception) -> Any:
    """An error as it can travel: itself with its traceback as a note, or where it cannot be pickled a WorkerError."""
    text = "".join(traceback.format_exception(error))
    try:
        error.add_note(f"in a worker process (pid {os.getpid()}):\n{text}")
        data = ForkingPickler.dumps(Failed(error))
        if type(pickle.loads(data).error) is type(error):
            return data
    except Exception:
        text += "(This error itself cannot be pickled.)"
    return ForkingPickler.dumps(Failed(WorkerError("A worker process", f"raised:\n{text}", "mend what it raised on")))

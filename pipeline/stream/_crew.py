"""Crews: threads or processes that do numbered jobs, and hand in each outcome as it comes."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, Protocol

import attrs

from pipeline.errors import WorkerError
from pipeline.stream import _worker
from pipeline.stream._defaults import in_background
from pipeline.stream._worker import Done, Failed, Job, Outcome
from pipeline.stream.workers import Processes, Threads

_PATIENCE = 5.0  # seconds for a thread or a process to end, before it is left alone or killed


class Crew(Protocol):
    """Those who do the jobs."""

    def give(self, number: int, payload: tuple[Any, ...]) -> None:
        """Hand a job out."""
        ...

    def collect(self) -> tuple[int, Outcome]:
        """Wait for the outcome of any job that was given."""
        ...

    def close(self) -> None:
        """Send everybody home, whatever they are at; their jobs are lost."""
        ...


def crew_of(workers: Threads | Processes, job: Job) -> Crew:
    """Start the workers."""
    return _ThreadCrew(workers, job) if isinstance(workers, Threads) else _ProcessCrew(workers, job)


class _ThreadCrew:
    def __init__(self, workers: Threads, job: Job) -> None:
        self._jobs: SimpleQueue[tuple[int, tuple[Any, ...]] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[tuple[int, Outcome]] = SimpleQueue()
        self._is_over = threading.Event()
        given = (job, self._jobs.get, self._outcomes.put, self._is_over)
        self._threads = [threading.Thread(target=_work, args=given, daemon=True) for _ in range(workers.n)]
        for thread in self._threads:
            thread.start()

    def give(self, number: int, payload: tuple[Any, ...]) -> None:
        self._jobs.put((number, payload))

    def collect(self) -> tuple[int, Outcome]:
        return self._outcomes.get()

    def close(self) -> None:
        self._is_over.set()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_PATIENCE)


def _work(
    job: Job,
    take: Callable[[], tuple[int, tuple[Any, ...]] | None],
    hand_in: Callable[[tuple[int, Outcome]], None],
    is_over: threading.Event,
) -> None:
    in_background()
    while (given := take()) is not None and not is_over.is_set():
        number, payload = given
        try:
            hand_in((number, Done(job(*payload))))
        except BaseException as error:  # SystemExit too: nobody else would hear of it
            hand_in((number, Failed(error)))


@attrs.define(eq=False)
class _Worker:
    process: BaseProcess
    line: Connection
    jobs: list[int] = attrs.Factory(list[int])
    has_answered: bool = False


class _ProcessCrew:
    """Each worker has a line of its own, so that one that dies leaves no lock behind and is noticed at once."""

    def __init__(self, workers: Processes, job: Job) -> None:
        self._workers: list[_Worker] = []
        self._lost: deque[tuple[int, Outcome]] = deque()  # jobs that will have no other outcome
        context: Any = multiprocessing.get_context(workers.start)
        if workers.start == "forkserver":
            context.set_forkserver_preload([_worker.__name__])
        try:
            for _ in range(workers.n):
                line, theirs = context.Pipe()
                copied = [line, *(worker.line for worker in self._workers)] if workers.start == "fork" else []
                process = context.Process(target=_worker.serve, args=(theirs, job, copied), daemon=True)
                process.start()
                theirs.close()
                self._workers.append(_Worker(process, line))
        except BaseException as error:
            self.close()
            if _is_about_pickle(error):
                why = f"cannot be sent to a worker process ({type(error).__name__}: {error})"
                cure = "define classes and functions at the top of a module, or use Threads"
                raise WorkerError("The dataset or a function", why, cure) from error
            raise

    def give(self, number: int, payload: tuple[Any, ...]) -> None:
        try:
            data = ForkingPickler.dumps(payload)
        except Exception as error:
            why = f"cannot be sent to a worker process ({type(error).__name__}: {error})"
            self._lost.append((number, Failed(WorkerError("An item", why, "use Threads"))))
            return
        while self._workers:
            worker = min(self._workers, key=lambda worker: len(worker.jobs))
            worker.jobs.append(number)
            try:
                worker.line.send_bytes(number.to_bytes(8, "little"))
                worker.line.send_bytes(data)
                return
            except OSError:
                worker.jobs.remove(number)
                self._bury(worker)
        self._lost.append((number, Failed(WorkerError("All worker processes", "have died", "see the errors before"))))

    def collect(self) -> tuple[int, Outcome]:
        while not self._lost:
            lines = {worker.line: worker for worker in self._workers}
            deaths = {worker.process.sentinel: worker for worker in self._workers}
            ready = wait([*lines, *deaths])
            for line in ready:
                if line in lines:
                    outcome = self._heard(lines[line])  # pyright: ignore[reportArgumentType]
                    if outcome is not None:
                        return outcome
                    break
            else:
                self._bury(deaths[ready[0]])  # pyright: ignore[reportArgumentType]
        return self._lost.popleft()

    def _heard(self, worker: _Worker) -> tuple[int, Outcome] | None:
        """What a worker hands in; None if it died over it."""
        try:
            number = int.from_bytes(worker.line.recv_bytes(), "little")
            data = worker.line.recv_bytes()
        except (EOFError, OSError):
            self._bury(worker)
            return None
        try:
            outcome = pickle.loads(data)
        except Exception as error:
            if isinstance(error, OSError) and wait([worker.process.sentinel], _PATIENCE):
                self._bury(worker)  # tensors lie in shared memory, which is asked for only now
                return None
            why = f"cannot be received from a worker process ({type(error).__name__}: {error})"
            outcome = Failed(WorkerError("A result", why, "use Threads, or return tensors and plain values"))
        worker.jobs.remove(number)
        worker.has_answered = True
        return number, outcome

    def _bury(self, worker: _Worker) -> None:
        """A worker has died: so have its jobs."""
        self._workers.remove(worker)
        worker.process.join(_PATIENCE)
        why = f"(pid {worker.process.pid}) died with exit code {worker.process.exitcode}, at this item or the next"
        cure = "look at what it wrote to stderr; a negative code is a signal, and -9 often means that memory ran out"
        if not worker.has_answered:
            cure += (
                '; a script must keep what it runs under `if __name__ == "__main__":`, a notebook import its functions'
            )
        for number in worker.jobs:
            self._lost.append((number, Failed(WorkerError("A worker process", why, cure))))
        worker.line.close()

    def close(self) -> None:
        for worker in self._workers:
            worker.line.close()  # a worker whose line is cut ends at once
        for worker in self._workers:
            worker.process.join(_PATIENCE)
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join()
        self._workers.clear()


def _is_about_pickle(error: BaseException) -> bool:
    return isinstance(error, (AttributeError, TypeError)) or "ickl" in type(error).__name__

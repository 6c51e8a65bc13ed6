"""Work in a thread of its own, while the rest goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

__all__ = ["Aside"]


class Aside:
    """Work that has begun, and what it failed with."""

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self._done: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(work,), name=name)
        self._thread.start()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self._done.set_exception(error)
        else:
            self._done.set_result(None)

    def wait(self) -> BaseException | None:
        """What it failed with, once it is done. Who was interrupted here can wait again."""
        failed = self._done.exception()  # not `join` alone: interrupted once, it returns at once the next time
        self._thread.join()
        return failed

"""A thread for work that nobody waits for until later: the loop spends its calls to the models in waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Beside:
    """Runs one job at a time: in its thread once ``start`` was called, else at once.

    Used by one thread. What a job raises comes out of ``wait`` then.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._results: SimpleQueue[Exception | None] = SimpleQueue()
        self._has_thread = self._is_busy = False

    def start(self, name: str) -> None:
        self._has_thread = True
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def run(self, job: Callable[[], None]) -> None:
        """The job before it must have been waited for."""
        if not self._has_thread:
            job()
            return
        self._is_busy = True
        self._jobs.put(job)

    def wait(self) -> None:
        """Until the last job is done."""
        if self._is_busy:
            error = self._results.get()
            self._is_busy = False
            if error is not None:
                raise error

    def close(self) -> None:
        """Ends the thread after its job."""
        self._jobs.put(None)
        self._has_thread = False

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                self._results.put(error)
            else:
                self._results.put(None)

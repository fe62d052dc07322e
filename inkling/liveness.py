"""Signs of life of the server's processes. Triton's own health says nothing about those of the models (server 2.51.0
stays ready).

Each of the three keeps ``<model>.heartbeat`` in the run folder: its pid and start time, the monotonic time of its last
beat, how many steps it has done, and since when it is in a step. ``inkling serve`` watches all three and the server
itself, which answers health requests, and ``spec_ensemble`` the two that it calls.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from inkling import process_group
from inkling.health import status
from inkling.protocol import DRAFT_MODEL, TARGET_MODEL
from inkling.run_folder import RunFolder

CALLED_MODELS = (TARGET_MODEL, DRAFT_MODEL)
SERVER = "tritonserver"
BEAT_S = 0.25
STOPPED_S = 1.0  # stopped for as long: not the blink of a debugger
SILENT_S = 10.0  # without a beat: something holds the interpreter; without an answer: the server hangs
ANSWER_S = 1.0  # for one health request
UNWATCHED_S = 3.0  # between two looks: the watcher itself did not run, and no model is to blame
_PID, _START_TIME, _BEAT, _STEPS, _STEP_BEGAN, _LOST, _WORDS = range(7)  # int64; times in ns


class Heartbeat:
    """This process's own. Beats in a thread, which ends the process when its parent, the server, is gone."""

    def __init__(self, folder: RunFolder, model: str):
        file = folder.heartbeat(model)
        file.touch(mode=0o600)
        self._words = np.memmap(file, np.int64, "w+", shape=(_WORDS,))
        self._words[_START_TIME] = int(process_group.start_time(os.getpid()))
        self._words[_BEAT] = time.monotonic_ns()
        self._words[_PID] = os.getpid()  # last: with it the file is valid
        atexit.register(_end_at_once)
        threading.Thread(target=self._run, args=(os.getppid(),), name="heartbeat", daemon=True).start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step, or one call of another model's."""
        self._words[_STEP_BEGAN] = time.monotonic_ns()
        try:
            yield
        finally:
            self._words[_STEP_BEGAN] = 0
            self._words[_STEPS] += 1

    def lost_model(self, model: str) -> None:
        """A model that this process calls did not answer: the server cannot go on, even if the model is there."""
        self._words[_LOST] = 1 + CALLED_MODELS.index(model)

    def _run(self, parent: int) -> None:
        while os.getppid() == parent:
            self._words[_BEAT] = time.monotonic_ns()
            time.sleep(BEAT_S)
        os._exit(1)  # an orphan would keep its memory, on a GPU as well


def _end_at_once() -> None:
    """Python takes torch apart for seconds at its end; the system does it at once, GPU memory included."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _Watch:
    """One process seen from another one. Ask ``trouble`` about once a second."""

    is_waiting = False  # for an answer of the process, with no trouble yet

    def __init__(self) -> None:
        self._looked = self._watched_since = -UNWATCHED_S
        self._stopped_since = 0.0

    def trouble(self) -> str:
        """Why the process must be given up; empty while it is well, or not there yet."""
        now = time.monotonic()
        if now - self._looked > UNWATCHED_S:
            self._watched_since, self._stopped_since = now, 0.0
        self._looked = now
        return self._trouble(now)

    def _trouble(self, now: float) -> str:
        raise NotImplementedError

    def _is_stopped(self, pid: int, now: float) -> bool:
        if process_group.state(pid) != "T":
            self._stopped_since = 0.0
            return False
        self._stopped_since = self._stopped_since or now
        return now - self._stopped_since >= STOPPED_S

    def _elapsed(self, since: float, now: float) -> float:
        """Seconds of which this process has watched every one."""
        return now - max(since, self._watched_since)


class ServerWatch(_Watch):
    """The server's own process, of which the caller knows whether it has ended. ``url``: host:port of HTTP."""

    lost = SERVER

    def __init__(self, pid: int, url: str):
        super().__init__()
        self._pid = pid
        self._url = url
        self._answered = 0.0  # 0: it loads, and listens to nobody

    def _trouble(self, now: float) -> str:
        if self._is_stopped(self._pid, now):
            return f"{SERVER} (pid {self._pid}) is stopped by a signal"
        if self._stopped_since:  # its silence has a reason, which a moment more will show
            self.is_waiting = bool(self._answered)
            return ""
        answers = status(self._url, "/v2/health/live", ANSWER_S)
        self.is_waiting = bool(self._answered and not answers)
        if answers:
            self._answered = time.monotonic()
        elif self._answered and (silent := self._elapsed(self._answered, now)) > SILENT_S:
            return f"{SERVER} (pid {self._pid}) hangs: no answer to a health request for {silent:.0f} s"
        return ""


class Watch(_Watch):
    """A model process."""

    def __init__(self, folder: RunFolder, model: str, step_timeout_s: float):
        super().__init__()
        self.model = self.lost = model  # lost: the model that is in trouble, this one or one that it calls
        self._file: Path = folder.heartbeat(model)
        self._step_timeout_s = step_timeout_s
        self._words: np.ndarray | None = None  # none until the model keeps it

    def _trouble(self, now: float) -> str:
        if self._words is None and not self._open():
            return ""
        pid, started = int(self._words[_PID]), str(self._words[_START_TIME])
        if not process_group.is_running(pid, started):
            return f"{self.model} (pid {pid}) ended"
        if code := self._words[_LOST]:
            self.lost = CALLED_MODELS[code - 1]
            return f"{self.model} (pid {pid}) got no answer from {self.lost}"
        if self._is_stopped(pid, now):
            return f"{self.model} (pid {pid}) is stopped by a signal"
        if (silent := self._elapsed(self._words[_BEAT] / 1e9, now)) > SILENT_S:
            return f"{self.model} (pid {pid}) hangs: no heartbeat for {silent:.0f} s"
        began = self._words[_STEP_BEGAN]
        if began and (taken := self._elapsed(began / 1e9, now)) > self._step_timeout_s:
            step = self._words[_STEPS] + 1
            return f"{self.model} (pid {pid}) hangs: step {step} has taken {taken:.0f} s; see step_timeout_s"
        return ""

    def is_in_step(self) -> bool:
        return bool((self._words is not None or self._open()) and self._words[_STEP_BEGAN])

    def _open(self) -> bool:
        if not self._file.exists() or self._file.stat().st_size < 8 * _WORDS:
            return False
        words = np.memmap(self._file, np.int64, "r", shape=(_WORDS,))
        self._words = words if words[_PID] else None
        return self._words is not None


def watch(watches: Iterable[Watch], on_trouble: Callable[[str], None], period_s: float = 0.5) -> None:
    """Blocks until one of ``watches`` sees trouble, and calls ``on_trouble`` with it."""
    while not (reason := next(filter(None, (watch.trouble() for watch in watches)), "")):
        time.sleep(period_s)
    on_trouble(reason)

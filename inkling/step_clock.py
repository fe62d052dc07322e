"""Device time of a model's steps, counted while somebody asks for it.

A file in the run folder holds three float64: 1 while steps shall be counted, the number counted, their seconds.
Whoever measures writes the first from another process; until then a step records nothing.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

import numpy as np
import torch

_ASKED, _STEPS, _SECONDS = range(3)


class _HostEvent:
    """``torch.cuda.Event`` for a device that works while the host waits."""

    def record(self) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: _HostEvent) -> float:
        return 1e3 * (later._time - self._time)


class StepClock:
    """``start`` before the device work of a step and ``stop`` after it, on the stream that carries it."""

    def __init__(self, file: Path | None = None, device: str = "cpu"):
        """``file`` is made; without one nobody can ask. ``device``: cpu or cuda."""
        shape = (3,)
        self._words = np.memmap(file, np.float64, "w+", shape=shape) if file else np.zeros(shape)
        self._is_cuda = device == "cuda"
        self._begin: torch.cuda.Event | _HostEvent | None = None
        self._pending: deque[tuple] = (
            deque()
        )  # (first, last event) of steps that the device may not have done

    def start(self) -> None:
        self._begin = self._mark() if self._words[_ASKED] else None

    def stop(self) -> None:
        if self._begin is not None:
            self._pending.append((self._begin, self._mark()))
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            self._words[_STEPS] += 1
            self._words[_SECONDS] += 1e-3 * first.elapsed_time(last)

    def _mark(self) -> torch.cuda.Event | _HostEvent:
        event = torch.cuda.Event(enable_timing=True) if self._is_cuda else _HostEvent()
        event.record()
        return event


class ClockReader:
    """The other end: asks for steps to be counted, and reads. FileNotFoundError when no model keeps ``file``."""

    def __init__(self, file: Path):
        self._words = np.memmap(file, np.float64, "r+", shape=(3,))

    def ask(self, is_wanted: bool) -> None:
        self._words[_ASKED] = is_wanted

    def read(self) -> tuple[int, float]:
        """Steps counted so far, and their seconds."""
        return int(self._words[_STEPS]), float(self._words[_SECONDS])

"""How many rows a step may have while answers flow: a step with prompt rows holds up every stream.

The time of a step as a function of its rows is learnt from the steps themselves. A step may take STALL times the
median of the latest ones. So a prompt that comes along is computed in chunks beside the answers, while a burst of
prompts makes long steps the usual ones within WINDOW steps and is computed as fast as it can be. Which rows share
a step changes no token.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from statistics import median

from inkling.engine.step_cost import CostTable

STALL = 2.0  # medians of the latest steps that a step may take
WINDOW = 32  # steps whose median counts
MIN_PROMPT_ROWS = 16  # of every step, whatever they cost: every prompt gets on


class StepPace:
    """``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.num_steps = 0  # so far
        self.schedule_s = self.step_s = 0.0  # seconds of all steps so far: until planned; from there on
        self._clock = clock
        self._begun = 0.0
        self._started, self._rows, self._num_decodes = 0.0, 0, 0  # of the step under way
        self._costs = CostTable()  # of whole steps
        self._largest = 0  # rows of the largest step so far
        self._latest: deque[float] = deque(maxlen=WINDOW)  # seconds of steps that streams waited for

    def schedule_starts(self) -> None:
        """Before anything is done for a step."""
        self._begun = self._clock()

    def step_starts(self, rows: int, num_decodes: int) -> None:
        """Before a step of ``rows`` target rows, for which ``num_decodes`` running answers wait."""
        self._started, self._rows, self._num_decodes = self._clock(), rows, num_decodes
        self.schedule_s += self._started - self._begun

    def step_ran(self) -> None:
        seconds = self._clock() - self._started
        self.num_steps += 1
        self.step_s += seconds
        self._costs.add(self._rows, seconds)
        self._largest = max(self._largest, self._rows)
        if self._num_decodes:
            self._latest.append(seconds)
        else:
            self._latest.clear()  # nobody remembers how fast it was

    def prompt_rows(self, decode_rows: int, most: int) -> int:
        """Prompt rows, at most ``most``, for a step beside ``decode_rows`` rows of running answers."""
        if decode_rows == 0 or not self._latest:
            return most
        allowed = STALL * median(self._latest)
        # a step larger than any seen may take as much longer as it has more rows
        known = min(decode_rows + most, self._largest)
        rows = bisect_right(range(known + 1), allowed, key=self._costs.at) - 1
        if rows == known:
            rows = int(known * allowed / max(self._costs.at(known), 1e-9))
        return min(most, max(rows - decode_rows, MIN_PROMPT_ROWS))

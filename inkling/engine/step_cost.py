"""What target and draft calls cost, learnt from their measured times as they come.

No shape is assumed: a table holds the median time of calls of about the same size, and a size between two
known ones is interpolated. A size beyond them is guessed low, so that it is tried and then known.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from statistics import median_low

CELLS_PER_OCTAVE = 4  # sizes up to 7 have a cell each
KEPT_TIMES = 17  # of a cell; their median stands for it, so a stray slow call moves nothing


class CostTable:
    """Seconds of a call as a function of its rows."""

    def __init__(self) -> None:
        self._cells: dict[int, deque[tuple[float, float]]] = {}  # the last (seconds, rows) of about one size
        self._points: dict[
            int, tuple[float, float, bool]
        ] = {}  # cell -> rows, seconds, whether of several times
        self._rows: list[float] = []
        self._seconds: list[float] = []

    def __bool__(self) -> bool:
        return bool(self._cells)

    def add(self, rows: float, seconds: float) -> None:
        rows = max(1.0, rows)
        key = round(CELLS_PER_OCTAVE * math.log2(rows))
        cell = self._cells.setdefault(key, deque(maxlen=KEPT_TIMES))
        cell.append((seconds, rows))
        seconds, rows = median_low(cell)
        if self._points.get(key) != (rows, seconds, len(cell) > 1):
            self._points[key] = (rows, seconds, len(cell) > 1)
            self._rebuild()

    def _rebuild(self) -> None:
        """A single time counts only where nothing better is known; fewer rows never cost more than many."""
        solid = [rows for rows, _, is_solid in self._points.values() if is_solid]
        low, high = (min(solid), max(solid)) if solid else (math.inf, -math.inf)
        points = sorted(p for p in self._points.values() if p[2] or not low < p[0] < high)
        self._rows = [rows for rows, _, _ in points]
        self._seconds = [seconds for _, seconds, _ in points]
        for i in range(len(points) - 2, -1, -1):
            self._seconds[i] = min(self._seconds[i : i + 2])

    def at(self, rows: float) -> float:
        """Seconds of a call with ``rows`` rows; 0 when none was ever seen."""
        known, seconds = self._rows, self._seconds
        if not known:
            return 0.0
        i = bisect_left(known, rows)
        if i < len(known) and known[i] == rows:
            return seconds[i]
        if i == len(known):
            return seconds[-1]
        if len(known) == 1:
            return seconds[0] * rows / known[0]
        if i == 0:
            guess = self._line(0, 1, rows)
            return min(seconds[0], max(guess, seconds[0] * rows / known[0]))
        return self._line(i - 1, i, rows)

    def _line(self, i: int, j: int, rows: float) -> float:
        (x, y), (u, v) = (self._rows[i], self._seconds[i]), (self._rows[j], self._seconds[j])
        return y + (v - y) * (rows - x) / (u - x) if u > x else min(y, v)


class StepCosts:
    """The parts of a step: the target's call by rows, the draft's by depths and rows of a depth, the rest; and what
    a row of a prompt takes in a depth."""

    def __init__(self, num_depths: int):
        self.target = CostTable()
        self._draft = [CostTable() for _ in range(num_depths + 1)]  # 0: calls that only hand over states
        self._prompt_rows: deque[float] = deque(maxlen=KEPT_TIMES)
        self.prompt_row = 0.0  # seconds of a prompt row in one depth
        self._rest: deque[float] = deque(maxlen=KEPT_TIMES)
        self.rest = 0.0  # seconds of a step outside the two calls

    def add_draft(self, depths: int, rows: float, seconds: float) -> None:
        """``rows``: of one depth, on average."""
        self._draft[depths].add(rows, seconds)

    def add_prompt(self, prompt_rows: int, seconds: float, depths: int, other_rows: float) -> None:
        """A draft call for prompts; ``prompt_rows``: of all depths together; ``other_rows``: of one, on average.

        What the call takes without them is no price of theirs: sequences that draft pay for it anyway.
        """
        without = self.draft(depths, max(1.0, other_rows))
        self._prompt_rows.append(max(0.0, seconds - without) / prompt_rows)
        self.prompt_row = median_low(self._prompt_rows)

    def add_rest(self, seconds: float) -> None:
        self._rest.append(seconds)
        self.rest = median_low(self._rest)

    def draft(self, depths: int, rows: float) -> float:
        """Seconds. Of a number of depths that was never seen: those of the nearest, less in proportion if fewer."""
        if self._draft[depths]:
            return self._draft[depths].at(rows)
        if depths == 0:
            return 0.0
        known = [d for d in range(1, len(self._draft)) if self._draft[d]]
        if not known:
            return 0.0
        nearest = min(known, key=lambda d: abs(d - depths))
        return self._draft[nearest].at(rows) * min(1.0, depths / nearest)

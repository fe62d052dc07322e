"""What target and draft calls cost, learnt from their measured times as they come.

No shape is assumed: a table holds the median time of calls of about the same size, and a size between two
known ones is interpolated. A size beyond them is guessed low, so that it is tried and then known.

A machine that slows down for a while slows all calls, those of the sizes in use and those nobody tries. So times
are kept as they would be at one speed of the machine: seconds divided by how much longer than known calls of
known sizes have taken of late. Only the ratios of costs decide anything. And what is not measured seems cheaper
as time passes, until it is tried again: a wrong cost that keeps its size from being tried would stand for ever.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from itertools import accumulate
from statistics import median, median_low

CELLS_PER_OCTAVE = 4  # sizes up to 7 have a cell each
KEPT_TIMES = 17  # of a cell; their median stands for it, so a stray slow call moves nothing
SURE_TIMES = 5  # of a cell, before others are compared with it: the lower median of fewer is too low
PROMPT_FADE = 1 / 1024  # of what a prompt row costs, per step that measures none
STALE_STEPS = 512  # after so many without it, a size is measured anew
SPEED_CALLS = 31  # whose median gives the machine's speed of late
SPELL_CALLS, SPELL = 5, 1.2  # another speed: when the last few calls differ so much from it
MAX_PROMPT_SHARE = 0.25  # calls with a larger share of prompt rows say little about decoding
MIN_SECONDS = 1e-9  # of a call, by a clock that stood still
COST_FADE, FADE_EVERY = 1 / 32768, 64  # of a size that no step has, per step; steps between two looks


class CostTable:
    """Seconds of a call as a function of its rows."""

    def __init__(self) -> None:
        self._cells: dict[int, deque[tuple[float, float]]] = {}  # the last (seconds, rows) of about one size
        self._seen: dict[int, int] = {}  # cell -> step of the last of them
        self._faded: dict[int, float] = {}  # cell -> the share of its seconds that counts, if no step had it of late
        self._points: dict[int, tuple[float, float, int]] = {}  # cell -> rows, seconds, how many times
        self._rows: list[float] = []
        self._seconds: list[float] = []

    def __bool__(self) -> bool:
        return bool(self._cells)

    def add(self, rows: float, seconds: float, step: int = 0) -> None:
        rows = max(1.0, rows)
        key = _cell(rows)
        cell = self._cells.setdefault(key, deque(maxlen=KEPT_TIMES))
        if step > self._seen.get(key, step) + STALE_STEPS:
            cell.clear()
        cell.append((seconds, rows))
        self._seen[key] = step
        was_faded = self._faded.pop(key, None) is not None
        if self._point(key) or was_faded:
            self._rebuild()

    def _point(self, key: int) -> bool:
        """Sets the point that stands for a cell; whether it moved."""
        cell = self._cells[key]
        seconds, rows = median_low(cell)
        before, self._points[key] = self._points.get(key), (rows, seconds, len(cell))
        return self._points[key] != before

    def known(self, rows: float) -> float:
        """The median of calls of about this size, scaled to ``rows``; 0 unless several were seen. ``at`` is the least
        of several medians: beside it calls would seem slow, and the machine ever slower."""
        size, seconds, count = self._points.get(_cell(rows), (0.0, 0.0, 0))
        return seconds * self.at(rows) / self.at(size) if count >= SURE_TIMES else 0.0

    def fade(self, step: int) -> None:
        """Makes sizes cheaper that no step had since ``step``."""
        faded = [key for key, seen in self._seen.items() if seen < step]
        for key in faded:
            self._faded[key] = self._faded.get(key, 1.0) * (1 - FADE_EVERY * COST_FADE)
        if faded:
            self._rebuild()

    def _rebuild(self) -> None:
        """A single time counts only where nothing better is known; fewer rows never cost more than many. What faded
        gets no cheaper than the next smaller size, and makes none cheaper."""
        solid = [rows for rows, _, count in self._points.values() if count > 1]
        low, high = (min(solid), max(solid)) if solid else (math.inf, -math.inf)
        points = sorted(p for p in self._points.values() if p[2] > 1 or not low < p[0] < high)
        self._rows = [rows for rows, _, _ in points]
        self._seconds = [seconds for _, seconds, _ in points]
        for i in range(len(points) - 2, -1, -1):
            self._seconds[i] = min(self._seconds[i : i + 2])
        least = 0.0
        for i, rows in enumerate(self._rows):
            least = self._seconds[i] = max(least, self._seconds[i] * self._faded.get(_cell(rows), 1.0))

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
        if i == 0:
            return seconds[0] * rows / known[0]
        return self._line(i - 1, i, rows)

    def _line(self, i: int, j: int, rows: float) -> float:
        (x, y), (u, v) = (self._rows[i], self._seconds[i]), (self._rows[j], self._seconds[j])
        return y + (v - y) * (rows - x) / (u - x) if u > x else min(y, v)


def _cell(rows: float) -> int:
    return round(CELLS_PER_OCTAVE * math.log2(max(1.0, rows)))


class StepCosts:
    """The parts of a step: the target's call by rows and drafts of a sequence, the draft's by depths and rows of a
    depth, the rest; and what a row of a prompt takes in a depth."""

    def __init__(self, num_depths: int):
        self._mixed = CostTable()  # the target's calls with prompts
        self._plain = CostTable()  # ... without
        self._plain_of = [CostTable() for _ in range(num_depths + 1)]  # the same by drafts of a sequence, on average
        self.slowness = 1.0  # seconds of late for one of the tables
        self._ratios: deque[float] = deque(maxlen=SPEED_CALLS)
        self._steps = 0
        self._draft = [CostTable() for _ in range(num_depths + 1)]  # 0: calls that only hand over states
        self._prompt_calls: deque[tuple[float, int]] = deque(maxlen=KEPT_TIMES)  # seconds of a row and depth, rows
        self.prompt_row = 0.0  # seconds of a prompt row in one depth
        self._rest: deque[float] = deque(maxlen=KEPT_TIMES)
        self.rest = 0.0  # seconds of a step outside the two calls

    def __bool__(self) -> bool:
        """Whether anything is known."""
        return bool(self._plain or self._mixed)

    def add_target(self, rows: int, prompt_rows: int, sequences: int, seconds: float) -> None:
        """``prompt_rows``: those of the ``rows`` that nothing is drawn from; ``sequences``: with the others."""
        self._steps += 1
        self.prompt_row *= 1 - PROMPT_FADE
        if self._steps % FADE_EVERY == 0:
            for table in (self._mixed, self._plain, *self._plain_of, *self._draft):
                table.fade(self._steps - FADE_EVERY)
        self._add(self._target_tables(rows, prompt_rows, sequences), rows, seconds)

    def _target_tables(self, rows: float, prompt_rows: float, sequences: int) -> list[CostTable]:
        """The best one first: as many rows of more sequences read more of the caches."""
        if prompt_rows > MAX_PROMPT_SHARE * rows:
            return [self._mixed]
        drafts = round((rows - prompt_rows) / max(1, sequences)) - 1
        return [self._plain_of[max(0, min(drafts, len(self._plain_of) - 1))], self._plain]

    def target(self, rows: float, prompt_rows: float, sequences: int) -> float:
        """Seconds."""
        tables = self._target_tables(rows, prompt_rows, sequences)
        for table in tables:
            if table.known(rows):
                return table.at(rows)
        return (tables[-1] or self._plain or self._mixed).at(rows)

    def add_draft(self, depths: int, rows: float, seconds: float) -> None:
        """``rows``: of one depth, on average."""
        self._add([self._draft[depths]], rows, seconds)

    def _add(self, tables: list[CostTable], rows: float, seconds: float) -> None:
        seconds = max(seconds, MIN_SECONDS)
        if known := next((known for table in tables if (known := table.known(rows))), 0.0):
            self._compare(seconds, known)
        for table in tables:
            table.add(rows, seconds / self.slowness, self._steps)

    def _compare(self, seconds: float, known: float) -> None:
        """Of one call, with what is known of its size."""
        self._ratios.append(seconds / known)
        lately = list(self._ratios)[-SPELL_CALLS:]
        if not 1 / SPELL < median_low(lately) / self.slowness < SPELL:  # another spell began
            self._ratios = deque(lately, SPEED_CALLS)
        self.slowness = median(self._ratios)

    def add_prompt(self, prompt_rows: int, seconds: float, depths: int, other_rows: float) -> None:
        """A draft call for prompts; ``prompt_rows``: of all depths together; ``other_rows``: of one, on average.

        What the call takes without them is no price of theirs: sequences that draft pay for it anyway. Each row counts
        once for the median: what a call of few rows takes beside them would seem the price of every row.
        """
        without = self.draft(depths, max(1.0, other_rows))
        self._prompt_calls.append((max(0.0, seconds / self.slowness - without) / prompt_rows, prompt_rows))
        calls = sorted(self._prompt_calls)
        before = list(accumulate(rows for _, rows in calls))
        self.prompt_row = calls[bisect_left(before, before[-1] / 2)][0]

    def add_rest(self, seconds: float) -> None:
        self._rest.append(seconds / self.slowness)
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

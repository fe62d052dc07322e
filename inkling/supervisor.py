"""Replace a lost server, a bounded number of times and ever more slowly."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

from inkling.tritonserver import ServerLostError

MAX_PAUSE_S = 60.0


def supervise(
    serve_once: Callable[[], None],
    restarts: int,
    report: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Calls ``serve_once``, and again when it raises ServerLostError, ``restarts`` times at most: after 1 s, 2 s, 4 s
    ... 60 s. The last error, and every other one, is raised."""
    for attempt in count():
        try:
            return serve_once()
        except ServerLostError as error:
            if attempt == restarts:
                raise
            delay = min(MAX_PAUSE_S, 2.0**attempt)
            report(f"{error}; restart {attempt + 1} of {restarts} in {delay:g} s")
        pause(delay)

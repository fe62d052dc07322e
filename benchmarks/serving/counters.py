"""What the server counts of its own work: rounds and time in each model, from its metrics.

Triton counts calls between models too. ``request`` is a call as the caller waits for it: from its arrival in the
server to its response; ``infer`` is the part within the model's process. What a round takes beyond its two requests
is the engine's own.
"""

from __future__ import annotations

import http.client
import re
import time
from dataclasses import dataclass

from inkling.protocol import DRAFT_MODEL, TARGET_MODEL

_LINE = re.compile(r'nv_inference_(exec_count|\w+_duration_us)\{model="(\w+)",version="\d+"\} ([0-9.e+]+)')


@dataclass(frozen=True)
class Counters:
    """Since the server started."""

    time: float  # of reading them, monotonic seconds
    values: dict[tuple[str, str], float]  # (model, metric)

    @classmethod
    def read(cls, url: str) -> Counters:
        """``url``: host:port of the metrics."""
        connection = http.client.HTTPConnection(url, timeout=10.0)
        try:
            before = time.monotonic()
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
            now = (before + time.monotonic()) / 2
        finally:
            connection.close()
        return cls(now, {(model, metric): float(value) for metric, model, value in _LINE.findall(text)})


@dataclass(frozen=True)
class Rounds:
    """Means over the rounds between two readings, in milliseconds."""

    count: int
    round_ms: float
    target_ms: float  # of the call to the target
    draft_ms: float
    target_infer_ms: float  # of that, within the target's process
    draft_infer_ms: float

    @property
    def between_ms(self) -> float:
        """Of a round, outside both models: engine and calls between the models."""
        return self.round_ms - self.target_infer_ms - self.draft_infer_ms

    @classmethod
    def between(cls, first: Counters, last: Counters) -> Rounds:
        def grown(model: str, metric: str) -> float:
            return last.values.get((model, metric), 0.0) - first.values.get((model, metric), 0.0)

        count = int(grown(TARGET_MODEL, "exec_count"))
        per_round = 1e-3 / max(1, count)
        return cls(
            count,
            1e3 * (last.time - first.time) / max(1, count),
            per_round * grown(TARGET_MODEL, "request_duration_us"),
            per_round * grown(DRAFT_MODEL, "request_duration_us"),
            per_round * grown(TARGET_MODEL, "compute_infer_duration_us"),
            per_round * grown(DRAFT_MODEL, "compute_infer_duration_us"),
        )

"""What the engine counts about itself: plain numbers, made public elsewhere (``inkling.metrics``).

Each number has one thread that writes it (the loop, the sender, or the one that submits) or a lock. Any thread may
read; what was counted together may be seen apart. All times are of the monotonic clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from inkling.errors import InklingError

if TYPE_CHECKING:
    from inkling.engine.outbox import Chunk, Outbox
    from inkling.engine.sequence import Sequence

BOUNDS_S = tuple(float(f"{digit}e{power}") for power in range(-3, 3) for digit in (1, 2, 5))  # 1 ms to 500 s
FINISH_REASONS = ("stop", "length", "timeout")
ERROR_REASONS = (
    "invalid",
    "queue_full",
    "draining",
    "cancelled",
    "error",
)  # of the classes in inkling.errors
MAX_GAPS = 1 << 10  # observed at once: a call costs more than an observation
MAX_ENDED = 1 << 16  # records that wait to be taken; beyond that the oldest go


class Histogram:
    """``counts[i]``: observations in (BOUNDS_S[i - 1], BOUNDS_S[i]]; the last: beyond all bounds."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum += seconds

    def observe_all(self, seconds: list[float]) -> None:
        values = np.array(seconds)
        for bucket in np.searchsorted(BOUNDS_S, values).tolist():
            self.counts[bucket] += 1
        self.sum += float(values.sum())


class TokenTotals:
    """Sums over requests. ``accepted[k]``: verifications of which k drafts were accepted and emitted."""

    def __init__(self, num_draft_tokens: int):
        self.num_generation_tokens = self.num_draft_tokens = 0
        self.accepted = [0] * (num_draft_tokens + 1)

    def add(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self.num_generation_tokens += sequence.num_emitted
            self.num_draft_tokens += sequence.total_draft_tokens
            for accepted, count in enumerate(sequence.accepted):
                self.accepted[accepted] += count

    def with_open(self, sequences: Iterable[Sequence]) -> TokenTotals:
        """A copy that also has those that are not complete."""
        totals = TokenTotals(len(self.accepted) - 1)
        totals.num_generation_tokens, totals.num_draft_tokens = (
            self.num_generation_tokens,
            self.num_draft_tokens,
        )
        totals.accepted = self.accepted.copy()
        totals.add(sequences)
        return totals


@dataclass(slots=True)
class RequestTrace:
    """One request's way through the engine. Monotonic seconds; 0: not yet."""

    request_id: str = ""  # the client's
    arrived: float = field(default_factory=monotonic)
    admitted: float = 0.0  # for the first time
    first_token: float = 0.0  # sent, where the answer is streamed; else drawn
    sent: float = 0.0  # the latest response with tokens
    ended: float = 0.0
    reason: str = ""  # one of FINISH_REASONS or ERROR_REASONS
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of those, not computed: their prefix was cached
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def count(self, sequence: Sequence) -> None:
        """What is known when the engine is through with it; before its final chunk can be sent."""
        self.num_output_tokens = sequence.num_emitted
        self.num_draft_tokens = sequence.total_draft_tokens
        self.num_accepted_tokens = sequence.total_accepted_draft_tokens


class EngineMetrics:
    """Since the engine was made. ``num_draft_tokens``: the deployment's N."""

    def __init__(self, num_draft_tokens: int):
        # The loop writes these.
        self.num_prompt_tokens = self.num_cached_tokens = 0  # of requests that began to run
        self.queue_time = Histogram()
        self.totals = TokenTotals(
            num_draft_tokens
        )  # of complete requests, under the engine's lock; see Engine.totals
        # The sender writes these.
        self.time_to_first_token = Histogram()
        self.time_per_output_token = Histogram()
        self.inter_chunk_latency = Histogram()
        self.e2e_request_latency = Histogram()
        self._gaps: list[float] = []  # between chunks, observed when a request ends or many have gathered
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.failed = dict.fromkeys(ERROR_REASONS, 0)
        # Whoever submits does.
        self.rejected = dict.fromkeys(ERROR_REASONS, 0)
        # Both.
        self.ended: deque[RequestTrace] = deque(maxlen=MAX_ENDED)  # to be taken by one reader

    def admitted(self, sequence: Sequence) -> None:
        """It runs, maybe once more after a preemption."""
        trace = sequence.outbox.trace
        if not trace.admitted:
            trace.admitted = monotonic()
            trace.num_cached_tokens = sequence.num_computed
            self.queue_time.observe(trace.admitted - trace.arrived)
            self.num_prompt_tokens += trace.num_prompt_tokens
            self.num_cached_tokens += trace.num_cached_tokens

    def sent(self, outbox: Outbox, chunk: Chunk) -> None:
        trace, now = outbox.trace, monotonic()
        if chunk.ids:
            if trace.sent:
                self._gaps.append(now - trace.sent)
            else:
                if outbox.stream:
                    trace.first_token = now
                self.time_to_first_token.observe(trace.first_token - trace.arrived)
            trace.sent = now
        if chunk.final or len(self._gaps) >= MAX_GAPS:
            self.inter_chunk_latency.observe_all(self._gaps)
            self._gaps.clear()
        if chunk.final:
            self._ended(trace, chunk, now)

    def reject(self, trace: RequestTrace, error: InklingError) -> None:
        """The request was answered with ``error`` in place of being queued."""
        trace.ended, trace.reason = monotonic(), error.reason
        self.rejected[trace.reason] += 1
        self.ended.append(trace)

    def _ended(self, trace: RequestTrace, chunk: Chunk, now: float) -> None:
        trace.ended, trace.reason = now, chunk.error.reason if chunk.error else chunk.finish_reason
        if chunk.error is not None:
            self.failed[trace.reason] += 1
        else:
            self.finished[trace.reason] += 1
            self.e2e_request_latency.observe(now - trace.arrived)
            if trace.num_output_tokens > 1:
                decode_s = trace.sent - trace.first_token
                self.time_per_output_token.observe(decode_s / (trace.num_output_tokens - 1))
        self.ended.append(trace)

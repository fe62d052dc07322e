"""Streams of a load, read by client processes: one Python process cannot keep up with 128 of them.

Every stream counts its tokens in memory that all processes share, so the measuring process knows when all are
decoding, and ends them all at once by one flag. A stream that is ended so is cancelled on the server.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.pool import AsyncResult
from typing import Any, NamedTuple

import numpy as np

from inkling.client import ResponseError, stream_grpc

POLL_S = 0.001
_FAILED = -(1 << 30)  # the count of a stream that cannot go on

_counts: Any = None  # in a client process: tokens of every stream so far
_ended: Any = None  # in a client process: whether all streams shall end


class Chunk(NamedTuple):
    """One response with tokens."""

    time: float  # seconds of the monotonic clock, which all processes share
    num_tokens: int
    num_accepted: int  # drafts, since the answer began


@dataclass
class Answer:
    sent: float  # seconds; connecting is part of what follows
    chunks: list[Chunk] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    error: str = ""


class StreamError(Exception):
    """A stream failed, ended too soon, or the time ran out."""


class Clients:
    """Client processes for up to ``max_streams`` streams at once, as a context manager."""

    def __init__(self, max_streams: int, num_processes: int):
        context = multiprocessing.get_context("spawn")
        self._shared = context.Array("i", max_streams, lock=False)
        self._ended = context.Value("b", 0, lock=False)
        self._pool = context.Pool(num_processes, _share, (self._shared, self._ended))
        self._num_processes = num_processes
        self._running: AsyncResult[list[list[Answer]]] | None = None
        self._num_streams, self._timeout_s = 0, 0.0

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()
        self._pool.join()

    @property
    def counts(self) -> np.ndarray:
        """Tokens of each running stream so far, int32 [streams]."""
        return np.frombuffer(self._shared, np.int32)[: self._num_streams].copy()

    def start(self, url: str, requests: Sequence[Mapping[str, Any]], timeout_s: float) -> None:
        """Sends all requests over gRPC. ``timeout_s``: longest wait for one response."""
        self._num_streams, self._timeout_s = len(requests), timeout_s
        np.frombuffer(self._shared, np.int32)[:] = 0
        self._ended.value = 0
        numbered = list(enumerate(requests))
        shares = [numbered[start :: self._num_processes] for start in range(self._num_processes)]
        jobs = [(url, share, timeout_s) for share in shares if share]
        self._running = self._pool.starmap_async(_read_all, jobs, chunksize=1)

    def wait_for(self, tokens: np.ndarray | int, deadline: float) -> float:
        """The time when every stream had that many ``tokens``. Raises StreamError when one fails, or too late."""
        while True:
            counts, now = self.counts, time.monotonic()
            if counts.min() < 0:
                raise StreamError(f"stream {int(counts.argmin())} failed")
            if (counts >= tokens).all():
                return now
            if now > deadline:
                raise StreamError(f"the time ran out; the slowest stream has {int(counts.min())} tokens")
            time.sleep(POLL_S)

    def stop(self) -> list[Answer]:
        """Ends the streams. Their answers, in the order of the requests."""
        assert self._running is not None, "nothing was started"
        self._ended.value = 1
        shares = self._running.get(self._timeout_s + 10.0)  # a stream sees the flag with its next response
        self._running = None
        return [shares[i % len(shares)][i // len(shares)] for i in range(self._num_streams)]


def _share(counts: Any, ended: Any) -> None:
    global _counts, _ended
    _counts, _ended = counts, ended


def _read_all(url: str, requests: list[tuple[int, Mapping[str, Any]]], timeout_s: float) -> list[Answer]:
    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(lambda request: _read(url, *request, timeout_s), requests))


def _read(url: str, number: int, inputs: Mapping[str, Any], timeout_s: float) -> Answer:
    answer = Answer(time.monotonic())
    try:
        with closing(stream_grpc(url, inputs, timeout_s)) as responses:  # closed early: cancelled
            for response in responses:
                ids = response["output_ids"]
                accepted = response["total_accepted_draft_tokens"]
                answer.chunks.append(Chunk(time.monotonic(), len(ids), accepted))
                answer.ids += ids
                _counts[number] += len(ids)
                if _ended.value:
                    return answer
        answer.error = f"the answer ended after {len(answer.ids)} tokens, before it was measured"
    except ResponseError as error:
        answer.error = str(error)
    _counts[number] = _FAILED
    return answer

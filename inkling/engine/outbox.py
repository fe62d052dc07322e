"""Answers on their way out. The loop puts increments into outboxes; one thread sends, so the loop never does.

A send costs the server a quarter of a millisecond: one send carries all that has gathered for a request since
the last. Between sends the same thread asks, request by request, whether the client has gone away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from inkling.engine.log_probs import TokenLogProb
from inkling.engine.metrics import EngineMetrics, RequestTrace
from inkling.errors import InklingError

_log = logging.getLogger(__name__)

POLL_ROUND_S = 0.02  # every open request is asked about cancellation once in this time ...
POLL_PAUSE_S = 0.001  # ... but one poll (50 us of two processes) follows another no sooner than this


@dataclass(slots=True)
class Chunk:
    """One response: what has gathered since the last. An error comes alone and is final."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""  # stop | length | timeout, with ``final``
    error: InklingError | None = None
    final: bool = False  # the last one
    num_input_tokens: int = 0
    total_draft_tokens: int = 0  # verified so far
    total_accepted_draft_tokens: int = 0  # accepted and emitted so far
    log_probs: list[TokenLogProb] = field(default_factory=list)  # of ``ids``, where asked for
    cum_log_prob: float = 0.0  # of all tokens so far
    prompt_log_probs: list[TokenLogProb] | None = (
        None  # from the second prompt token on; once, where asked for
    )


class Reply(Protocol):
    """The transport of one request. Called by the sender thread only. Must send FINAL with a final chunk."""

    def send(self, chunk: Chunk) -> None: ...

    def is_cancelled(self) -> bool: ...


class Assembler(Protocol):
    """Text of one answer (``inkling.text.TextAssembler``). It hides the ids that have no text."""

    def append(self, token_id: int) -> bool:
        """Takes the next token; True when it completes a stop word."""
        ...

    def take(self) -> str:
        """The text that may be released now."""
        ...

    def finish(self) -> str:
        """The text left at the end of the request."""
        ...


class Outbox:
    """What one request is still owed. ``push`` and ``drain`` may be called from different threads."""

    def __init__(self, reply: Reply, stream: bool, num_input_tokens: int, trace: RequestTrace | None = None):
        self.reply = reply
        self.trace = trace or RequestTrace()
        self.trace.num_prompt_tokens = num_input_tokens
        self.stream = stream  # else: one chunk, the final one
        self.cancelled = False  # set by the sender or by Engine.cancel; the loop acts on it at the next step
        self.queued = False  # the sender's
        self._lock = threading.Lock()
        self._chunk = Chunk(num_input_tokens=num_input_tokens)
        self._text: list[str] = []
        self._complete = False

    def push(
        self,
        ids: list[int],
        text: str,
        finish_reason: str,
        total_draft_tokens: int,
        total_accepted_draft_tokens: int,
        log_probs: Iterable[TokenLogProb] = (),
        cum_log_prob: float = 0.0,
        prompt_log_probs: list[TokenLogProb] | None = None,
    ) -> None:
        """Adds an increment; a finish reason makes it the last. Nothing is taken after that."""
        with self._lock:
            if self._complete:
                return
            chunk = self._chunk
            if ids and not (self.stream or chunk.ids):
                self.trace.first_token = time.monotonic()
            chunk.ids += ids
            if text:
                self._text.append(text)
            chunk.log_probs += log_probs
            chunk.cum_log_prob = cum_log_prob
            if prompt_log_probs is not None:
                chunk.prompt_log_probs = prompt_log_probs
            chunk.finish_reason = finish_reason
            chunk.total_draft_tokens = total_draft_tokens
            chunk.total_accepted_draft_tokens = total_accepted_draft_tokens
            self._complete = chunk.final = bool(finish_reason)

    def fail(self, error: InklingError) -> None:
        """Ends the request with ``error``, in place of what has not been sent yet."""
        with self._lock:
            if not self._complete:
                self._complete = True
                self._text.clear()
                self._chunk = Chunk(error=error, final=True, num_input_tokens=self._chunk.num_input_tokens)

    def drain(self) -> Chunk | None:
        """All that has gathered, as one chunk; None when there is nothing to send yet."""
        with self._lock:
            chunk = self._chunk
            if not chunk.final and not (self.stream and (chunk.ids or self._text)):
                return None
            chunk.text = "".join(self._text)
            self._text.clear()
            self._chunk = Chunk(
                num_input_tokens=chunk.num_input_tokens,
                total_draft_tokens=chunk.total_draft_tokens,
                total_accepted_draft_tokens=chunk.total_accepted_draft_tokens,
                cum_log_prob=chunk.cum_log_prob,
            )
            return chunk


class Sender:
    """Sends for all requests. ``on_cancel`` is called, by this thread, when a client has gone away."""

    def __init__(self, on_cancel: Callable[[], None], metrics: EngineMetrics):
        self._on_cancel = on_cancel
        self._metrics = metrics
        self._changed = threading.Condition()
        self._ready: deque[Outbox] = deque()
        self._open: deque[Outbox] = deque()  # to be polled, the next one first
        self._num_open = 0
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def num_open(self) -> int:
        """Requests whose final chunk has not been sent."""
        return self._num_open

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 30.0) -> None:
        """Sends all that is ready, then ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
        else:
            self.send_ready()

    def register(self, outbox: Outbox) -> None:
        """Takes a new request into the round of cancellation polls."""
        with self._changed:
            self._open.append(outbox)
            self._num_open += 1
            self._changed.notify_all()

    def post(self, outboxes: Iterable[Outbox]) -> None:
        """Marks outboxes as having something to send."""
        with self._changed:
            for outbox in outboxes:
                if not outbox.queued:
                    outbox.queued = True
                    self._ready.append(outbox)
            self._changed.notify_all()

    def wait_all_sent(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._num_open == 0, timeout_s)

    def send_ready(self) -> None:
        """Sends all that is ready, in the calling thread (for a sender that was not started)."""
        while (outbox := self._next_ready()) is not None:
            self._send(outbox)

    def poll_all(self) -> None:
        """Asks every open request once, in the calling thread."""
        for _ in range(len(self._open)):
            self._poll_next()

    def _run(self) -> None:
        next_poll = 0.0
        while True:
            with self._changed:
                if not self._ready:
                    if self._closing:
                        return
                    self._changed.wait(max(0.0, next_poll - time.monotonic()) if self._open else None)
            if (outbox := self._next_ready()) is not None:
                self._send(outbox)
            if (now := time.monotonic()) >= next_poll and self._open:
                self._poll_next()
                next_poll = now + max(POLL_PAUSE_S, POLL_ROUND_S / max(1, len(self._open)))

    def _next_ready(self) -> Outbox | None:
        with self._changed:
            if not self._ready:
                return None
            outbox = self._ready.popleft()
            outbox.queued = False
            return outbox

    def _send(self, outbox: Outbox) -> None:
        chunk = outbox.drain()
        if chunk is None:
            return
        try:
            outbox.reply.send(chunk)
        except Exception:
            _log.exception("a response could not be sent; its request ends")
            self._give_up(outbox, chunk)
            return
        self._metrics.sent(outbox, chunk)
        if chunk.final:
            self._finished(outbox)

    def _give_up(self, outbox: Outbox, failed: Chunk) -> None:
        """After a failed send: one bare error with FINAL, because a request without FINAL never ends."""
        error = InklingError("a response could not be sent; the server's log has the reason")
        outbox.fail(error)
        outbox.drain()
        last = Chunk(error=failed.error or error, final=True)
        try:
            outbox.reply.send(last)
        except Exception:
            _log.exception("nor could its error be sent")
        self._metrics.sent(outbox, last)
        self._finished(outbox)
        self._cancel(outbox)

    def _finished(self, outbox: Outbox) -> None:
        with self._changed:
            with suppress(ValueError):  # no longer polled
                self._open.remove(outbox)
            self._num_open -= 1
            self._changed.notify_all()

    def _poll_next(self) -> None:
        with self._changed:
            if not self._open:
                return
            outbox = self._open.popleft()
            if outbox.cancelled:  # known: no more polls
                return
            self._open.append(outbox)
        try:
            cancelled = outbox.reply.is_cancelled()
        except Exception:
            _log.exception("is_cancelled failed; its request ends")
            cancelled = True
        if cancelled:
            self._cancel(outbox)

    def _cancel(self, outbox: Outbox) -> None:
        outbox.cancelled = True
        self._on_cancel()

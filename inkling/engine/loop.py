"""The speculation loop: plan, target, verify, commit, reply, draft.

The loop knows two callables that execute step messages, no server and no tensors. It owns all state of all
requests; other threads only submit, cancel and wait.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np

from inkling.engine.beside import Beside
from inkling.engine.channel import Channel, Session, records, target_words
from inkling.engine.clients import DraftClient, TargetClient
from inkling.engine.log_probs import take_log_probs
from inkling.engine.metrics import EngineMetrics, RequestTrace, TokenTotals
from inkling.engine.outbox import Assembler, Outbox, Reply, Sender
from inkling.engine.pages import CacheLayout
from inkling.engine.request import GenerateRequest
from inkling.engine.scheduler import EngineLimits, PlannedPass, Scheduler, Segment
from inkling.engine.sequence import Phase, Sequence, text_error
from inkling.engine.verify import accepted_prefix
from inkling.errors import CancelledError, DrainingError, InklingError, ModelError
from inkling.protocol import DraftStep, TargetStep

_log = logging.getLogger(__name__)

MAX_STEP = 2**31 - 1  # step numbers are INT32 words and only compared for equality; 0 is never one
STOPPED = "the server stopped before the answer was complete"


class Engine:
    """Serves requests with one target and one draft model.

    ``submit``, ``cancel``, ``drain`` and ``close`` may be called from any thread. Either ``start`` runs the
    loop and the sender in two threads, or the caller runs ``step`` and ``sender.send_ready`` itself.

    When a model or the engine's own code fails in a step, every open request is answered with the error and
    FINAL, and all state is dropped. Later requests are tried afresh: the next message makes the models forget
    every slot, so the engine works again as soon as they answer.
    """

    def __init__(
        self,
        limits: EngineLimits,
        layout: CacheLayout,
        target: TargetClient,
        draft: DraftClient | None,
        session: Session,
    ):
        if draft is None and limits.num_draft_tokens:
            raise ValueError(
                f"num_draft_tokens is {limits.num_draft_tokens} but there is no draft model; set it to 0"
            )
        self.limits = limits
        self.scheduler = Scheduler(limits, layout)
        self.metrics = EngineMetrics(limits.num_draft_tokens)
        self.sender = Sender(self._wake, self.metrics)
        self._replies = Beside()
        self._target, self._draft = target, draft
        self._to_target = Channel(TargetStep, session)
        self._to_draft = Channel(DraftStep, session)
        self._step = 0
        self._changed = threading.Condition()  # guards the queue and the fields below
        self._open: set[Sequence] = set()  # requests whose final chunk the sender does not have
        self._attention = False  # a request was cancelled
        self._next_deadline = math.inf  # of the open requests, monotonic seconds
        self._draining = self._closing = False
        self._thread: threading.Thread | None = None

    # Any thread.

    def submit(
        self,
        request: GenerateRequest,
        reply: Reply,
        assembler: Assembler | None = None,
        *,
        stream: bool = False,
        trace: RequestTrace | None = None,
    ) -> Sequence:
        """Queues a request and returns its handle; its answer goes to ``reply``. ``trace``: of one that came earlier.

        Raises RequestError, QueueFullError or DrainingError, and has not touched ``reply`` then.
        """
        outbox = Outbox(reply, stream, len(request.prompt_ids), trace)
        sequence = self.limits.sequence(request, outbox, assembler)
        with self._changed:
            if self._draining or self._closing:
                raise DrainingError("the server is about to stop; send the request to another one")
            self.scheduler.enqueue(sequence)
            self._open.add(sequence)
            self._next_deadline = min(self._next_deadline, sequence.deadline)
            self.sender.register(sequence.outbox)
            self._changed.notify_all()
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Ends a request at the next step boundary with CANCELLED; no effect when it is complete."""
        sequence.outbox.cancelled = True
        self._wake()

    def start(self) -> None:
        self.sender.start()
        self._replies.start("replies")
        self._thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Takes no more requests and waits until all are answered; False when some are not by then."""
        with self._changed:
            self._draining = True
        return self.sender.wait_all_sent(timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """Ends every open request with an error, then both threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self.abandon(DrainingError(STOPPED))
        self.sender.close(timeout_s)

    def totals(self) -> TokenTotals:
        """Of all requests up to now."""
        with self._changed:
            return self.metrics.totals.with_open(self._open)

    def abandon(self, error: InklingError) -> None:
        """Answers every open request now and takes no more, also when the loop hangs in a call."""
        with self._changed:
            self._closing = True
            failed = [sequence.outbox for sequence in self._open]
            self._changed.notify_all()
        for outbox in failed:
            outbox.fail(error)
        self.sender.post(failed)

    def _wake(self) -> None:
        with self._changed:
            self._attention = True
            self._changed.notify_all()

    # The loop thread.

    def run(self) -> None:
        """Steps while there is work, until ``close``."""
        try:
            while True:
                with self._changed:
                    if self._closing:
                        return
                    if not self.scheduler.has_work:
                        self._check_idle()
                        self._changed.wait()
                        continue
                self.step()
        finally:
            with self._changed:
                self._closing = True
            self._fail_all(DrainingError(STOPPED))
            self._replies.close()

    def step(self) -> bool:
        """One step for all running sequences; whether work remains. Raises nothing."""
        try:
            self.scheduler.pace.schedule_starts()
            self._retire()
            self._admit()
            if plan := self.scheduler.plan():
                self._run(plan)
            else:
                self._replies.wait()
        except Exception as error:
            _log.exception("step %d failed; %d requests end", self._step, len(self._open))
            error.__traceback__ = error.__context__ = error.__cause__ = (
                None  # their frames hold the hidden states
            )
            self._fail_all(
                error if isinstance(error, InklingError) else InklingError(f"the engine failed: {error!r}")
            )
        return self.scheduler.has_work

    def _run(self, plan: list[Segment]) -> None:
        pages = self._secure([s.target_pass() for s in plan])
        plan = [s for s in plan if s.sequence.phase is Phase.RUNNING]
        if plan:  # else all of them gave way to others, which run next
            tokens, hidden, scores = self._run_target(plan, pages)
            self._replies.wait()  # of the step before; what follows changes what they read
            self._verify(plan, tokens)
            take_log_probs(plan, scores)
            self._commit(plan)
            self._replies.run(lambda: self._reply(plan))
            self._run_draft(plan, hidden)
            self.scheduler.pace.step_ran()

    def _retire(self) -> None:
        """Ends what was cancelled or is past its deadline."""
        now = time.monotonic()
        with self._changed:
            if not self._attention and now < self._next_deadline:
                return
            self._attention = False
            ended = [s for s in self._open if s.outbox.cancelled or s.deadline <= now]
            self._next_deadline = min((s.deadline for s in self._open.difference(ended)), default=math.inf)
        self._replies.wait()
        for sequence in ended:
            if sequence.outbox.cancelled:
                self._end(sequence, CancelledError("the request was cancelled"))
            else:
                sequence.finish_reason = "timeout"
                self._end(sequence)
                self._push(sequence)
        self._post(ended)

    def _admit(self) -> None:
        with self._changed:
            admitted = self.scheduler.admit()
        for sequence in admitted:
            self.metrics.admitted(sequence)
            self._to_target.open(sequence)
            if sequence.num_depths:
                self._to_draft.open(sequence)

    def _secure(self, passes: list[PlannedPass]) -> list[int]:
        """Words of the page records for ``passes``. Sequences that lost theirs are waiting again."""
        words, preempted = self.scheduler.secure(passes)
        for sequence in preempted:
            self._to_target.close(sequence)
            self._to_draft.close(sequence)
        if preempted:
            with self._changed:
                self.scheduler.requeue(preempted)
        return words

    def _run_target(self, plan: list[Segment], pages: list[int]) -> tuple[list[int], Any, np.ndarray | None]:
        self._step = self._step % MAX_STEP + 1
        words = target_words(plan)
        step = self._target.step_scored if words.wants_log_probs else self._target.step
        lengths = self.scheduler.lengths
        lengths.call_starts()
        tokens, hidden, *log_probs = self._to_target.exchange(
            self._step, records(words.segments, 4), words.ids, pages, step, scores=records(words.scores, 2)
        )
        sequences = sum(segment.draws > 0 for segment in plan)
        lengths.target_ran(len(words.ids), len(words.ids) - words.num_draws, sequences)
        if tokens.size != words.num_draws:
            raise ModelError(
                f"the target drew {tokens.size} tokens in step {self._step}; {words.num_draws} were asked for"
            )
        return tokens.tolist(), hidden, log_probs[0] if log_probs else None

    def _verify(self, plan: list[Segment], tokens: list[int]) -> None:
        lengths = self.scheduler.lengths
        start = 0
        for segment in plan:
            if draws := segment.draws:
                drawn = tokens[start : start + draws]
                start += draws
                if draws > 1:
                    segment.accepted = accepted_prefix(segment.sequence.drafts[: draws - 1], drawn)
                    lengths.verified(draws - 1, segment.accepted)
                segment.tokens = drawn[: segment.accepted + 1]

    def _commit(self, plan: list[Segment]) -> None:
        record = self.scheduler.prefixes.record
        for segment in plan:
            sequence, num_drafts, accepted = segment.sequence, segment.num_drafts, segment.accepted
            sequence.num_computed += segment.rows - num_drafts + accepted
            sequence.drafts = []
            if sequence.window is not None:
                sequence.window.verified(accepted)
            try:
                segment.emitted = sequence.emit(segment.tokens)
            except Exception as error:  # of the assembler: this request's own trouble
                self._end(sequence, text_error(error))
                continue
            if segment.log_probs:
                segment.log_probs = segment.log_probs[: len(segment.emitted)]
            record(sequence)
            if num_drafts:
                accepted = min(accepted, len(segment.emitted))
                sequence.total_draft_tokens += num_drafts
                sequence.total_accepted_draft_tokens += accepted
                sequence.accepted[accepted] += 1
            if sequence.finish_reason:
                sequence.num_computed = min(sequence.num_computed, len(sequence.ids))  # not past the cut
                self._end(sequence)

    def _run_draft(self, plan: list[Segment], hidden: Any) -> None:
        segments: list[int] = []
        ids: list[int] = []
        drafting: list[tuple[Sequence, int]] = []
        lengths = self.scheduler.lengths
        for sequence in self.scheduler.choose_lengths(plan):
            self._to_draft.close(sequence)
        windows = self.scheduler.plan_windows(plan)
        pages = self._secure([w.draft_pass() for w in windows if w.window.end > w.window.first])
        for segment, hidden_row, window in windows:
            if (sequence := segment.sequence).phase is not Phase.RUNNING:  # gave way
                continue
            first, num_known = window.first, window.num_known
            states = hidden_row, segment.first, sequence.num_computed - segment.first
            segments += (sequence.slot, *states, *window)
            ids += sequence.ids[first + 1 : first + 1 + num_known]
            drafting.append((sequence, window.drafts))
        if not drafting:
            return
        step = self._draft.step
        lengths.call_starts()
        drafts = self._to_draft.exchange(
            self._step, records(segments, 9), ids, pages, lambda control: step(control, hidden)
        ).tolist()
        lengths.draft_ran(segments)
        if len(drafts) != sum(n for _, n in drafting):
            raise ModelError(
                f"the draft returned {len(drafts)} tokens in step {self._step}; "
                f"{sum(n for _, n in drafting)} were asked for"
            )
        start, record = 0, self.scheduler.prefixes.record
        for sequence, num_drafts in drafting:
            sequence.drafts = drafts[start : start + num_drafts]
            start += num_drafts
            record(sequence)

    def _reply(self, plan: list[Segment]) -> None:
        ready = []
        for segment in plan:
            sequence = segment.sequence
            if segment.emitted:
                self._push(sequence, segment.emitted, segment.log_probs)
            if sequence.phase is Phase.FINISHED or (segment.emitted and sequence.outbox.stream):
                ready.append(sequence)
        if ready:
            self._post(ready)

    def _push(self, sequence: Sequence, *increment: object) -> None:
        try:
            sequence.push(*increment)
        except Exception as error:  # of the assembler
            sequence.outbox.fail(text_error(error))
            self.cancel(sequence)  # which takes it out of the batch

    def _post(self, sequences: list[Sequence]) -> None:
        self.sender.post([sequence.outbox for sequence in sequences])
        finished = [sequence for sequence in sequences if sequence.phase is Phase.FINISHED]
        if finished:
            with self._changed:
                self.metrics.totals.add(self._open.intersection(finished))
                self._open.difference_update(finished)

    def _end(self, sequence: Sequence, error: InklingError | None = None) -> None:
        """Takes a sequence out of queue or batch; ``error`` goes to its outbox."""
        sequence.outbox.trace.count(sequence)
        if sequence.phase is not Phase.FINISHED:
            self.scheduler.lengths.ended(sequence.prompts)
        if sequence.phase is Phase.RUNNING:
            self._to_target.close(sequence)
            self._to_draft.close(sequence)
            self.scheduler.release(sequence)
        elif sequence.phase is Phase.WAITING:
            with self._changed:
                self.scheduler.waiting.remove(sequence)
            sequence.phase = Phase.FINISHED
        if error is not None:
            sequence.outbox.fail(error)

    def _fail_all(self, error: InklingError) -> None:
        """Answers every open request with ``error`` and drops all state."""
        with suppress(Exception):  # they are answered with an error anyway
            self._replies.wait()
        with self._changed:
            self.scheduler.reset()
            failed = list(self._open)
        self._to_target.reset()
        self._to_draft.reset()
        for sequence in failed:
            sequence.phase = Phase.FINISHED
            sequence.outbox.trace.count(sequence)
            sequence.outbox.fail(error)
        self._post(failed)

    def _check_idle(self) -> None:
        try:
            self.scheduler.check_integrity()
        except Exception:
            _log.exception("the page tables do not add up while idle; starting afresh")
            self.scheduler.reset()
            self._to_target.reset()
            self._to_draft.reset()

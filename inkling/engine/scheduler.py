"""Who runs next: the queue, admission, the rows of each step, and who gives way when pages run short."""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from inkling.engine.draft_length import AutoDraftLength, DraftLength, choose_lengths
from inkling.engine.draft_window import Window
from inkling.engine.log_probs import TokenLogProb
from inkling.engine.outbox import Assembler, Outbox
from inkling.engine.pace import StepPace
from inkling.engine.pages import (
    CacheLayout,
    Model,
    PageAllocator,
    PagesExhaustedError,
    SequencePages,
    worst_case_pages,
)
from inkling.engine.prefix_cache import PrefixCache
from inkling.engine.request import GenerateRequest
from inkling.engine.sequence import Phase, Sequence
from inkling.errors import InklingError, QueueFullError, RequestError
from inkling.settings import Settings

_rank = attrgetter("rank")


@dataclass(frozen=True)
class EngineLimits:
    max_context: int  # positions of one sequence, prompt and answer
    max_running_sequences: int  # slots
    max_tokens_per_step: int  # rows of one target call
    max_queued_requests: int
    num_draft_tokens: int  # N: the most drafts a step verifies; 0: no draft model
    max_prompt_chunk: int = (
        1 << 30
    )  # rows of one prompt in a step; 0: all prompts share what ``StepPace`` gives
    auto_draft_length: bool = False  # each step drafts the number that gives the most tokens per second
    prefix_block: int = 0  # positions that a cached prefix is a multiple of; 0: no prefix reuse

    @classmethod
    def of(cls, settings: Settings, max_context: int, num_draft_tokens: int) -> EngineLimits:
        return cls(
            max_context,
            settings.max_running_sequences,
            settings.max_tokens_per_step,
            settings.max_queued_requests,
            num_draft_tokens,
            settings.max_prompt_chunk,
            settings.draft_length == "auto",
            settings.prefix_block if settings.prefix_cache == "on" else 0,
        )

    def __post_init__(self) -> None:
        for name in (
            "max_context",
            "max_running_sequences",
            "max_tokens_per_step",
            "max_queued_requests",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("num_draft_tokens", "prefix_block", "max_prompt_chunk"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")

    def sequence(self, request: GenerateRequest, outbox: Outbox, assembler: Assembler | None) -> Sequence:
        """A new one; its deadline counts from now. Raises RequestError when no state of the engine could serve it."""
        num_prompt, given = len(request.prompt_ids), request.num_draft_tokens
        if not 1 <= num_prompt < self.max_context:
            raise RequestError(f"the prompt has {num_prompt} tokens; 1 to {self.max_context - 1} are allowed")
        if request.stop.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.stop.max_tokens}; it must be 1 or more")
        if not 0 <= given <= self.num_draft_tokens:
            raise RequestError(f"num_draft_tokens is {given}; it must be 0 to {self.num_draft_tokens}")
        max_tokens = min(request.stop.max_tokens, self.max_context - num_prompt)
        deadline = time.monotonic() + request.timeout_us / 1e6 if request.timeout_us else math.inf
        return Sequence(request, outbox, assembler, max_tokens=max_tokens, deadline=deadline)


@dataclass(slots=True)
class PlannedPass:
    """Rows [first, end) that a model is about to run for ``sequence``."""

    sequence: Sequence
    pages: SequencePages  # of that model
    first: int
    end: int


@dataclass(slots=True)
class Segment:
    """One sequence's part of a step: target rows [first, first + rows), the last ``draws`` of them drawn
    from."""

    sequence: Sequence
    first: int
    rows: int
    draws: int  # 0: prompt remains; 1: no drafts; n + 1: verifies n
    accepted: int = 0
    tokens: list[int] | tuple[int, ...] = ()  # drawn, up to the first that follows a fallen draft
    emitted: list[int] | tuple[int, ...] = ()  # of those, up to the cut
    log_probs: (
        list[TokenLogProb] | tuple[TokenLogProb, ...]
    ) = ()  # of ``tokens``, where the request wants them

    @property
    def num_drafts(self) -> int:
        return max(0, self.draws - 1)

    def target_pass(self) -> PlannedPass:
        return PlannedPass(self.sequence, self.sequence.target_pages, self.first, self.first + self.rows)


class PlannedWindow(NamedTuple):
    """The draft window that follows a segment, whose target states begin at ``hidden_row`` of the step's."""

    segment: Segment
    hidden_row: int
    window: Window

    def draft_pass(self) -> PlannedPass:
        sequence = self.segment.sequence
        return PlannedPass(sequence, sequence.draft_pages, self.window.first, self.window.end)


class Scheduler:
    """Larger ``priority`` first, first come first served within one.

    That order is a sequence's rank, for life. A sequence is admitted when a slot is free and the pages suffice
    for all its known ids, beside those that the running ones need for theirs. Answers grow beyond that: when a
    pass finds no page, cached prefixes go first, then the sequence of lowest rank is preempted. It gives
    everything back and waits in its old place, to compute its ids again from the longest cached prefix on. The
    sequence of highest rank is never preempted, so every one finishes. Priority decides who waits and who gives
    way; it takes no slot from a running sequence.
    """

    def __init__(self, limits: EngineLimits, layout: CacheLayout):
        self.limits = limits
        self.layout = layout
        kind = AutoDraftLength if limits.auto_draft_length else DraftLength
        self.lengths = kind(limits.num_draft_tokens)
        self.pace = StepPace()
        self.num_preemptions = 0
        self._num_arrivals = 0
        self.reset()

    def reset(self) -> None:
        """Forgets every sequence; all pages and slots are free."""
        self.allocator = PageAllocator(self.layout)
        self.prefixes = PrefixCache(self.layout, self.limits.prefix_block)
        self.waiting: list[Sequence] = []  # by rank
        self.running: list[Sequence] = []
        self._free_slots = list(range(self.limits.max_running_sequences - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def enqueue(self, sequence: Sequence) -> None:
        """Raises QueueFullError, or RequestError when the request would not fit empty caches."""
        if len(self.waiting) >= self.limits.max_queued_requests:
            raise QueueFullError(
                f"{len(self.waiting)} requests are waiting, which is the bound; try again later"
            )
        total = sequence.num_prompt_tokens + sequence.max_tokens
        for model in Model:
            if why := self.allocator.shortage(model, self._pages_for(sequence, model, total - 1)):
                raise RequestError(
                    f"prompt and max_tokens together are {total} tokens and need {why}; "
                    "shorten the prompt, lower max_tokens, or give the server more cache_bytes"
                )
        self._num_arrivals += 1
        sequence.rank = (-sequence.request.priority, self._num_arrivals)
        insort(self.waiting, sequence, key=_rank)

    def admit(self) -> list[Sequence]:
        """Moves sequences from the head of the queue into free slots while pages suffice for their ids."""
        admitted = []
        wanted = self._wanted_pages(self.running) if self.waiting and self._free_slots else []
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            self._start(sequence)
            wanted = [sum(pair) for pair in zip(wanted, self._wanted_pages([sequence]), strict=True)]
            if self.running and not self._are_available(wanted):
                self._stop(sequence, Phase.WAITING)
                break
            self.waiting.pop(0)
            self.prefixes.started(sequence)
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def release(self, sequence: Sequence) -> None:
        """Takes a running sequence out; its pages and its slot are free."""
        self.running.remove(sequence)
        self._stop(sequence, Phase.FINISHED)

    def secure(self, passes: Iterable[PlannedPass]) -> tuple[list[int], list[Sequence]]:
        """Backs every pass with pages; returns the words of the page records, and the sequences preempted for
        it, whose passes do not run. They hold nothing more; ``requeue`` them."""
        words: list[int] = []
        preempted: list[Sequence] = []
        passes = [p for p in passes if not p.pages.is_ready(p.first, p.end)]
        for planned in sorted(passes, key=lambda p: p.sequence.rank):
            sequence, fresh = planned.sequence, []
            while sequence.phase is Phase.RUNNING:
                try:
                    planned.pages.cover(planned.first, planned.end, sequence.slot, fresh)
                except PagesExhaustedError as error:
                    if self.prefixes.make_room(error.pool, self.running):
                        continue
                    victim = max(self.running, key=_rank)
                    if len(self.running) == 1:
                        raise InklingError(f"{error}, by one sequence that was to fit") from error
                    self._preempt(victim)
                    preempted.append(victim)
                else:
                    words += fresh
                    break
        return words, preempted

    def requeue(self, preempted: Iterable[Sequence]) -> None:
        """Puts preempted sequences back in their places, ahead of later arrivals of their priority."""
        for sequence in preempted:
            insort(self.waiting, sequence, key=_rank)

    def plan(self) -> list[Segment]:
        """The segments of one step, at most ``max_tokens_per_step`` rows.

        Every decode gets its row and the first prompt at least one; what is left goes to drafts, then to prompts,
        both by rank. With more sequences than rows they take turns, a row each.
        """
        budget = self.limits.max_tokens_per_step
        if len(self.running) > budget:
            turn, rest = self.running[:budget], self.running[budget:]
            self.running = rest + turn
            return [self._segment(sequence, 1) for sequence in turn]
        decodes, prompts = [], []
        for sequence in self.running:
            (prompts if sequence.num_uncomputed > 1 else decodes).append(sequence)
        spare = budget - len(decodes) - bool(prompts)
        plan = []
        if spare < len(decodes) * self.limits.num_draft_tokens:
            decodes.sort(key=_rank)
        for sequence in decodes:
            num_drafts = min(len(sequence.drafts), spare)
            spare -= num_drafts
            plan.append(Segment(sequence, sequence.num_computed, 1 + num_drafts, 1 + num_drafts))
        spare += bool(prompts)
        chunk = self.limits.max_prompt_chunk
        if prompts and not chunk:
            chunk = spare = self.pace.prompt_rows(sum(segment.rows for segment in plan), spare)
        for sequence in sorted(prompts, key=_rank):
            if spare == 0:
                break
            rows = min(sequence.num_uncomputed, spare, chunk)
            rows = self.prefixes.chunk_rows(sequence.num_computed, rows, len(sequence.ids))
            spare -= rows
            plan.append(self._segment(sequence, rows))
        self.pace.step_starts(sum(segment.rows for segment in plan), len(decodes))
        return plan

    def choose_lengths(self, plan: list[Segment]) -> list[Sequence]:
        """Chooses how much the sequences of ``plan`` draft; returns those that draft no more."""
        if not self.lengths.is_auto:
            return []
        planned = {segment.sequence for segment in plan}
        num_ended = sum(sequence.phase is Phase.FINISHED for sequence in planned)
        joining = [s for s in self.running if s not in planned] + self.waiting[:num_ended]
        return choose_lengths(self.lengths, plan, self.limits.max_tokens_per_step, joining)

    def plan_windows(self, plan: list[Segment]) -> list[PlannedWindow]:
        """The draft windows after a step's target call; an empty one where entries wait for later ids."""
        windows, row = [], 0
        for segment in plan:
            sequence = segment.sequence
            if sequence.window is not None and sequence.max_drafts:
                num_computed, num_ids = sequence.num_computed, len(sequence.ids)
                waiting = num_ids - num_computed > 1  # more prompt
                num_drafts = 0 if waiting else self.draft_length(sequence)
                window = sequence.window.plan(num_computed, num_ids, num_drafts)
                windows.append(PlannedWindow(segment, row, window))
            row += segment.rows
        return windows

    def draft_length(self, sequence: Sequence) -> int:
        """How many tokens to draft for ``sequence`` next; any number up to ``sequence.max_drafts`` is exact.

        As many as ``lengths`` chose, unless a step has no rows to verify them.
        """
        spare = self.limits.max_tokens_per_step - len(self.running)
        return max(0, min(sequence.max_drafts, self.lengths.num_drafts, spare))

    def check_integrity(self) -> None:
        """Raises InklingError when pages or slots do not add up."""
        live = [(Model.TARGET, s.target_pages) for s in self.running]
        live += [(Model.DRAFT, s.draft_pages) for s in self.running if s.draft_pages is not None]
        self.allocator.check_integrity(live, self.prefixes.kept(self.running))
        slots = sorted(self._free_slots + [s.slot for s in self.running])
        assert slots == list(range(self.limits.max_running_sequences)), f"slots {slots}"

    @staticmethod
    def _segment(sequence: Sequence, rows: int) -> Segment:
        left = sequence.num_uncomputed
        return Segment(sequence, sequence.num_computed, rows, max(0, rows - left + 1))

    def _start(self, sequence: Sequence) -> None:
        draft_pages = self.allocator.tables(Model.DRAFT) if sequence.num_depths else None
        target_pages = self.allocator.tables(Model.TARGET)
        num_cached = self.prefixes.start(sequence, target_pages, draft_pages)
        sequence.start(self._free_slots.pop(), target_pages, draft_pages, num_cached)

    def _stop(self, sequence: Sequence, phase: Phase) -> None:
        sequence.stop(phase)
        self._free_slots.append(sequence.slot)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._stop(sequence, Phase.WAITING)
        self.num_preemptions += 1

    def _pages_for(self, sequence: Sequence, model: Model, positions: int) -> tuple[int, int, int]:
        most = self.limits.max_prompt_chunk or self.limits.max_tokens_per_step
        chunk = min(self.limits.max_tokens_per_step, most, positions)
        return worst_case_pages(self.layout, model, positions, chunk, sequence.num_depths)

    def _wanted_pages(self, sequences: list[Sequence]) -> list[int]:
        """Pages, pool by pool, that ``sequences`` lack to compute their known ids and one more row of drafts."""
        wanted = []
        for model in Model:
            lacking = [0, 0, 0]
            for sequence in sequences:
                pages = sequence.draft_pages if model is Model.DRAFT else sequence.target_pages
                if pages is None:
                    continue
                most = sequence.num_prompt_tokens + sequence.max_tokens - 1
                needed = self._pages_for(
                    sequence, model, min(most, len(sequence.ids) + self.limits.num_draft_tokens)
                )
                for table in pages.tables:
                    lacking[table.kind] += max(0, needed[table.kind] - len(table.pages))
            wanted += lacking
        return wanted

    def _are_available(self, wanted: list[int]) -> bool:
        pools = [pool for model in Model for pool in self.allocator.pools[model]]
        return all(pages <= pool.num_available for pages, pool in zip(wanted, pools, strict=True))

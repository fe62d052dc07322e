"""Who runs next: the queue, admission, and the rows of each step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from inkling.engine.draft_length import AutoDraftLength, DraftLength
from inkling.engine.draft_window import DraftWindow
from inkling.engine.log_probs import TokenLogProb
from inkling.engine.pages import CacheLayout, Model, PageAllocator, worst_case_pages
from inkling.engine.sequence import Phase, Sequence
from inkling.errors import QueueFullError, RequestError
from inkling.settings import Settings


@dataclass(frozen=True)
class EngineLimits:
    max_context: int  # positions of one sequence, prompt and answer
    max_running_sequences: int  # slots
    max_tokens_per_step: int  # rows of one target call
    max_queued_requests: int
    num_draft_tokens: int  # N: the most drafts a step verifies; 0: no draft model
    max_prompt_chunk: int = 1 << 30  # rows of one prompt in a step, within max_tokens_per_step
    auto_draft_length: bool = False  # each step drafts the number that gives the most tokens per second

    @classmethod
    def of(cls, settings: Settings, max_context: int, num_draft_tokens: int) -> EngineLimits:
        return cls(
            max_context,
            settings.max_running_sequences,
            settings.max_tokens_per_step,
            settings.max_queued_requests,
            num_draft_tokens,
            settings.max_prompt_chunk or settings.max_tokens_per_step,
            settings.draft_length == "auto",
        )

    def __post_init__(self) -> None:
        for name in (
            "max_context",
            "max_running_sequences",
            "max_tokens_per_step",
            "max_queued_requests",
            "max_prompt_chunk",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens is {self.num_draft_tokens}; it must be 0 or more")


@dataclass(slots=True)
class Segment:
    """One sequence's part of a step: target rows [first, first + rows), the last ``draws`` of them drawn
    from."""

    sequence: Sequence
    first: int
    rows: int
    draws: int  # 0: prompt remains; 1: no drafts; n + 1: verifies n
    accepted: int = 0
    tokens: list[int] = field(default_factory=list)  # drawn, up to the first that follows a fallen draft
    emitted: list[int] = field(default_factory=list)  # of those, up to the cut
    log_probs: list[TokenLogProb] = field(default_factory=list)  # of ``tokens``, where the request wants them

    @property
    def num_drafts(self) -> int:
        return max(0, self.draws - 1)


class Scheduler:
    """First come, first served. A sequence is admitted with pages for its worst case, so nothing runs short
    later.

    Preemption will replace the reservation by pages taken as needed, and put a sequence back at the head of
    the queue; a prefix hit will start a sequence with ``num_computed`` and ``final`` above 0.
    """

    def __init__(self, limits: EngineLimits, layout: CacheLayout):
        self.limits = limits
        self.layout = layout
        kind = AutoDraftLength if limits.auto_draft_length else DraftLength
        self.lengths = kind(limits.num_draft_tokens)
        self.reset()

    def reset(self) -> None:
        """Forgets every sequence; all pages and slots are free."""
        self.allocator = PageAllocator(self.layout)
        self.waiting: deque[Sequence] = deque()
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
        for model, pages in self._worst_case(sequence).items():
            if why := self.allocator.shortage(model, pages, empty=True):
                total = sequence.num_prompt_tokens + sequence.max_tokens
                raise RequestError(
                    f"prompt and max_tokens together are {total} tokens and need {why}; "
                    "shorten the prompt, lower max_tokens, or give the server more cache_bytes"
                )
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Moves sequences from the head of the queue into free slots while their worst case fits."""
        admitted = []
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            wanted = self._worst_case(sequence)
            if any(self.allocator.shortage(model, pages) for model, pages in wanted.items()):
                break
            self.waiting.popleft()
            sequence.slot = self._free_slots.pop()
            sequence.target_pages = self.allocator.reserve(Model.TARGET, wanted[Model.TARGET])
            if sequence.num_depths:
                sequence.draft_pages = self.allocator.reserve(Model.DRAFT, wanted[Model.DRAFT])
                sequence.window = DraftWindow(sequence.num_depths)
            sequence.phase = Phase.RUNNING
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def release(self, sequence: Sequence) -> None:
        """Takes a running sequence out; its pages and its slot are free."""
        self.running.remove(sequence)
        self.allocator.release(Model.TARGET, sequence.target_pages)
        if sequence.draft_pages is not None:
            self.allocator.release(Model.DRAFT, sequence.draft_pages)
        sequence.target_pages = sequence.draft_pages = sequence.window = None
        self._free_slots.append(sequence.slot)
        sequence.phase = Phase.FINISHED

    def plan(self) -> list[Segment]:
        """The segments of one step, at most ``max_tokens_per_step`` rows.

        Every decode gets its row and the oldest prompt at least one; what is left goes to drafts, then to
        prompts in order of arrival. With more sequences than rows they take turns, a row each.
        """
        budget = self.limits.max_tokens_per_step
        if len(self.running) > budget:
            turn, rest = self.running[:budget], self.running[budget:]
            self.running = rest + turn
            return [self._segment(sequence, 1) for sequence in turn]
        decodes = [sequence for sequence in self.running if sequence.num_uncomputed == 1]
        prompts = [sequence for sequence in self.running if sequence.num_uncomputed > 1]
        spare = budget - len(decodes) - bool(prompts)
        plan = []
        for sequence in decodes:
            num_drafts = min(len(sequence.drafts), spare)
            spare -= num_drafts
            plan.append(self._segment(sequence, 1 + num_drafts))
        spare += bool(prompts)
        for sequence in prompts:
            if spare == 0:
                break
            rows = min(sequence.num_uncomputed, spare, self.limits.max_prompt_chunk)
            spare -= rows
            plan.append(self._segment(sequence, rows))
        return plan

    def draft_length(self, sequence: Sequence) -> int:
        """How many tokens to draft for ``sequence`` next; any number up to ``sequence.max_drafts`` is exact.

        As many as ``lengths`` chose, unless a step has no rows to verify them.
        """
        spare = self.limits.max_tokens_per_step - len(self.running)
        return max(0, min(sequence.max_drafts, self.lengths.num_drafts, spare))

    def check_integrity(self) -> None:
        """Raises InklingError when pages, reservations or slots do not add up."""
        live = [(Model.TARGET, s.target_pages) for s in self.running]
        live += [(Model.DRAFT, s.draft_pages) for s in self.running if s.draft_pages is not None]
        self.allocator.check_integrity(live)
        slots = sorted(self._free_slots + [s.slot for s in self.running])
        assert slots == list(range(self.limits.max_running_sequences)), f"slots {slots}"

    @staticmethod
    def _segment(sequence: Sequence, rows: int) -> Segment:
        left = sequence.num_uncomputed
        return Segment(sequence, sequence.num_computed, rows, max(0, rows - left + 1))

    def _worst_case(self, sequence: Sequence) -> dict[Model, tuple[int, int, int]]:
        positions = sequence.num_prompt_tokens + sequence.max_tokens - 1
        chunk = min(self.limits.max_tokens_per_step, self.limits.max_prompt_chunk, positions)
        return {
            model: worst_case_pages(self.layout, model, positions, chunk, sequence.num_depths)
            for model in Model
        }

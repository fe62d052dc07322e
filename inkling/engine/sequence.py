"""One request while the engine works on it. Touched by the loop thread, which has its replies made in another."""

from __future__ import annotations

import logging
from collections.abc import Collection
from enum import Enum

from inkling.engine.draft_window import DraftWindow
from inkling.engine.load import Prompts
from inkling.engine.log_probs import TokenLogProb
from inkling.engine.outbox import Assembler, Outbox
from inkling.engine.pages import SequencePages
from inkling.engine.prefix_cache import Trail
from inkling.engine.request import GenerateRequest
from inkling.errors import InklingError
from inkling.protocol import SlotOptions

_log = logging.getLogger(__name__)


class Phase(Enum):
    WAITING = "waiting"  # in the queue, new or preempted; holds nothing
    RUNNING = "running"  # has a slot and pages
    FINISHED = "finished"  # gave them back; its last chunk may still be on its way


class Sequence:
    """``ids`` are committed: the prompt, then what was emitted. Positions below ``num_computed`` have a
    target state.

    ``num_uncomputed`` is 1 while decoding (the newest token) and more while prompt waits. After a preemption all
    ids are prompt once more: their rows are computed again, and only the last one draws.
    """

    def __init__(
        self,
        request: GenerateRequest,
        outbox: Outbox,
        assembler: Assembler | None,
        *,
        max_tokens: int,
        deadline: float,
    ):
        self.request = request
        self.num_prompt_tokens = len(request.prompt_ids)
        self.outbox = outbox
        self.assembler = assembler
        self.max_tokens = max_tokens  # the request's, cut to the context left
        self.deadline = deadline  # monotonic seconds; infinity: none
        # Drafting takes a token before it and one that verifies it: a shorter answer keeps no draft state.
        self.num_depths = self.asked_depths = request.num_draft_tokens if max_tokens > 2 else 0
        self.phase = Phase.WAITING
        self.rank = (-request.priority, 0)  # smaller goes first; the queue numbers arrivals
        self.finish_reason = ""  # stop | length | timeout
        self.slot = -1
        self.ids: list[int] = list(request.prompt_ids)
        self.num_computed = 0
        self.drafts: list[int] = []  # pending: proposals for the positions after the last id
        self.window: DraftWindow | None = None
        self.trail = Trail()  # what the prefix cache has of it
        self.target_pages: SequencePages | None = None
        self.draft_pages: SequencePages | None = None
        self.cum_log_prob = 0.0  # of the emitted tokens
        self.prompt_log_probs: list[
            TokenLogProb
        ] = []  # of the prompt's tokens from the second on, as computed
        self.prompts = Prompts()
        self.total_draft_tokens = 0  # drafts the target has verified
        self.total_accepted_draft_tokens = 0  # of those, accepted and emitted
        self.accepted = [0] * (request.num_draft_tokens + 1)  # verifications by drafts accepted and emitted

    @property
    def num_emitted(self) -> int:
        return len(self.ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.ids) - self.num_computed

    @property
    def max_drafts(self) -> int:
        """Drafts that a next step could verify: each may be emitted, and one token always follows them."""
        left = self.max_tokens - len(self.ids) + self.num_prompt_tokens - 1
        return min(self.num_depths, left) if left > 0 else 0

    def shrink(self, num_depths: int) -> None:
        """Gives up all depths but the first ``num_depths``, for good."""
        self.num_depths = num_depths
        if num_depths == 0:
            self.window = None
            self.draft_pages.release()
            self.draft_pages = None
        else:
            self.window.shrink(num_depths)

    def start(
        self, slot: int, target_pages: SequencePages, draft_pages: SequencePages | None, num_cached: int
    ) -> None:
        """Runs from position ``num_cached`` on; what the models know of earlier positions is in the pages."""
        self.slot, self.target_pages, self.draft_pages = slot, target_pages, draft_pages
        self.num_computed = num_cached
        self.window = DraftWindow(self.num_depths, num_cached) if self.num_depths else None
        self.phase = Phase.RUNNING

    def stop(self, phase: Phase) -> None:
        """Gives pages and slot back. Committed ids stay; proposals do not."""
        for pages in (self.target_pages, self.draft_pages):
            if pages is not None:
                pages.release()
        self.trail.drop()
        self.target_pages = self.draft_pages = self.window = None
        self.drafts = []
        self.num_computed = 0
        self.phase = phase

    def slot_options(self) -> SlotOptions:
        sampling = self.request.sampling
        return SlotOptions(
            self.slot,
            self.num_depths,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.seed,
            self.num_prompt_tokens + self.request.stop.min_tokens,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            self.num_prompt_tokens,
            self.request.log_probs,
            self.request.prompt_log_probs,
        )

    def history(self) -> list[int]:
        """Ids that the target will not meet as rows and whose history it needs."""
        return self.ids[: self.num_computed] if self.request.sampling.needs_history else []

    def unscored(self, first: int, rows: int) -> range:
        """Of the target rows [first, first + rows), positions after which a prompt token's log prob is missing."""
        if not self.request.prompt_log_probs:
            return range(0)
        return range(max(first, len(self.prompt_log_probs)), min(first + rows, self.num_prompt_tokens - 1))

    def masked_ids(self) -> frozenset[int]:
        """Ids that may not be drawn for a position below ``min_position``."""
        return self.request.stop.stop_ids if self.request.stop.min_tokens else frozenset()

    def push(self, emitted: Collection[int] = (), log_probs: Collection[TokenLogProb] = ()) -> None:
        """Puts an increment into the outbox, with the text that may be released. Raises what the assembler raises."""
        text, finish_reason = "", self.finish_reason
        if self.assembler is not None and (finish_reason or self.outbox.stream):
            text = self.assembler.finish() if finish_reason else self.assembler.take()
        if log_probs:
            self.cum_log_prob = sum((scored.log_prob for scored in log_probs), self.cum_log_prob)
        is_first = len(emitted) == self.num_emitted > 0
        prompt = self.prompt_log_probs if is_first and self.request.prompt_log_probs else None
        counts = self.total_draft_tokens, self.total_accepted_draft_tokens
        self.outbox.push(emitted, text, finish_reason, *counts, log_probs, self.cum_log_prob, prompt)

    def emit(self, tokens: list[int]) -> list[int]:
        """Commits ``tokens`` one by one up to the cut, the first token that ends the request; returns those
        kept.

        Sets ``finish_reason`` at the cut. Raises what the assembler raises.
        """
        stop = self.request.stop
        room = self.max_tokens - self.num_emitted
        if len(tokens) < room and self.assembler is None and stop.stop_ids.isdisjoint(tokens):
            self.ids += tokens
            return tokens
        to_minimum = stop.min_tokens - self.num_emitted
        for count, token in enumerate(tokens, 1):
            self.ids.append(token)
            completes_stop_word = self.assembler is not None and self.assembler.append(token)
            if completes_stop_word or (count > to_minimum and token in stop.stop_ids):
                self.finish_reason = "stop"
            elif count >= room:
                self.finish_reason = "length"
            if self.finish_reason:
                return tokens[:count]
        return tokens


def text_error(error: Exception) -> InklingError:
    """What ends a request whose assembler raised ``error``: its own trouble, nobody else's."""
    _log.error("a request's text could not be assembled; it ends", exc_info=error)
    return InklingError(f"the text could not be assembled: {error!r}")

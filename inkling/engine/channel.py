"""What one model has been told: which slots are open, and which step it executed last."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from inkling.engine.sequence import Sequence
from inkling.errors import StepGapError
from inkling.protocol import OPEN_WIDTH, DraftStep, TargetStep, pack

if TYPE_CHECKING:
    from inkling.engine.scheduler import Segment

_log = logging.getLogger(__name__)
Result = TypeVar("Result")
_NOTHING = np.empty(0, np.int32)


@dataclass(frozen=True)
class Session:
    """How the models know this engine: the private key of the run folder and the target's generation."""

    key: np.ndarray  # int32 [KEY_WORDS]
    generation: int


def vector(words: list[int]) -> np.ndarray:
    """Int32 [n]; three times as fast as numpy's own way."""
    return np.frombuffer(array("i", words), np.int32) if words else _NOTHING


def records(words: list[int], width: int) -> np.ndarray:
    return vector(words).reshape(-1, width)


class TargetWords(NamedTuple):
    """What a plan asks of the target."""

    segments: list[int]
    ids: list[int]
    scores: list[int]
    num_draws: int
    wants_log_probs: bool  # of drawn tokens or of prompts


def target_words(plan: list[Segment]) -> TargetWords:
    segments: list[int] = []
    ids: list[int] = []
    scores: list[int] = []
    num_draws, wants_log_probs = 0, False
    for segment in plan:
        sequence, first, rows, draws = segment.sequence, segment.first, segment.rows, segment.draws
        request = sequence.request
        segments += (sequence.slot, first, rows, draws)
        if request.prompt_log_probs:
            for position in sequence.unscored(first, rows):
                scores += (len(ids) + position - first, sequence.ids[position + 1])
        if draws and request.log_probs:
            wants_log_probs = True
        ids += sequence.ids[first : first + rows]
        if draws > 1:
            ids += sequence.drafts[: draws - 1]
        num_draws += draws
    return TargetWords(segments, ids, scores, num_draws, wants_log_probs or bool(scores))


class Channel:
    """Bookkeeping for messages of one kind (TargetStep or DraftStep) to one model.

    Opens and closes wait for the next message. A model applies closes first, so a slot may be closed and
    opened again in one message.
    """

    def __init__(self, kind: type[TargetStep] | type[DraftStep], session: Session):
        self._kind = kind
        self._session = session
        self.reset()

    def reset(self) -> None:
        """The next message makes the model forget every slot."""
        self.last_step = 0
        self._opening: dict[int, Sequence] = {}
        self._closing: list[int] = []
        self._open: dict[int, Sequence] = {}

    def open(self, sequence: Sequence) -> None:
        self._opening[sequence.slot] = sequence

    def close(self, sequence: Sequence) -> None:
        slot = sequence.slot
        if self._opening.get(slot) is sequence:
            del self._opening[slot]
        elif self._open.get(slot) is sequence:
            del self._open[slot]
            self._closing.append(slot)

    def exchange(
        self,
        step: int,
        segments: np.ndarray,
        ids: list[int],
        pages: list[int],
        call: Callable[[np.ndarray], Result],
        **sections: np.ndarray,
    ) -> Result:
        """Sends one step; ``pages``: the words of its page records. After a StepGapError every open slot is
        opened again, with all its pages and history, and the step is sent once more; a second gap is raised,
        like any other error."""
        message = self._kind(
            self._session.generation,
            step,
            self.last_step,
            segments=segments,
            ids=vector(ids),
            **sections,
        )
        message.closes, message.pages = vector(self._closing), records(pages, 5)
        if self._opening:
            message = replace(message, **self._opens(self._opening.values()))
            self._open.update(self._opening)
        try:
            result = call(pack(message, self._session.key))
        except StepGapError as gap:
            _log.warning("step %d: %s; opening %d sequences again", step, gap, len(self._open))
            result = call(pack(self._reopening(message), self._session.key))
        self.last_step = step
        self._opening.clear()
        self._closing.clear()
        return result

    def _opens(self, sequences: Iterable[Sequence]) -> dict[str, np.ndarray]:
        sequences = list(sequences)
        opens = [word for sequence in sequences for word in sequence.slot_options().words()]
        sections = {"opens": records(opens, OPEN_WIDTH)}
        return sections | self._rules(sequences) if self._kind is TargetStep else sections

    @staticmethod
    def _rules(sequences: list[Sequence]) -> dict[str, np.ndarray]:
        """What shapes the target's logits beyond the options."""
        masks: list[int] = []
        bias: list[tuple[int, int, float]] = []
        bad_words: list[int] = []
        history: list[int] = []
        for sequence in sequences:
            slot, sampling = sequence.slot, sequence.request.sampling
            for token in sequence.masked_ids():
                masks += (slot, token)
            bias += [(slot, *pair) for pair in sampling.logit_bias]
            for index, word in enumerate(sampling.bad_words):
                for token in word:
                    bad_words += (slot, index, token)
            for token in sequence.history():
                history += (slot, token)
        bits = np.array([value for *_, value in bias], np.float32).view(np.int32)
        words = [
            word for (slot, token, _), value in zip(bias, bits, strict=True) for word in (slot, token, value)
        ]
        return {
            "masks": records(masks, 2),
            "bias": records(words, 3),
            "bad_words": records(bad_words, 3),
            "history": records(history, 2),
        }

    def _reopening(self, message: TargetStep | DraftStep) -> TargetStep | DraftStep:
        fresh = {(slot, kind, index) for slot, kind, index, _, is_fresh in message.pages.tolist() if is_fresh}
        pages: list[int] = []
        for slot, sequence in self._open.items():
            tables = sequence.target_pages if self._kind is TargetStep else sequence.draft_pages
            pages += tables.records(slot, fresh)
        return replace(
            message,
            previous_step=0,
            closes=np.empty(0, np.int32),
            pages=records(pages, 5),
            **self._opens(self._open.values()),
        )

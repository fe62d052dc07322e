"""Log probs of tokens on their way from the target's LOGPROBS rows to the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from inkling.errors import ModelError

if TYPE_CHECKING:
    from inkling.engine.scheduler import Segment


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    token: int
    log_prob: float  # of the model's raw logits, an fp32 value
    rank: int  # 1: the likeliest; equal ones in order of their ids
    top: tuple[tuple[int, float], ...] = ()  # (id, log prob) of the likeliest, in order of rank


def read_log_probs(table: np.ndarray, tokens: list[int], num_top: int) -> list[TokenLogProb]:
    """``table``: rows of LOGPROBS int32 [n, 2 + 2K], K >= ``num_top`` unless the vocabulary is smaller."""
    if len(table) == 0:
        return []
    width = (table.shape[1] - 2) // 2
    kept = min(num_top, width)
    log_probs = table[:, 0].copy().view(np.float32).tolist()
    ids = table[:, 2 : 2 + kept].tolist()
    values = np.ascontiguousarray(table[:, 2 + width : 2 + width + kept]).view(np.float32).tolist()
    return [
        TokenLogProb(token, log_prob, rank, tuple(zip(row_ids, row_values, strict=True)))
        for token, log_prob, rank, row_ids, row_values in zip(
            tokens, log_probs, table[:, 1].tolist(), ids, values, strict=True
        )
    ]


def take_log_probs(plan: list[Segment], table: np.ndarray | None) -> None:
    """Deals out the rows of a step's LOGPROBS: to each segment those of the tokens that stand, then the prompts'.

    Raises ModelError when there are more or fewer rows than were asked for.
    """
    if table is None:
        return
    start = 0
    for segment in plan:
        if segment.draws and (wanted := segment.sequence.request.log_probs):
            rows = table[start : start + len(segment.tokens)]
            segment.log_probs = read_log_probs(rows, segment.tokens, wanted - 1)
            start += segment.draws
    for segment in plan:
        sequence = segment.sequence
        if positions := sequence.unscored(segment.first, segment.rows):
            ids = sequence.ids[positions.start + 1 : positions.stop + 1]
            rows = table[start : start + len(ids)]
            sequence.prompt_log_probs += read_log_probs(rows, ids, sequence.request.prompt_log_probs - 1)
            start += len(ids)
    if start != len(table):
        raise ModelError(f"the target gave log probs of {len(table)} tokens; {start} were asked for")

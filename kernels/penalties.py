"""What shapes the logits of a row before it is drawn: penalties, logit bias, banned ids.

The order is fixed; each step is rounded to fp32:

    repetition   ids in prompt or output: x / r where x > 0, else x * r
    presence     ids in the output:       x - p
    frequency    ids in the output:       x - f * (times in the output)
    logit bias   x + b
    bans         -inf: an id that would complete a bad word, or would end the answer before its minimum

These are vLLM's definitions (apply_penalties in vllm/model_executor/layers/utils.py at commit 00358600, and
vllm/v1/sample/ops/bad_words.py at 17daac61; there the frequency term goes first, which differs in rounding only).
Bad words are matched against the output, not the prompt. The output of a row in a verification window is what was
committed before the window, then the drafts before the row: each row is shaped as the target alone would shape it
when all drafts before it stand, and is used only then.

Row-invariance: all steps are elementwise and all counts are integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_ID = -1  # pads lists of ids


@dataclass(frozen=True)
class PenaltyRows:
    """One entry per row. Neutral values leave a row's bits as they are."""

    repetition: Tensor  # [R] fp32 > 0; 1: off
    presence: Tensor  # [R] fp32; 0: off
    frequency: Tensor  # [R] fp32; 0: off
    in_prompt: Tensor  # [R, V'] bool
    counts: Tensor  # [R, V'] int32, times in the output


def output_counts_reference(base: Tensor, source: Tensor, drafts: Tensor) -> Tensor:
    """Times each id stands before a row: ``base[source]`` and its drafts.

    ``base [S, V']`` int32, ``source [R]`` int64, ``drafts [R, W]`` int64 padded with NO_ID -> ``[R, V']`` int32.
    """
    counts = base[source]
    rows, columns = (drafts != NO_ID).nonzero(as_tuple=True)
    one = torch.ones(1, dtype=counts.dtype, device=counts.device)
    return counts.index_put_((rows, drafts[rows, columns]), one, accumulate=True)


def penalize_reference(logits: Tensor, rows: PenaltyRows) -> Tensor:
    """``logits [R, V']`` fp32 with the three penalties, a new tensor."""
    in_output = rows.counts > 0
    repetition = rows.repetition[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_output | rows.in_prompt, repeated, logits)
    logits = logits - rows.presence[:, None] * in_output
    return logits - rows.frequency[:, None] * rows.counts


def bias_reference(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Adds ``values [n]`` fp32 at (``rows``, ``ids``), int64 [n], no pair twice; in place."""
    logits[rows, ids] += values
    return logits


def ban_reference(logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """-inf at (``rows``, ``ids``), int64 [n]; in place."""
    logits[rows, ids] = -torch.inf
    return logits


def completions_reference(recent: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """(row, id) pairs int64 [n]: ids that would complete a word after the row's output.

    ``recent [R, L]``: the last ids of each output, newest last; ``words [B, L + 1]``: ids of the words, last id in
    the last column. Both int64, padded on the left with NO_ID.
    """
    prefixes = words[None, :, :-1]
    stands = (prefixes == NO_ID) | (prefixes == recent[:, None, :])
    rows, matched = stands.all(dim=2).nonzero(as_tuple=True)
    return rows, words[matched, -1]

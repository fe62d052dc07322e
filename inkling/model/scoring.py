"""Rows of LOGPROBS: what the model's own logits say of tokens drawn and of prompt tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.log_probs import log_softmax_reference, ranks_reference, top_ids_reference

ROWS_AT_ONCE = 32  # rows of logits that are held for prompt tokens


def score(logits: Tensor, tokens: np.ndarray, num_top: int) -> np.ndarray:
    """Log prob bits, rank, ``num_top`` likeliest ids and their log prob bits, of ``tokens`` int64 [n] under raw
    ``logits`` [n, V'] fp32 -> int32 [n, 2 + 2 num_top]."""
    num_top = min(num_top, logits.shape[1])
    ids = torch.from_numpy(tokens)
    log_probs = log_softmax_reference(logits)
    top = top_ids_reference(logits, num_top)
    parts = (
        log_probs.gather(1, ids[:, None]).view(torch.int32),
        ranks_reference(logits, ids)[:, None].int(),
        top.int(),
        log_probs.gather(1, top).view(torch.int32),
    )
    return torch.cat(parts, 1).numpy()


def widened(table: np.ndarray, num_top: int) -> np.ndarray:
    """The same rows with room for ``num_top`` ids; the added columns are 0."""
    had = (table.shape[1] - 2) // 2
    wide = np.zeros((len(table), 2 + 2 * num_top), np.int32)
    wide[:, : 2 + had] = table[:, : 2 + had]
    wide[:, 2 + num_top : 2 + num_top + had] = table[:, 2 + had :]
    return wide

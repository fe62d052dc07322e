"""Log probabilities of tokens under the model: log-softmax of the raw logits, before penalties and filters.

    log_prob(i) = (x_i - m) - log(sum over blocks b of sum_{j in b} exp(x_j - m))        m = max_j x_j, all in fp32

Blocks hold BLOCK consecutive ids, the last padded with -inf; a block is summed by halving (element i plus element
i + width / 2), the blocks are added in ascending order. The order of the sum depends on V' alone, so a row has the
same bits in every batch. Ids are ranked by descending logit, ties to the lower id; the first has rank 1.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 1024  # ids


def log_softmax_reference(logits: Tensor) -> Tensor:
    """``[R, V']`` fp32 -> log probabilities, same shape."""
    shifted = logits - logits.amax(dim=1, keepdim=True)
    return shifted - _log_sum_exp(shifted)[:, None]


def ranks_reference(logits: Tensor, ids: Tensor) -> Tensor:
    """Rank of ``ids [R]`` int64 in their rows: 1 + the ids of a larger logit, or of the same and lower. int64 [R]."""
    value = logits.gather(1, ids[:, None])
    ties_before = (logits == value) & (torch.arange(logits.shape[1]) < ids[:, None])
    return 1 + (logits > value).sum(dim=1) + ties_before.sum(dim=1)


def top_ids_reference(logits: Tensor, k: int) -> Tensor:
    """The first ``k`` <= V' ids of each row by rank, int64 [R, k]."""
    if k == 0:
        return torch.empty(logits.shape[0], 0, dtype=torch.int64)
    threshold = torch.topk(logits, k, dim=1).values[
        :, -1
    ]  # values only: which of equal ids topk takes is open
    top = np.empty((logits.shape[0], k), np.int64)
    for row, (x, least) in enumerate(zip(logits.numpy(), threshold.numpy(), strict=True)):
        candidates = np.flatnonzero(x >= least)
        top[row] = candidates[np.argsort(-x[candidates], kind="stable")[:k]]
    return torch.from_numpy(top)


def _log_sum_exp(shifted: Tensor) -> Tensor:
    """``[R, V']``, the largest value of each row 0 -> ``[R]``."""
    missing = -shifted.shape[1] % BLOCK
    part = torch.exp(F.pad(shifted, (0, missing), value=-torch.inf)).unflatten(1, (-1, BLOCK))
    while part.shape[2] > 1:
        half = part.shape[2] // 2
        part = part[:, :, :half] + part[:, :, half:]
    total = torch.zeros(shifted.shape[0])
    for block in part[:, :, 0].unbind(1):
        total = total + block
    return torch.log(total)

"""Log probability, rank and likeliest ids of tokens on the device, by the definition of ``kernels.log_probs``.

The log-sum-exp has the tiles of ``sampling``: an order that V' alone fixes, so a row has the same bits in every
batch. Ranks are counts and ids come by repeated argmax, ties to the lower id.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cuda.sampling import sample


def score_rows(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """Raw ``logits [n, V']`` fp32 and ``tokens [n]`` -> int32 [n, 2 + 2K], K = ``num_top`` at most V'.

    Columns: log prob of the token (fp32 bits), its rank, the K likeliest ids, their log probs (bits).
    """
    num_rows, vocab_size = logits.shape
    ids = tokens.long()[:, None]
    top = torch.empty(max(1, min(num_top, vocab_size)), num_rows, dtype=torch.int64, device=logits.device)
    row_max, log_sum, *unused = (logits.new_empty(num_rows) for _ in range(4))
    sample(logits, None, top[0], row_max, log_sum)
    left = logits.clone() if num_top > 1 else logits
    for i in range(1, min(num_top, vocab_size)):
        left.scatter_(1, top[i - 1 : i].T, -torch.inf)
        sample(left, None, top[i], *unused)
    value = logits.gather(1, ids)
    before = (logits == value) & (torch.arange(vocab_size, device=logits.device) < ids)
    rank = 1 + (logits > value).sum(1, keepdim=True) + before.sum(1, keepdim=True)
    listed = top[: min(num_top, vocab_size)].T

    def log_prob_bits(x: Tensor) -> Tensor:
        return ((x - row_max[:, None]) - log_sum[:, None]).view(torch.int32)

    columns = (log_prob_bits(value), rank.int(), listed.int(), log_prob_bits(logits.gather(1, listed)))
    return torch.cat(columns, 1)

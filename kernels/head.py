"""Logits of the rows that draw a token.

logits = (h . W_U^T) / mup        V' columns, fp32; 1/mup is applied after the product
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.rows import linear_reference, pad_rows, widened_linear


def head_logits_reference(
    hidden: Tensor, rows: Tensor, head: Tensor, mup: float, *, row_exact: bool = True
) -> Tensor:
    """``hidden [T, H]``, ``rows [n]`` int64, ``head [V', H]`` -> fp32 ``[n, V']``.

    The draft does without ``row_exact``: its bits never reach an answer, and one row is then a matrix-vector product.
    """
    drawn = hidden.index_select(0, rows)
    logits = (
        linear_reference(pad_rows(drawn), head)[: rows.shape[0]] if row_exact else widened_linear(drawn, head)
    )
    logits = logits.float()
    return logits if mup == 1.0 else logits * (1.0 / mup)


def greedy_reference(logits: Tensor) -> Tensor:
    """``[n, V']`` -> ids [n]; ties go to the lowest id."""
    return torch.argmax(logits, dim=-1)

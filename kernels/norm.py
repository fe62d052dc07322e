"""RMSNorm and the two places where it is fused with a gather.

    rms_norm(x, w) = x / sqrt(mean(x^2) + eps) * w      statistics, scaling and weight in fp32, rounded once

Fused residual + norm rounds the sum first and takes the statistics from the rounded value (as vLLM does).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x [..., n]``, ``weight [n]`` -> ``[..., n]`` in ``x.dtype``."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def embed_norm_reference(
    ids: Tensor, table: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """``ids [T]`` int64, ``table [V, H]`` -> normed embeddings ``[T, H]`` in ``dtype`` (absent: the table's).

    ``weight`` None: no norm.
    """
    rows = table.index_select(0, ids).to(dtype or table.dtype)
    return rows if weight is None else rms_norm_reference(rows, weight, eps)


def dual_norm_cat_reference(
    hidden: Tensor, hidden_weight: Tensor, embedding: Tensor, embed_weight: Tensor, eps: float
) -> Tensor:
    """``[norm(hidden); norm(embedding)]``: two ``[T, H]`` -> ``[T, 2H]``, the input of a draft depth."""
    return torch.cat(
        (rms_norm_reference(hidden, hidden_weight, eps), rms_norm_reference(embedding, embed_weight, eps)), -1
    )

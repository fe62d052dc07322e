"""From the fused product to what attention reads: normed q, cached k and v, and the bias bank.

    q^ = norm(q) * tau      k^ = norm(conv(k))      v = conv(v)      B[h, delta] = (r_h . P[:, delta]) * tau

k and v are rounded after the convolution and before the norm. tau is 1 on local layers and below N_floor.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.norm import rms_norm_reference
from kernels.rows import linear_reference
from kernels.short_conv import ConvRows, short_conv_reference


@dataclass
class KeyWrites:
    """The ``n`` rows of a pass whose keys and values are kept, and where."""

    rows: Tensor | slice
    places: Tensor  # [n * n_kv] int64, (page * n_kv + head) * page_size + offset


def attention_inputs_reference(
    qkvr: Tensor,  # [Tp, n_q*d + 2*n_kv*d + n_q*16]
    tau: Tensor | None,  # [Tp] fp32; None where it is 1 for every row
    q_norm: Tensor,
    k_norm: Tensor,
    kv_taps: Tensor,  # [4, 2*n_kv*d]
    rel_proj: Tensor,  # [R + 2, 16]: P transposed, then two zero rows (see relative_attention)
    kv_conv_cache: Tensor,  # [slots, 2*n_kv*d]
    key_cache: Tensor,  # [pages, n_kv, page_size, d]
    value_cache: Tensor,
    conv_rows: ConvRows,
    writes: KeyWrites,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> q [Tp, n_q, d], k [Tp, n_kv, d], v [Tp, n_kv, d], bank [Tp, n_q, R + 2] (last column -inf)."""
    num_rows, head_dim, num_kv = qkvr.shape[0], q_norm.shape[0], key_cache.shape[1]
    kv_width = 2 * num_kv * head_dim
    num_heads = (qkvr.shape[1] - kv_width) // (head_dim + 16)
    q, kv, r = qkvr.split((num_heads * head_dim, kv_width, num_heads * 16), dim=1)

    kv = short_conv_reference(kv, kv_taps, kv_conv_cache, conv_rows).view(num_rows, 2, num_kv, head_dim)
    k, v = rms_norm_reference(kv[:, 0], k_norm, eps), kv[:, 1]
    for cache, new in ((key_cache, k), (value_cache, v)):
        cache.view(-1, head_dim).index_copy_(0, writes.places, new[writes.rows].reshape(-1, head_dim))

    q = rms_norm_reference(q.view(num_rows, num_heads, head_dim), q_norm, eps)
    bank = linear_reference(r.reshape(num_rows * num_heads, 16), rel_proj).view(num_rows, num_heads, -1)
    if tau is not None:
        q = (q.float() * tau[:, None, None]).to(q.dtype)
        bank = (bank.float() * tau[:, None, None]).to(bank.dtype)
    bank[..., -1] = float("-inf")
    return q, k, v, bank

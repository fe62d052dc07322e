"""Where biases lie in the bank: in key order, each row from a multiple of BANK_ALIGN keys on.

    place of key s in the row at position t:  s - origin_t,   origin_t = BANK_ALIGN * floor((t - R + 1) / BANK_ALIGN)

A block of keys then reads whole sectors of biases. Places of no distance 0 <= t - s < R hold 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BANK_ALIGN = tl.constexpr(16)  # keys: 32 bytes of biases


def bank_width(extent: int) -> int:
    """Places of one row and head: ``extent`` biases wherever they start."""
    align = BANK_ALIGN.value
    return (extent + 2 * align - 2) // align * align


@triton.jit
def bank_origin(position, EXTENT: tl.constexpr):
    LEAD: tl.constexpr = (EXTENT + BANK_ALIGN - 1) // BANK_ALIGN * BANK_ALIGN  # keeps the division above zero
    return (position + (LEAD - EXTENT + 1)) // BANK_ALIGN * BANK_ALIGN - LEAD


def in_key_order(bank: Tensor, positions: Sequence[int] | Tensor) -> Tensor:
    """Biases by distance ``[T, n_q, R]`` of rows at ``positions`` -> ``[T, n_q, bank_width(R)]`` by key."""
    _, heads, extent = bank.shape
    position = torch.as_tensor(positions, device=bank.device).long()[:, None]
    origin = torch.div(position - extent + 1, BANK_ALIGN.value, rounding_mode="floor") * BANK_ALIGN.value
    distance = position - origin - torch.arange(bank_width(extent), device=bank.device)
    inside = (distance >= 0) & (distance < extent)
    at = torch.where(inside, distance, 0)[:, None].expand(-1, heads, -1)
    return torch.where(inside[:, None], bank.gather(2, at), 0)

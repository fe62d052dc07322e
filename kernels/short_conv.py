"""Causal 4-tap convolution with its residual inside, over inputs kept in pages.

    y_t = u_t + sum_{j=0..3} w_j * u_{t-3+j},   u_s = 0 for s < 0          fp32, rounded once to u.dtype

The state is the last 3 inputs. A row of a pass takes inputs of the same pass from the pass and older ones from the
cache; rows that a later pass can read are written to the slot of their position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class ConvRows:
    """Addresses of one pass, shared by all layers. ``Tp``: padded rows; a slot is page * page_size + offset."""

    history: Tensor  # [3 * segments] slots of the 3 positions before each segment; slot 0 holds zeros
    taps: Tensor  # [4 * Tp] rows of u_{t-3}, then of u_{t-2}, u_{t-1} and u_t, in cat(u, history)
    write_rows: Tensor | slice  # rows whose input is kept
    write_slots: Tensor  # and where


def short_conv_reference(u: Tensor, taps: Tensor, cache: Tensor, rows: ConvRows) -> Tensor:
    """``u [Tp, C]``, ``taps [4, C]`` fp32, ``cache [slots, C]`` -> ``y [Tp, C]``; writes ``cache``.

    Multiplications and additions are separate operations: a fused one rounds differently in a vector body and in
    its tail.
    """
    known = torch.cat((u, cache.index_select(0, rows.history)))
    cache.index_copy_(0, rows.write_slots, u[rows.write_rows])
    terms = known.index_select(0, rows.taps).float().view(4, *u.shape).mul_(taps[:, None])
    return terms.sum(0).add_(u).to(u.dtype)

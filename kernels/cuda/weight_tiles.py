"""Shared device code: BLOCK_M rows of a weight matrix times up to BLOCK_N gathered activation rows.

Weights are the M side of the matrix instruction, activations the N side. The K loop runs from 0 upwards in one
accumulator, so a row's bits depend neither on the other rows nor on their number. Weights come through pointers, or
(TMA) through a tensor descriptor of the matrix seen as ``[rows, K]`` with blocks ``[BLOCK_M, BLOCK_K]``: same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class TileConfig:
    """Blocks of one weight shape. All of it but ``num_stages`` and ``tma`` is the same for every row count."""

    block_m: int = 64  # weight rows; a multiple of 64, or the dot is no wgmma
    block_k: int = 64
    num_warps: int = 4  # or 8
    num_stages: int = 4
    tma: bool = False

    def weights(self, w: Tensor) -> Tensor | TensorDescriptor:
        """``w [..., K]`` as the kernels take it."""
        if not self.tma:
            return w
        return TensorDescriptor.from_tensor(w.view(-1, w.shape[-1]), [self.block_m, self.block_k])

    def stages(self, block_n: int, num_weights: int = 1) -> int:
        """``num_stages``, or as many as fit: wide row tiles leave room for two blocks on a multiprocessor."""
        stage = 2 * self.block_k * (self.block_m * num_weights + block_n)
        room = (220 << 10) if block_n <= 32 else (112 << 10)
        return max(2, min(self.num_stages, room // stage))


@triton.jit
def row_pointers(x, row, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """``[BLOCK_K, BLOCK_N]`` pointers to the first BLOCK_K values of each ``row`` of ``x [., K]``."""
    return x + row.to(tl.int64)[None, :] * K + tl.arange(0, BLOCK_K)[:, None]


@triton.jit
def weight_pointers(w, first, last, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """``[BLOCK_M, BLOCK_K]`` pointers to rows ``first ..`` of ``w [., K]``; those beyond ``last`` repeat it."""
    m = tl.minimum(tl.arange(0, BLOCK_M), (last - first).to(tl.int32))
    return w + first.to(tl.int64) * K + m[:, None] * K + tl.arange(0, BLOCK_K)[None, :]


@triton.jit
def load_rows(pointers, held, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Activations at ``k ..``; 0 where a row is not ``held`` or K has ended."""
    mask = held[None, :]
    if K % BLOCK_K != 0:
        mask = mask & (k + tl.arange(0, BLOCK_K) < K)[:, None]
    return tl.load(pointers + k, mask=mask, other=0.0)


@triton.jit
def load_weights(
    w, pointers, first, k, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr
):
    """Weights at ``k ..``; 0 where K has ended. ``pointers`` are not used with TMA, ``w`` and ``first`` else."""
    if TMA:
        tile = w.load([first, k])
    elif K % BLOCK_K != 0:
        tile = tl.load(pointers + k, mask=(k + tl.arange(0, BLOCK_K) < K)[None, :], other=0.0)
    else:
        tile = tl.load(pointers + k)
    return tile


@triton.jit
def weight_tile(
    w, first, last, x, row, held,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """fp32 ``[BLOCK_M, BLOCK_N]``: weight rows ``first .. first + BLOCK_M - 1`` (up to ``last``) times rows of x.

    ``row`` int [BLOCK_N] of ``x [., K]``; columns that are not ``held`` read nothing and are 0.
    """
    x_pointers = row_pointers(x, row, K, BLOCK_K)
    pointers = x_pointers if TMA else weight_pointers(w, first, last, K, BLOCK_M, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        tile = load_weights(w, pointers, first, k, K, BLOCK_M, BLOCK_K, TMA)
        acc = tl.dot(tile, load_rows(x_pointers, held, k, K, BLOCK_K), acc)
    return acc

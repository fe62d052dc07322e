"""Gumbel noise on the device: the noise of ``kernels.sampling``, a function of (seed, position, token id) alone.

words = Philox4x32-10(counter = (id div 4, position low, position high, 0), key = (seed low, seed high)); see
``kernels/sampling.py`` for the rest. Words have the reference's bits; the two logarithms differ in their last bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox_block(block, position, seed):
    """Four uint32 words of the ids 4 * block .. + 3. ``block`` int, ``position`` and ``seed`` int64; they broadcast."""
    zero = block.to(tl.uint32) * 0 + position.to(tl.uint32) * 0
    low = position.to(tl.uint32) + zero
    high = (position >> 32).to(tl.uint32) + zero
    key_low = seed.to(tl.uint32) + zero
    key_high = (seed >> 32).to(tl.uint32) + zero
    return tl.philox_impl(block.to(tl.uint32) + zero, low, high, zero, key_low, key_high)


@triton.jit
def gumbel(word):
    """-log(-log1p(-v)), v = min((word + 0.5) * 2^-32, 1 - 2^-24), fp32 as everything here."""
    v = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    u = 1.0 - v
    # log1p(-v) = log(u) * v / (1 - u): 1 - u is what the rounding of u left of v (Goldberg 1991, theorem 4)
    exponential = tl.where(u == 1.0, v, -tl.log(u) * (v / tl.where(u == 1.0, 1.0, 1.0 - u)))
    return -tl.log(exponential)


@triton.jit
def gumbel_tile(first_id, position, seed, NUM_IDS: tl.constexpr, NUM_ROWS: tl.constexpr):
    """fp32 [NUM_IDS, NUM_ROWS] of ids from ``first_id``, a multiple of 4; ``position``, ``seed`` int64 [NUM_ROWS]."""
    block = first_id // 4 + tl.arange(0, NUM_IDS // 4)
    w0, w1, w2, w3 = philox_block(block[:, None], position[None, :], seed[None, :])
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [blocks, rows, a, b]: word 2a + b
    return gumbel(tl.reshape(tl.permute(words, (0, 2, 3, 1)), (NUM_IDS, NUM_ROWS)))

"""What one block of keys does to a query tile, and how key segments are merged: device code of decodes and prompts.

The columns C of a tile are (row, head) pairs that share a KV head. ``KEYS_ON_M``: keys are the M side of the matrix
instruction and columns the N side (few columns waste nothing); else columns are the M side and weights stay in
registers. An element's sum has one order either way, and column sums are products with ones for the same reason.
Contraction is off (``fma`` is written where it is meant): code around a step cannot change its rounding.

Shapes: DV = max(d, 64), since a product with fewer rows would be another instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cuda.bank_order import bank_origin

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def by_column(x, KEYS_ON_M: tl.constexpr):
    """``[C]`` -> a shape that broadcasts over keys (or over the head's dimensions)."""
    return x[None, :] if KEYS_ON_M else x[:, None]


@triton.jit
def by_key(x, KEYS_ON_M: tl.constexpr):
    """``[keys]`` (or ``[d]``) -> a shape that broadcasts over columns."""
    return x[:, None] if KEYS_ON_M else x[None, :]


@triton.jit
def empty_segment(C: tl.constexpr, DV: tl.constexpr, KEYS_ON_M: tl.constexpr):
    """(m [C], l and a as products lay them out) of no key at all."""
    m = tl.full([C], float("-inf"), tl.float32)
    if KEYS_ON_M:
        return m, tl.zeros([64, C], tl.float32), tl.zeros([DV, C], tl.float32)
    else:
        return m, tl.zeros([C, 16], tl.float32), tl.zeros([C, DV], tl.float32)


@triton.jit
def load_bias(
    start,  # first key of the block
    position,  # [C]
    has_row,  # [C]; columns without a row get 0
    bank,  # at key 0 of the tile's first row and head
    bank_offset,  # int32 [C] from there to key 0 of the column's row and head
    EXTENT: tl.constexpr,
    BANK_WIDTH: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    KEYS_ON_M: tl.constexpr,
):
    """Biases of a block, 0 at distances of EXTENT and more; of keys past the row, anything."""
    key = by_key(start + tl.arange(0, BLOCK_KEYS), KEYS_ON_M)
    place = key - by_column(bank_origin(position, EXTENT), KEYS_ON_M)
    inside = by_column(has_row, KEYS_ON_M) & (place >= 0) & (place < BANK_WIDTH)
    return tl.load(bank + (by_column(bank_offset, KEYS_ON_M) + key), mask=inside, other=0.0)


@triton.jit
def block_scores(
    q,  # [C, d]
    k,  # [keys, d]
    start,  # first key of the block
    position,  # [C]
    bias,  # of ``load_bias``, or None: every row is EXTENT or more past the block
    d: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: full
    MASKED: tl.constexpr,  # False: every row sees the whole block
    KEYS_ON_M: tl.constexpr,
):
    """-> q . k / d + bias, -inf where the row does not see the key. d is a power of two: one rounding, in the add.

    Without bias the factor 1 / d, which is exact, is left to ``weigh``.
    """
    n = tl.arange(0, k.shape[0])
    s = tl.dot(k, tl.trans(q)) if KEYS_ON_M else tl.dot(q, tl.trans(k))
    if bias is not None:
        s = tl.fma(s, tl.full(s.shape, 1.0 / d, tl.float32), bias.to(tl.float32))
    if MASKED:
        last = by_column(position - start, KEYS_ON_M)  # place within the block of the last key that the row sees
        sees = by_key(n, KEYS_ON_M) <= last
        if WINDOW > 0:
            sees = sees & (by_key(n, KEYS_ON_M) > last - WINDOW)
        s = tl.where(sees, s, float("-inf"))
    return s


@triton.jit
def weigh(x, m, UNIT: tl.constexpr, KEYS_ON_M: tl.constexpr, dtype: tl.constexpr):
    """Scores ``x * UNIT`` (a power of two) that join a segment of maximum ``m``.

    -> its new maximum, the block's weights, factor of the sums and values so far.
    """
    new = tl.maximum(m, tl.max(x, 0 if KEYS_ON_M else 1) * UNIT)
    base = tl.where(new == float("-inf"), 0.0, new)
    scale = tl.full(x.shape, LOG2_E * UNIT, tl.float32)
    shift = tl.broadcast_to(by_column(base * -LOG2_E, KEYS_ON_M), x.shape)
    p = tl.exp2(tl.fma(x, scale, shift)).to(dtype)
    # exactly 1 where the maximum stays; a fused product would leave the rounding error of m * log2(e)
    return new, p, by_column(tl.exp2((m - base) * LOG2_E), KEYS_ON_M)


@triton.jit
def add_values(p, v, kept, values, KEYS_ON_M: tl.constexpr):
    if KEYS_ON_M:
        return tl.dot(tl.trans(v), p, values * kept)
    else:
        return tl.dot(p, v, values * kept)


@triton.jit
def add_weights(p, kept, sums, KEYS_ON_M: tl.constexpr):
    """The last product before a branch, used at once: with one in flight the assembler would wait for every one."""
    keys: tl.constexpr = p.shape[0] if KEYS_ON_M else p.shape[1]
    if KEYS_ON_M:
        l = tl.dot(tl.full([64, keys], 1.0, tl.float32).to(p.dtype), p)  # noqa: E741
    else:
        l = tl.dot(p, tl.full([keys, 16], 1.0, tl.float32).to(p.dtype))  # noqa: E741
    return tl.fma(sums, tl.broadcast_to(kept, sums.shape), l)


@triton.jit
def column_sums(sums, KEYS_ON_M: tl.constexpr):
    """l ``[C]`` of the product with ones, whose rows (or columns) all hold it."""
    return tl.max(sums, 0 if KEYS_ON_M else 1)


@triton.jit
def merge_scales(total_m, m):
    """-> maximum of both, factor of the total, factor of the segment that joins it."""
    new = tl.maximum(total_m, m)
    base = tl.where(new == float("-inf"), 0.0, new)
    return new, tl.exp2((total_m - base) * LOG2_E), tl.exp2((m - base) * LOG2_E)


@triton.jit
def merged(total, total_scale, part, scale):
    return tl.fma(part, scale, total * total_scale)


@triton.jit
def reciprocal(total_l):
    return tl.div_rn(tl.full(total_l.shape, 1.0, tl.float32), total_l)


@triton.jit
def load_pages(page_row, start, end, PAGE: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Page ids of the block at ``start``: one where a page holds the block, else one a key.

    Loops load them a block ahead: an address that waits for its page would hold up the pipeline of keys.
    """
    if PAGE % BLOCK_KEYS == 0:
        return tl.load(page_row + tl.minimum(start, end - 1) // PAGE)
    else:
        return tl.load(page_row + tl.minimum(start + tl.arange(0, BLOCK_KEYS), end - 1) // PAGE)


@triton.jit
def load_block(
    cache,  # of keys or values
    new,  # [T, n_kv, d] of this pass, or None: everything is in the cache
    start,
    pages,  # of ``load_pages``
    pass_start,  # position of the segment's first row in this pass; from there on keys are read from ``new``
    pass_row,  # and that row
    kv_head,
    first_key,  # [first_key, end) is what some row of the tile sees; the rest is read as 0
    end,
    num_kv: tl.constexpr,
    d: tl.constexpr,
    WIDTH: tl.constexpr,  # d or more: zeros beyond
    PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """``[BLOCK_KEYS, WIDTH]`` from key ``start`` on."""
    n, dim = tl.arange(0, BLOCK_KEYS), tl.arange(0, WIDTH)[None, :]
    key = start + n
    if PAGE % BLOCK_KEYS == 0:
        at = (cache + ((pages.to(tl.int64) * num_kv + kv_head) * PAGE + start % PAGE) * d) + n * d
    else:
        at = cache + ((pages.to(tl.int64) * num_kv + kv_head) * PAGE + key % PAGE) * d
    if new is not None:
        at = tl.where(key >= pass_start, new + ((pass_row + key - pass_start).to(tl.int64) * num_kv + kv_head) * d, at)
    if MASKED or d != WIDTH:
        held = ((key >= first_key) & (key < end))[:, None]
        return tl.load(at[:, None] + dim, mask=held if d == WIDTH else held & (dim < d), other=0.0)
    else:
        return tl.load(at[:, None] + dim)


@triton.jit
def far_end(first_position, begin, EXTENT: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """End of the blocks that lie EXTENT or more before every row; no bias there."""
    return tl.maximum(begin, tl.maximum(first_position - EXTENT + 1, 0) // BLOCK_KEYS * BLOCK_KEYS)


@triton.jit
def load_queries(q, row, head, has_row, num_heads: tl.constexpr, d: tl.constexpr):
    """``[C, d]``; zeros for columns without a row."""
    at = (row.to(tl.int64) * num_heads + head) * d
    return tl.load(q + at[:, None] + tl.arange(0, d)[None, :], mask=has_row[:, None], other=0.0)

"""Relative attention over paged keys on CUDA: what prompts and decodes share, and the kernels for few rows.

    o_t = sum_s softmax_s(q_t . k_s / d + B_t(t - s)) v_s      over 0 <= t - s (< W on local layers)

One definition of a row for decodes, verification and prompts. Keys are cut into segments of ``CONFIGS`` length from
absolute position 0, segments into blocks. A segment has its own maximum m, sum l and weighted values a, updated
block by block; segments are merged in ascending order by ``merge_scales`` and ``merged``. A block or segment that a
row cannot see changes none of its bits. Here segments are spread over programs and merged by a second kernel;
``relative_attention_prompt`` walks them in one program.

The columns of a tile are (row, head) pairs that share a KV head. Column sums are products with ones, so that a sum
has the order of the matrix instruction however columns lie on the tile; contraction is off (``fma`` is written where
it is meant), so that code around a step cannot change its rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_M = 64  # rows of the matrix instruction's M side; with fewer another instruction is chosen


@dataclass(frozen=True)
class AttentionConfig:
    """``segment`` and ``block_keys`` order a row's sums and are part of its definition; the rest is speed alone.

    ``keys_on_m``: keys are the M side of the instruction, columns the N side (few columns waste nothing); else the
    columns are the M side, in tiles of 64 or 128 (weights stay in registers).
    """

    segment: int = 512  # keys
    block_keys: int = 64
    decode_keys_on_m: bool = True
    decode_warps: int = 4
    decode_stages: int = 3
    prompt_keys_on_m: bool = False
    prompt_columns: int = 128
    prompt_warps: int = 8
    prompt_stages: int = 3

    def __post_init__(self) -> None:
        if self.segment % self.block_keys or self.block_keys % LEAST_M:
            raise ValueError(
                f"block_keys is {self.block_keys}; it must be a multiple of {LEAST_M} that divides {self.segment}"
            )


CONFIGS: dict[int, AttentionConfig] = {  # by head_dim
    d: AttentionConfig() for d in (16, 32, 64, 128)
}


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
def block_scores(
    q,  # [C, d]
    k,  # [keys, d]
    first_position,  # of the tile's first row
    step,  # [C] rows from there to the column's row
    has_row,  # [C]; columns without a row give anything but NaN
    bank,  # at the tile's first row and head
    bank_offset,  # int32 [C] from there to the column's row and head, at distance ``step``
    last_key,  # of the block; its keys are in descending order
    d: tl.constexpr,
    EXTENT: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: full
    NEAR: tl.constexpr,  # False: every row is EXTENT or more past the block
    KEYS_ON_M: tl.constexpr,
):
    """-> q . k / d + bias, -inf where the row does not see the key. d is a power of two: one rounding, in the add."""
    nth = by_key(tl.arange(0, k.shape[0]), KEYS_ON_M)
    back = first_position - last_key
    distance = (by_column(step + back, KEYS_ON_M) + nth).to(tl.uint32, bitcast=True)  # huge: in the future
    if NEAR:
        biased: tl.constexpr = WINDOW if 0 < WINDOW and WINDOW < EXTENT else EXTENT
        # before the product: the layout of vectors over columns then follows the product, not this load
        bias = tl.load(
            (bank + back + nth) + by_column(bank_offset, KEYS_ON_M),
            mask=by_column(has_row, KEYS_ON_M) & (distance < biased),
            other=0.0,
        )
        s = tl.dot(k, tl.trans(q)) if KEYS_ON_M else tl.dot(q, tl.trans(k))
        x = tl.fma(s, tl.full(s.shape, 1.0 / d, tl.float32), bias.to(tl.float32))
        return tl.where(distance < (WINDOW if WINDOW > 0 else 1 << 31), x, float("-inf"))
    else:
        s = tl.dot(k, tl.trans(q)) if KEYS_ON_M else tl.dot(q, tl.trans(k))
        x = s * (1.0 / d)
        return tl.where(distance < WINDOW, x, float("-inf")) if WINDOW > 0 else x


@triton.jit
def add_block(x, v, m, sums, values, KEYS_ON_M: tl.constexpr):
    """One block of scores ``x`` and values ``v [keys, DV]`` into a segment's (m, l, a)."""
    new = tl.maximum(m, tl.max(x, 0 if KEYS_ON_M else 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    # exactly 1 where the maximum stays; a fused product would leave the rounding error of m * log2(e)
    kept = by_column(tl.exp2((m - base) * LOG2_E), KEYS_ON_M)
    scale = tl.full(x.shape, LOG2_E, tl.float32)
    shift = tl.broadcast_to(by_column(base * -LOG2_E, KEYS_ON_M), x.shape)
    p = tl.exp2(tl.fma(x, scale, shift)).to(v.dtype)
    if KEYS_ON_M:
        sums = tl.dot(tl.full([64, v.shape[0]], 1.0, v.dtype), p, sums * kept)
        values = tl.dot(tl.trans(v), p, values * kept)
    else:
        sums = tl.dot(p, tl.full([v.shape[0], 16], 1.0, v.dtype), sums * kept)
        values = tl.dot(p, v, values * kept)
    return new, sums, values


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
        return tl.load(page_row + tl.minimum(start + BLOCK_KEYS - 1 - tl.arange(0, BLOCK_KEYS), end - 1) // PAGE)


@triton.jit
def attend_block(
    start,
    pages,  # of ``load_pages``
    q,  # [C, d]
    first_position,
    step,
    has_row,
    bank,  # and its offsets: see ``block_scores``
    bank_offset,
    key_cache,
    value_cache,
    new_keys,  # [T, n_kv, d] of this pass, or None: everything is in the cache
    new_values,
    pass_start,  # position of the segment's first row in this pass; from there on keys are read from new_keys
    pass_row,  # and that row
    kv_head,
    first_key,  # [first_key, end) is what some row of the tile sees; the rest is read as 0
    end,
    m,
    sums,
    values,
    num_kv: tl.constexpr,
    d: tl.constexpr,
    DV: tl.constexpr,
    EXTENT: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    NEAR: tl.constexpr,
    KEYS_ON_M: tl.constexpr,
):
    """Adds the keys ``[start, start + BLOCK_KEYS)`` to a segment's (m, l, a)."""
    last_key = start + BLOCK_KEYS - 1
    key = last_key - tl.arange(0, BLOCK_KEYS)  # descending: biases, by distance, then lie in ascending order
    at = ((pages.to(tl.int64) * num_kv + kv_head) * PAGE + key % PAGE) * d
    k_at, v_at = key_cache + at, value_cache + at
    if new_keys is not None:
        new = ((pass_row + key - pass_start).to(tl.int64) * num_kv + kv_head) * d
        k_at = tl.where(key >= pass_start, new_keys + new, k_at)
        v_at = tl.where(key >= pass_start, new_values + new, v_at)
    held = ((key >= first_key) & (key < end))[:, None]
    dim, value_dim = tl.arange(0, d)[None, :], tl.arange(0, DV)[None, :]
    k = tl.load(k_at[:, None] + dim, mask=held, other=0.0)
    v = tl.load(v_at[:, None] + value_dim, mask=held if DV == d else held & (value_dim < d), other=0.0)
    x = block_scores(
        q, k, first_position, step, has_row, bank, bank_offset, last_key, d, EXTENT, WINDOW, NEAR, KEYS_ON_M
    )
    return add_block(x, v, m, sums, values, KEYS_ON_M)


@triton.jit
def far_end(first_position, begin, EXTENT: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """End of the blocks that lie EXTENT or more before every row; no bias there."""
    return tl.maximum(begin, tl.maximum(first_position - EXTENT + 1, 0) // BLOCK_KEYS * BLOCK_KEYS)


@triton.jit
def load_queries(q, row, head, has_row, num_heads: tl.constexpr, d: tl.constexpr):
    """``[C, d]``; zeros for columns without a row."""
    at = (row.to(tl.int64) * num_heads + head) * d
    return tl.load(q + at[:, None] + tl.arange(0, d)[None, :], mask=has_row[:, None], other=0.0)


@triton.jit(do_not_specialize=["pages_per_slot", "max_splits", "columns"])
def _segment_kernel(
    q,  # [T, n_q, d] bf16
    bank,  # [T, n_q, BANK_WIDTH] bf16
    key_cache,  # [pages, n_kv, page_size, d] bf16
    value_cache,
    page_table,  # int32 [slots, pages_per_slot]
    segments,  # int32 [S, 4]: slot, first row, first position, rows
    part_m,  # fp32 [S, n_kv, max_splits, columns]
    part_l,
    part_a,  # fp32 [S, n_kv, max_splits, columns, d]
    pages_per_slot,
    max_splits,
    columns,
    num_heads: tl.constexpr,
    num_kv: tl.constexpr,
    d: tl.constexpr,
    EXTENT: tl.constexpr,
    BANK_WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    C: tl.constexpr,
    DV: tl.constexpr,
    KEYS_ON_M: tl.constexpr,
):
    """(m, l, a) of the key segments ``program_id(0) + i * num_programs(0)`` of one sequence and KV head."""
    sequence, kv_head = tl.program_id(2), tl.program_id(1)
    meta = segments + sequence * 4
    slot, first_row, first_position, rows = tl.load(meta), tl.load(meta + 1), tl.load(meta + 2), tl.load(meta + 3)
    if slot < 0:
        return
    per_kv: tl.constexpr = num_heads // num_kv
    column = tl.arange(0, C)
    has_row = column < rows * per_kv
    row = first_row + column // per_kv
    head = kv_head * per_kv + column % per_kv
    step = column // per_kv
    queries = load_queries(q, row, head, has_row, num_heads, d)
    bank_tile = bank + (first_row.to(tl.int64) * num_heads + kv_head * per_kv) * BANK_WIDTH
    bank_offset = (step.to(tl.int64) * num_heads + column % per_kv) * BANK_WIDTH + step

    page_row = page_table + slot.to(tl.int64) * pages_per_slot
    end = first_position + rows
    first_key = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW > 0 else 0
    first_split = first_key // SEGMENT
    value_dim = tl.arange(0, DV)
    for split in range(first_split + tl.program_id(0), tl.cdiv(end, SEGMENT), tl.num_programs(0)):
        m, sums, values = empty_segment(C, DV, KEYS_ON_M)
        begin = tl.maximum(split * SEGMENT, first_key // BLOCK_KEYS * BLOCK_KEYS)
        stop = tl.minimum(end, (split + 1) * SEGMENT)
        near = begin
        pages = load_pages(page_row, begin, end, PAGE, BLOCK_KEYS)
        if WINDOW == 0 or EXTENT < WINDOW:
            near = tl.minimum(far_end(first_position, begin, EXTENT, BLOCK_KEYS), stop)
            for start in range(begin, near, BLOCK_KEYS):
                following = load_pages(page_row, start + BLOCK_KEYS, end, PAGE, BLOCK_KEYS)
                m, sums, values = attend_block(
                    start, pages, queries, first_position, step, has_row, bank_tile, bank_offset, key_cache, value_cache, None, None, 0, 0, kv_head,
                    first_key, end, m, sums, values, num_kv, d, DV, EXTENT, WINDOW, PAGE, BLOCK_KEYS, False, KEYS_ON_M,
                )  # fmt: skip
                pages = following
        for start in range(near, stop, BLOCK_KEYS):
            following = load_pages(page_row, start + BLOCK_KEYS, end, PAGE, BLOCK_KEYS)
            m, sums, values = attend_block(
                start, pages, queries, first_position, step, has_row, bank_tile, bank_offset, key_cache, value_cache, None, None, 0, 0, kv_head,
                first_key, end, m, sums, values, num_kv, d, DV, EXTENT, WINDOW, PAGE, BLOCK_KEYS, True, KEYS_ON_M,
            )  # fmt: skip
            pages = following
        part = ((sequence * num_kv + kv_head).to(tl.int64) * max_splits + split - first_split) * columns + column
        tl.store(part_m + part, m, mask=has_row)
        tl.store(part_l + part, column_sums(sums, KEYS_ON_M), mask=has_row)
        mask = by_column(has_row, KEYS_ON_M) & by_key(value_dim < d, KEYS_ON_M)
        tl.store(part_a + by_column(part * d, KEYS_ON_M) + by_key(value_dim, KEYS_ON_M), values, mask=mask)


@triton.jit(do_not_specialize=["max_splits", "columns"])
def _merge_kernel(
    part_m,
    part_l,
    part_a,
    segments,
    out,  # [T, n_q * d] bf16
    max_splits,
    columns,
    num_heads: tl.constexpr,
    num_kv: tl.constexpr,
    d: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENT: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Merges the segments of one row and head in ascending order."""
    sequence, offset, head = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    meta = segments + sequence * 4
    slot, first_row, first_position, rows = tl.load(meta), tl.load(meta + 1), tl.load(meta + 2), tl.load(meta + 3)
    if (slot < 0) | (offset >= rows):
        return
    per_kv: tl.constexpr = num_heads // num_kv
    first_split = tl.maximum(first_position - WINDOW + 1, 0) // SEGMENT if WINDOW > 0 else 0
    splits = tl.cdiv(first_position + rows, SEGMENT) - first_split
    dim = tl.arange(0, d)
    part = (sequence * num_kv + head // per_kv).to(tl.int64) * max_splits * columns
    part += offset * per_kv + head % per_kv
    one = tl.arange(0, 1)
    total_m = tl.full([1], float("-inf"), tl.float32)
    total_l, total = tl.zeros([1], tl.float32), tl.zeros([d], tl.float32)
    for first in range(0, splits, AT_ONCE):
        for i in tl.static_range(AT_ONCE):  # loads of one round are in flight together
            there = first + i < splits
            at = part + (first + i).to(tl.int64) * columns
            m = tl.load(part_m + at + one, mask=there, other=float("-inf"))
            l = tl.load(part_l + at + one, mask=there, other=0.0)  # noqa: E741
            a = tl.load(part_a + at * d + dim, mask=there, other=0.0)
            total_m, old, new = merge_scales(total_m, m)
            total_l = merged(total_l, old, l, new)
            total = merged(total, tl.broadcast_to(old, [d]), a, tl.broadcast_to(new, [d]))
    row = (first_row + offset).to(tl.int64)
    o = total * tl.broadcast_to(reciprocal(total_l), [d])
    tl.store(out + (row * num_heads + head) * d + dim, o.to(out.dtype.element_ty))


@dataclass(frozen=True)
class Heads:
    """Shape of one attention kind. ``window`` counts visible keys, the row's own included; 0: full."""

    num_heads: int
    num_kv: int
    head_dim: int
    extent: int
    window: int = 0

    def __post_init__(self) -> None:
        if self.head_dim not in CONFIGS:
            raise ValueError(f"head_dim is {self.head_dim}; there are kernels for {sorted(CONFIGS)}")
        if self.num_heads % self.num_kv:
            raise ValueError(f"{self.num_heads} heads do not share {self.num_kv} KV heads evenly")

    @property
    def per_kv(self) -> int:
        return self.num_heads // self.num_kv

    def splits(self, max_keys: int, max_rows: int, segment: int) -> int:
        """Most key segments that ``max_rows`` consecutive rows below position ``max_keys`` can see."""
        splits = triton.cdiv(max_keys, segment)
        return splits if not self.window else min(splits, (self.window + max_rows + segment - 3) // segment + 1)


@dataclass
class SegmentParts:
    """(m, l, a) of every key segment that a decode attends to, in fp32; columns are (row, head of a KV head)."""

    m: Tensor  # [S, n_kv, splits, columns]
    l: Tensor  # noqa: E741
    a: Tensor  # [S, n_kv, splits, columns, d]

    @classmethod
    def allocate(cls, heads: Heads, sequences: int, max_keys: int, max_rows: int, device: object) -> SegmentParts:
        splits = heads.splits(max_keys, max_rows, CONFIGS[heads.head_dim].segment)
        shape = (sequences, heads.num_kv, splits, max_rows * heads.per_kv)

        def empty(*tail: int) -> Tensor:
            return torch.empty(*shape, *tail, dtype=torch.float32, device=device)

        return cls(empty(), empty(), empty(heads.head_dim))


def check_operands(heads: Heads, q: Tensor, bank: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
    """Kernels address by shape alone and load 16 bytes at a time."""
    rows, d = q.shape[0], heads.head_dim
    assert q.shape == (rows, heads.num_heads, d), q.shape
    assert bank.shape[:2] == q.shape[:2] and bank.shape[2] >= heads.extent, (bank.shape, heads)
    assert keys.shape == values.shape and keys.shape[1::2] == (heads.num_kv, d), (keys.shape, heads)
    assert out.shape == (rows, heads.num_heads * d), out.shape
    for x in (q, bank, keys, values, out):
        assert x.is_contiguous() and x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0, (x.shape, x.dtype)


def decode_columns(heads: Heads, max_rows: int) -> tuple[int, bool]:
    """Width of the tile of ``max_rows`` rows, and whether keys are on the M side."""
    columns = max(16, triton.next_power_of_2(max_rows * heads.per_kv))
    keys_on_m = CONFIGS[heads.head_dim].decode_keys_on_m and columns <= 32  # wider tiles spill
    return columns if keys_on_m else max(columns, LEAST_M), keys_on_m


def decode_attention(
    heads: Heads,
    q: Tensor,  # [T, n_q, d] bf16, normed, times tau
    bank: Tensor,  # [T, n_q, >= R] bf16, times tau
    key_cache: Tensor,  # [pages, n_kv, page_size, d] bf16; holds this pass's keys
    value_cache: Tensor,
    page_table: Tensor,  # int32 [slots, pages_per_slot]
    segments: Tensor,  # int32 [S, 4] (slot, first row, first position, rows); slot -1: none
    parts: SegmentParts,
    out: Tensor,  # [T, n_q * d] bf16
    max_rows: int,
    programs: int | None = None,
    config: AttentionConfig | None = None,
) -> Tensor:
    """Attention of segments of up to ``max_rows`` rows (decodes, verification). Rows of no segment stay as they are.

    ``parts`` bounds the positions; programs beyond a sequence's end return at once. ``programs`` per sequence and KV
    head share its key segments (default: one each); they change no bits.
    """
    config = config or CONFIGS[heads.head_dim]
    check_operands(heads, q, bank, key_cache, value_cache, out)
    sequences, _, splits, columns = parts.m.shape
    assert columns == max_rows * heads.per_kv and sequences == segments.shape[0], (parts.m.shape, segments.shape)
    width, keys_on_m = decode_columns(heads, max_rows)
    _segment_kernel[(programs or splits, heads.num_kv, sequences)](
        q, bank, key_cache, value_cache, page_table, segments, parts.m, parts.l, parts.a,
        page_table.shape[1], splits, columns, heads.num_heads, heads.num_kv, heads.head_dim,
        EXTENT=heads.extent, BANK_WIDTH=bank.shape[2], WINDOW=heads.window, PAGE=key_cache.shape[2],
        SEGMENT=config.segment, BLOCK_KEYS=config.block_keys, C=width, DV=max(heads.head_dim, LEAST_M),
        KEYS_ON_M=keys_on_m, num_warps=config.decode_warps, num_stages=config.decode_stages, enable_fp_fusion=False,
    )  # fmt: skip
    _merge_kernel[(heads.num_heads, max_rows, sequences)](
        parts.m, parts.l, parts.a, segments, out, splits, columns, heads.num_heads, heads.num_kv, heads.head_dim,
        WINDOW=heads.window, SEGMENT=config.segment, AT_ONCE=8, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out

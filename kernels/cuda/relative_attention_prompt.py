"""Relative attention of many rows of a sequence (prompt chunks): every row has the bits that a decode gives it.

One program takes a tile of consecutive rows with the heads of one KV head and walks the key segments in ascending
order, merging each into the total as ``relative_attention`` merges the segments of its programs.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.bank_order import bank_origin
from kernels.cuda.compile import Serving
from kernels.cuda.relative_attention_blocks import (
    add_values,
    add_weights,
    block_scores,
    by_column,
    by_key,
    column_sums,
    empty_segment,
    far_end,
    load_bias,
    load_block,
    load_pages,
    load_queries,
    merge_scales,
    merged,
    reciprocal,
    weigh,
)
from kernels.cuda.relative_attention_config import (
    LEAST_M,
    OPERANDS,
    PAGE_SIZE,
    SERVING_HEADS,
    AttentionConfig,
    Heads,
    check_operands,
    tile_constants,
)


@triton.jit
def _merge_into(total_m, total_l, total, m, sums, values, KEYS_ON_M: tl.constexpr):
    """Adds a finished segment (or an empty one, which changes nothing) to the total."""
    total_m, old, new = merge_scales(total_m, m)
    total_l = merged(total_l, old, column_sums(sums, KEYS_ON_M), new)
    old, new = by_column(old, KEYS_ON_M), by_column(new, KEYS_ON_M)
    total = merged(total, tl.broadcast_to(old, values.shape), values, tl.broadcast_to(new, values.shape))
    return total_m, total_l, total


@triton.jit
def _store_tile(
    out, tiles, segments, total, total_l, kv_head, num_heads: tl.constexpr, num_kv: tl.constexpr, d: tl.constexpr,
    C: tl.constexpr, DV: tl.constexpr, KEYS_ON_M: tl.constexpr,
):  # fmt: skip
    per_kv: tl.constexpr = num_heads // num_kv
    meta = segments + tl.load(tiles + tl.program_id(1) * 2) * 4
    begin_row = tl.load(tiles + tl.program_id(1) * 2 + 1)
    column, dim = tl.arange(0, C), tl.arange(0, DV)
    has_row = column < (tl.load(meta + 3) - begin_row) * per_kv
    if C % per_kv != 0:
        has_row = has_row & (column < C // per_kv * per_kv)
    row = tl.load(meta + 1) + begin_row + column // per_kv
    at = (row.to(tl.int64) * num_heads + kv_head * per_kv + column % per_kv) * d
    factor = by_column(reciprocal(tl.where(has_row, total_l, 1.0)), KEYS_ON_M)
    mask = by_column(has_row, KEYS_ON_M) & by_key(dim < d, KEYS_ON_M)
    o = (total * factor).to(out.dtype.element_ty)
    tl.store(out + by_column(at, KEYS_ON_M) + by_key(dim, KEYS_ON_M), o, mask=mask)


@triton.jit
def _attend_range(
    begin, stop, pages, queries, position, has_row, bank_tile, bank_offset, key_cache, value_cache, new_keys,
    new_values, pass_start, pass_row, kv_head, first_key, end, page_row, m, sums, values, total_m, total_l, total,
    num_kv: tl.constexpr, d: tl.constexpr, C: tl.constexpr, DV: tl.constexpr, EXTENT: tl.constexpr,
    BANK_WIDTH: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BIASED: tl.constexpr, MASKED: tl.constexpr, KEYS_ON_M: tl.constexpr,
):  # fmt: skip
    """Blocks of ``[begin, stop)`` into the segment, and each segment that ends there into the total."""
    for start in range(begin, stop, BLOCK_KEYS):
        following = load_pages(page_row, start + BLOCK_KEYS, end, PAGE, BLOCK_KEYS)
        bias = None
        if BIASED:
            bias = load_bias(
                start, position, has_row, bank_tile, bank_offset, EXTENT, BANK_WIDTH, BLOCK_KEYS, KEYS_ON_M
            )
        k = load_block(
            key_cache, new_keys, start, pages, pass_start, pass_row, kv_head, first_key, end, num_kv, d, d, PAGE,
            BLOCK_KEYS, MASKED,
        )  # fmt: skip
        v = load_block(
            value_cache, new_values, start, pages, pass_start, pass_row, kv_head, first_key, end, num_kv, d, DV, PAGE,
            BLOCK_KEYS, MASKED,
        )  # fmt: skip
        x = block_scores(queries, k, start, position, bias, d, WINDOW, MASKED, KEYS_ON_M)
        m, p, kept = weigh(x, m, 1.0 if BIASED else 1.0 / d, KEYS_ON_M, v.dtype)
        values = add_values(p, v, kept, values, KEYS_ON_M)
        sums = add_weights(p, kept, sums, KEYS_ON_M)
        pages = following
        if (start + BLOCK_KEYS) % SEGMENT == 0:
            total_m, total_l, total = _merge_into(total_m, total_l, total, m, sums, values, KEYS_ON_M)
            m, sums, values = empty_segment(C, DV, KEYS_ON_M)
    return pages, m, sums, values, total_m, total_l, total


@triton.jit(do_not_specialize=["pages_per_slot"])
def _prompt_kernel(
    q,  # [T, n_q, d] bf16
    bank,  # [T, n_q, bank_width(EXTENT)] bf16
    key_cache,  # [pages, n_kv, page_size, d] bf16
    value_cache,
    new_keys,  # [T, n_kv, d] bf16 of this pass, or None
    new_values,
    page_table,  # int32 [slots, pages_per_slot]
    segments,  # int32 [S, 4]: slot, first row, first position, rows
    tiles,  # int32 [tiles, 2]: segment (-1: none), first row within it
    out,  # [T, n_q * d] bf16
    pages_per_slot,
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
    kv_head = tl.program_id(0)
    sequence = tl.load(tiles + tl.program_id(1) * 2)
    if sequence < 0:
        return
    begin_row = tl.load(tiles + tl.program_id(1) * 2 + 1)
    meta = segments + sequence * 4
    slot, pass_row, pass_start, count = tl.load(meta), tl.load(meta + 1), tl.load(meta + 2), tl.load(meta + 3)
    if slot < 0:
        return
    per_kv: tl.constexpr = num_heads // num_kv
    column = tl.arange(0, C)
    rows = tl.minimum(count - begin_row, C // per_kv)
    has_row = column < rows * per_kv
    step = column // per_kv
    first_row, first_position = pass_row + begin_row, pass_start + begin_row
    position = first_position + step
    queries = load_queries(q, first_row + step, kv_head * per_kv + column % per_kv, has_row, num_heads, d)
    origin = bank_origin(first_position, EXTENT)
    bank_tile = bank + ((first_row.to(tl.int64) * num_heads + kv_head * per_kv) * BANK_WIDTH - origin)
    bank_offset = (step * num_heads + column % per_kv) * BANK_WIDTH + (origin - bank_origin(position, EXTENT))

    page_row = page_table + slot.to(tl.int64) * pages_per_slot
    end = first_position + rows
    first_key = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW > 0 else 0
    begin = first_key // BLOCK_KEYS * BLOCK_KEYS
    stop = tl.cdiv(end, BLOCK_KEYS) * BLOCK_KEYS
    m, sums, values = empty_segment(C, DV, KEYS_ON_M)
    total_m, _, total = empty_segment(C, DV, KEYS_ON_M)
    total_l = tl.zeros([C], tl.float32)
    pages = load_pages(page_row, begin, end, PAGE, BLOCK_KEYS)
    if WINDOW == 0 or EXTENT < WINDOW:
        near = tl.minimum(far_end(first_position, begin, EXTENT, BLOCK_KEYS), stop)
        pages, m, sums, values, total_m, total_l, total = _attend_range(
            begin, near, pages, queries, position, has_row, bank_tile, bank_offset, key_cache, value_cache, new_keys,
            new_values, pass_start, pass_row, kv_head, first_key, end, page_row, m, sums, values, total_m, total_l,
            total, num_kv, d, C, DV, EXTENT, BANK_WIDTH, WINDOW, PAGE, SEGMENT, BLOCK_KEYS,
            False, WINDOW > 0, KEYS_ON_M,
        )  # fmt: skip
        begin = near
    pages, m, sums, values, total_m, total_l, total = _attend_range(
        begin, stop, pages, queries, position, has_row, bank_tile, bank_offset, key_cache, value_cache, new_keys,
        new_values, pass_start, pass_row, kv_head, first_key, end, page_row, m, sums, values, total_m, total_l,
        total, num_kv, d, C, DV, EXTENT, BANK_WIDTH, WINDOW, PAGE, SEGMENT, BLOCK_KEYS, True, True, KEYS_ON_M,
    )  # fmt: skip
    total_m, total_l, total = _merge_into(total_m, total_l, total, m, sums, values, KEYS_ON_M)

    # read again: what only the store needs would otherwise occupy registers all the way
    _store_tile(out, tiles, segments, total, total_l, kv_head, num_heads, num_kv, d, C, DV, KEYS_ON_M)


def prompt_tiles(heads: Heads, segments: np.ndarray, columns: int | None = None, padding: int = 0) -> np.ndarray:
    """int32 ``[tiles, 2]`` (segment, first row within it) of int ``segments [S, 4]``; ``padding`` tiles of nothing.

    Tiles that see most keys come first: the last to start are the shortest.
    """
    columns = columns or heads.config.prompt_columns
    size = columns // heads.per_kv
    tiles = [(s, row) for s, (slot, _, _, rows) in enumerate(segments) if slot >= 0 for row in range(0, rows, size)]
    tiles.sort(key=lambda tile: -(segments[tile[0]][2] + tile[1]))
    return np.array([*tiles, *[(-1, 0)] * padding], np.int32).reshape(-1, 2)


def prompt_attention(
    heads: Heads,
    q: Tensor,  # [T, n_q, d] bf16, normed, times tau
    bank: Tensor,  # [T, n_q, bank_width(R)] bf16, times tau, in key order
    key_cache: Tensor,  # [pages, n_kv, page_size, d] bf16
    value_cache: Tensor,
    new: tuple[Tensor, Tensor] | None,  # keys and values [T, n_kv, d] of this pass; None: the caches hold them
    page_table: Tensor,  # int32 [slots, pages_per_slot]
    segments: Tensor,  # int32 [S, 4] (slot, first row, first position, rows)
    tiles: Tensor,  # int32 [tiles, 2] of ``prompt_tiles`` for the same number of columns
    out: Tensor,  # [T, n_q * d] bf16
    columns: int | None = None,
    config: AttentionConfig | None = None,
) -> Tensor:
    """Attention of the rows of ``tiles``; others stay as they are. ``columns``: 64 or 128 (row, head) pairs a tile."""
    config = config or heads.config
    columns = columns or config.prompt_columns
    check_operands(heads, q, bank, key_cache, value_cache, out)
    launch = config.prompt
    assert launch.keys_on_m or columns % LEAST_M == 0, columns
    new_keys, new_values = new or (None, None)
    for x in new or ():
        assert x.is_contiguous() and x.shape[1:] == (heads.num_kv, heads.head_dim), x.shape
    _prompt_kernel[(heads.num_kv, len(tiles))](
        q, bank, key_cache, value_cache, new_keys, new_values, page_table, segments, tiles, out, page_table.shape[1],
        **tile_constants(heads, config, key_cache.shape[2]), C=columns, KEYS_ON_M=launch.keys_on_m,
        num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def serving(heads: Heads, config: AttentionConfig | None = None, columns: int | None = None) -> Serving:
    config, is_local = config or heads.config, heads.window > 0
    new = {"new_keys": "*bf16", "new_values": "*bf16"} if is_local else {}
    constants = tile_constants(heads, config, PAGE_SIZE) | {"C": columns or config.prompt_columns}
    constants |= {"KEYS_ON_M": config.prompt.keys_on_m}
    if not is_local:
        constants |= {"new_keys": None, "new_values": None}
    return Serving(
        f"prompt {heads} {constants['C']} columns {config.segment}/{config.block_keys} {config.prompt}",
        _prompt_kernel,
        {**OPERANDS, **new, "segments": "*i32", "tiles": "*i32", "out": "*bf16", "pages_per_slot": "i32"},
        constants,
        num_warps=config.prompt.num_warps,
        num_stages=config.prompt.num_stages,
        wgmma=True,
        options={"enable_fp_fusion": False},
    )


SERVING = [serving(heads) for heads in SERVING_HEADS]

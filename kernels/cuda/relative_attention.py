"""Relative attention over paged keys on CUDA, for few rows of many sequences: decodes and verification.

    o_t = sum_s softmax_s(q_t . k_s / d + B_t(t - s)) v_s      over 0 <= t - s (< W on local layers)

One definition of a row for decodes, verification and prompts. Keys are cut into segments of ``segment`` keys from
absolute position 0, segments into blocks of ``block_keys``. A segment has its own maximum m, sum l and weighted
values a, updated block by block; segments are merged in ascending order. A block or segment that a row cannot see
changes none of its bits. Here segments are spread over programs and merged by a second kernel;
``relative_attention_prompt`` walks them in one program, with the same device functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.bank_order import bank_origin
from kernels.cuda.compile import Serving
from kernels.cuda.early_launch import begin_launch
from kernels.cuda.relative_attention_blocks import (
    add_values,
    add_weights,
    block_scores,
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
    Launch,
    check_operands,
    tile_constants,
)

MERGED_AT_ONCE = 32  # segments whose loads are in flight together
MERGED_DIMS = 32  # of a head by one warp of the merge
PROGRAMS = 1056  # that a decode's segments are spread over, where it has as many: four waves of two a processor


@triton.jit
def _store_part(
    part_m, part_l, part_a, segments, nth, m, sums, values, max_splits, columns, num_kv: tl.constexpr,
    per_kv: tl.constexpr, d: tl.constexpr, C: tl.constexpr, DV: tl.constexpr, KEYS_ON_M: tl.constexpr,
):  # fmt: skip
    """The ``nth`` split's (m, l, a). Rows are counted again: kept, they would occupy registers all the way."""
    sequence, kv_head = tl.program_id(2), tl.program_id(1) % num_kv
    begin = tl.program_id(1) // num_kv * (C // per_kv) * per_kv
    column, dim = tl.arange(0, C), tl.arange(0, DV)
    held = begin + column < tl.load(segments + sequence * 4 + 3) * per_kv
    if C % per_kv != 0:
        held = held & (column < C // per_kv * per_kv)
    part = ((sequence * num_kv + kv_head).to(tl.int64) * max_splits + nth) * columns + begin + column
    tl.store(part_m + part, m, mask=held)
    tl.store(part_l + part, column_sums(sums, KEYS_ON_M), mask=held)
    if KEYS_ON_M:
        tl.store(part_a + part[None, :] * d + dim[:, None], values, mask=held[None, :] & (dim < d)[:, None])
    else:  # half by half: less shared memory to bring rows together
        low, high = tl.split(values.reshape(C, 2, DV // 2).permute(0, 2, 1))
        dim = tl.arange(0, DV // 2)
        at = part_a + part[:, None] * d + dim[None, :]
        tl.store(at, low, mask=held[:, None] & (dim < d)[None, :])
        tl.store(at + DV // 2, high, mask=held[:, None] & (dim + DV // 2 < d)[None, :])


@triton.jit
def _attend_range(
    begin, stop, pages, queries, position, has_row, bank_tile, bank_offset, key_cache, value_cache, kv_head, first_key,
    end, page_row, first_split, part_m, part_l, part_a, segments, max_splits, columns, m, sums, values,
    num_kv: tl.constexpr, per_kv: tl.constexpr, d: tl.constexpr, C: tl.constexpr, DV: tl.constexpr,
    EXTENT: tl.constexpr, BANK_WIDTH: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, SEGMENT: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BIASED: tl.constexpr, KEYS_ON_M: tl.constexpr,
):  # fmt: skip
    """Blocks of ``[begin, stop)`` into the segment; each segment that ends there is stored."""
    MASKED: tl.constexpr = BIASED or WINDOW > 0
    bias = None
    if BIASED:  # read a block ahead, into registers; biases of far keys are not read and count as 0
        bias = load_bias(begin, position, has_row, bank_tile, bank_offset, EXTENT, BANK_WIDTH, BLOCK_KEYS, KEYS_ON_M)
    for start in range(begin, stop, BLOCK_KEYS):
        following = load_pages(page_row, start + BLOCK_KEYS, end, PAGE, BLOCK_KEYS)
        if BIASED:
            next_bias = load_bias(
                start + BLOCK_KEYS, position, has_row, bank_tile, bank_offset, EXTENT, BANK_WIDTH, BLOCK_KEYS, KEYS_ON_M
            )
        k = load_block(
            key_cache, None, start, pages, 0, 0, kv_head, first_key, end, num_kv, d, d, PAGE, BLOCK_KEYS, MASKED
        )
        v = load_block(
            value_cache, None, start, pages, 0, 0, kv_head, first_key, end, num_kv, d, DV, PAGE, BLOCK_KEYS, MASKED
        )
        x = block_scores(queries, k, start, position, bias, d, WINDOW, MASKED, KEYS_ON_M)
        m, p, kept = weigh(x, m, 1.0 if BIASED else 1.0 / d, KEYS_ON_M, v.dtype)
        values = add_values(p, v, kept, values, KEYS_ON_M)
        sums = add_weights(p, kept, sums, KEYS_ON_M)
        pages = following
        if BIASED:
            bias = next_bias
        if (start + BLOCK_KEYS) % SEGMENT == 0:
            _store_part(
                part_m, part_l, part_a, segments, start // SEGMENT - first_split, m, sums, values,
                max_splits, columns, num_kv, per_kv, d, C, DV, KEYS_ON_M,
            )  # fmt: skip
            m, sums, values = empty_segment(C, DV, KEYS_ON_M)
    return pages, m, sums, values


@triton.jit(do_not_specialize=["pages_per_slot", "max_splits", "columns"])
def _segment_kernel(
    q,  # [T, n_q, d] bf16
    bank,  # [T, n_q, bank_width(EXTENT)] bf16
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
    EARLY: tl.constexpr,
):
    """(m, l, a) of consecutive key segments, the program's share, of one query tile and KV head."""
    begin_launch(EARLY)
    per_kv: tl.constexpr = num_heads // num_kv
    sequence, kv_head = tl.program_id(2), tl.program_id(1) % num_kv
    begin_row = tl.program_id(1) // num_kv * (C // per_kv)
    meta = segments + sequence * 4
    slot, first_row, pass_start, count = tl.load(meta), tl.load(meta + 1), tl.load(meta + 2), tl.load(meta + 3)
    rows = tl.minimum(count - begin_row, C // per_kv)
    if (slot < 0) | (rows <= 0):
        return
    first_row, first_position = first_row + begin_row, pass_start + begin_row
    end = first_position + rows
    first_key = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW > 0 else 0
    # segments of all tiles of the sequence; what a tile does not see it leaves out
    first_split = tl.maximum(pass_start - WINDOW + 1, 0) // SEGMENT if WINDOW > 0 else 0
    share = tl.cdiv(tl.cdiv(pass_start + count, SEGMENT) - first_split, tl.num_programs(0)) * SEGMENT
    begin = first_split * SEGMENT + tl.program_id(0) * share
    stop = tl.minimum(begin + share, tl.cdiv(end, BLOCK_KEYS) * BLOCK_KEYS)
    begin = tl.maximum(begin, first_key // BLOCK_KEYS * BLOCK_KEYS)
    if begin >= stop:
        return
    page_row = page_table + slot.to(tl.int64) * pages_per_slot
    pages = load_pages(page_row, begin, end, PAGE, BLOCK_KEYS)

    column = tl.arange(0, C)
    has_row = column < rows * per_kv
    step = column // per_kv
    position = first_position + step
    queries = load_queries(q, first_row + step, kv_head * per_kv + column % per_kv, has_row, num_heads, d)
    origin = bank_origin(first_position, EXTENT)
    bank_tile = bank + ((first_row.to(tl.int64) * num_heads + kv_head * per_kv) * BANK_WIDTH - origin)
    bank_offset = (step * num_heads + column % per_kv) * BANK_WIDTH + (origin - bank_origin(position, EXTENT))
    m, sums, values = empty_segment(C, DV, KEYS_ON_M)
    near = begin
    if not KEYS_ON_M and (WINDOW == 0 or EXTENT < WINDOW):  # few columns gain nothing by a loop without a bias
        near = tl.minimum(far_end(first_position, begin, EXTENT, BLOCK_KEYS), stop)
        pages, m, sums, values = _attend_range(
            begin, near, pages, queries, position, has_row, bank_tile, bank_offset, key_cache, value_cache, kv_head,
            first_key, end, page_row, first_split, part_m, part_l, part_a, segments, max_splits, columns, m, sums,
            values, num_kv, per_kv, d, C, DV, EXTENT, BANK_WIDTH, WINDOW, PAGE, SEGMENT, BLOCK_KEYS, False, KEYS_ON_M,
        )  # fmt: skip
    _, m, sums, values = _attend_range(
        near, stop, pages, queries, position, has_row, bank_tile, bank_offset, key_cache, value_cache, kv_head,
        first_key, end, page_row, first_split, part_m, part_l, part_a, segments, max_splits, columns, m, sums,
        values, num_kv, per_kv, d, C, DV, EXTENT, BANK_WIDTH, WINDOW, PAGE, SEGMENT, BLOCK_KEYS, True, KEYS_ON_M,
    )  # fmt: skip
    if stop % SEGMENT != 0:
        _store_part(
            part_m, part_l, part_a, segments, stop // SEGMENT - first_split, m, sums, values,
            max_splits, columns, num_kv, per_kv, d, C, DV, KEYS_ON_M,
        )  # fmt: skip


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
    DIMS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merges the segments that one row sees, in ascending order: DIMS of one head."""
    begin_launch(EARLY)
    sequence, offset, head = tl.program_id(2), tl.program_id(1), tl.program_id(0) // (d // DIMS)
    meta = segments + sequence * 4
    slot, first_row, first_position, rows = tl.load(meta), tl.load(meta + 1), tl.load(meta + 2), tl.load(meta + 3)
    if (slot < 0) | (offset >= rows):
        return
    per_kv: tl.constexpr = num_heads // num_kv
    position = first_position + offset
    first_split = tl.maximum(first_position - WINDOW + 1, 0) // SEGMENT if WINDOW > 0 else 0
    first_seen = tl.maximum(position - WINDOW + 1, 0) // SEGMENT - first_split if WINDOW > 0 else 0
    splits = position // SEGMENT - first_split + 1
    dim = tl.program_id(0) % (d // DIMS) * DIMS + tl.arange(0, DIMS)
    part = (sequence * num_kv + head // per_kv).to(tl.int64) * max_splits * columns
    part += offset * per_kv + head % per_kv
    one = tl.arange(0, 1)
    total_m = tl.full([1], float("-inf"), tl.float32)
    total_l, total = tl.zeros([1], tl.float32), tl.zeros([DIMS], tl.float32)
    for first in range(first_seen, splits, AT_ONCE):
        for i in tl.static_range(AT_ONCE):  # loads of one round are in flight together
            there = first + i < splits
            at = part + (first + i) * columns
            m = tl.load(part_m + at + one, mask=there, other=float("-inf"))
            l = tl.load(part_l + at + one, mask=there, other=0.0)  # noqa: E741
            a = tl.load(part_a + at * d + dim, mask=there, other=0.0)
            total_m, old, new = merge_scales(total_m, m)
            total_l = merged(total_l, old, l, new)
            total = merged(total, tl.broadcast_to(old, [DIMS]), a, tl.broadcast_to(new, [DIMS]))
    row = (first_row + offset).to(tl.int64)
    o = total * tl.broadcast_to(reciprocal(total_l), [DIMS])
    tl.store(out + (row * num_heads + head) * d + dim, o.to(out.dtype.element_ty))


@dataclass
class SegmentParts:
    """(m, l, a) of every key segment that a decode attends to, in fp32; columns are (row, head of a KV head)."""

    m: Tensor  # [S, n_kv, splits, columns]
    l: Tensor  # noqa: E741
    a: Tensor  # [S, n_kv, splits, columns, d]

    @classmethod
    def allocate(
        cls,
        heads: Heads,
        sequences: int,
        max_keys: int,
        max_rows: int,
        device: torch.device | str,
        config: AttentionConfig | None = None,
    ) -> SegmentParts:
        """For rows below position ``max_keys``, up to ``max_rows`` of each sequence."""
        splits = heads.splits(max_keys, max_rows, (config or heads.config).segment)
        shape = (sequences, heads.num_kv, splits, max_rows * heads.per_kv)

        def empty(*tail: int) -> Tensor:
            return torch.empty(*shape, *tail, dtype=torch.float32, device=device)

        return cls(empty(), empty(), empty(heads.head_dim))


def decode_launch(heads: Heads, max_rows: int, config: AttentionConfig) -> tuple[int, Launch]:
    """Columns of a tile (of several, where ``max_rows`` do not fit), and its launch."""
    if max_rows * heads.per_kv <= 16 and config.narrow.keys_on_m:
        return 16, config.narrow
    return LEAST_M, config.wide


def decode_attention(
    heads: Heads,
    q: Tensor,  # [T, n_q, d] bf16, normed, times tau
    bank: Tensor,  # [T, n_q, bank_width(R)] bf16, times tau, in key order
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
    head share its key segments (default: as many as make PROGRAMS in all); they change no bits.
    """
    config = config or heads.config
    check_operands(heads, q, bank, key_cache, value_cache, out)
    sequences, _, splits, columns = parts.m.shape
    assert columns == max_rows * heads.per_kv and sequences == segments.shape[0], (parts.m.shape, segments.shape)
    width, launch = decode_launch(heads, max_rows, config)
    tiles = triton.cdiv(max_rows, width // heads.per_kv)
    programs = programs or min(splits, triton.cdiv(PROGRAMS, heads.num_kv * tiles * sequences))
    is_early = q.is_cuda
    _segment_kernel[(programs, heads.num_kv * tiles, sequences)](
        q, bank, key_cache, value_cache, page_table, segments, parts.m, parts.l, parts.a,
        page_table.shape[1], splits, columns, **tile_constants(heads, config, key_cache.shape[2]), C=width,
        KEYS_ON_M=launch.keys_on_m, EARLY=is_early, num_warps=launch.num_warps, num_stages=launch.num_stages,
        launch_pdl=is_early, enable_fp_fusion=False,
    )  # fmt: skip
    constants = merge_constants(heads, config, splits)
    _merge_kernel[(heads.num_heads * (heads.head_dim // constants["DIMS"]), max_rows, sequences)](
        parts.m, parts.l, parts.a, segments, out, splits, columns, **constants, EARLY=is_early, num_warps=1,
        launch_pdl=is_early, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def merge_constants(heads: Heads, config: AttentionConfig, splits: int) -> dict[str, int]:
    return {
        "num_heads": heads.num_heads,
        "num_kv": heads.num_kv,
        "d": heads.head_dim,
        "WINDOW": heads.window,
        "SEGMENT": config.segment,
        "DIMS": min(heads.head_dim, MERGED_DIMS),
        "AT_ONCE": min(MERGED_AT_ONCE, triton.next_power_of_2(splits)),
    }


PARTS = {"part_m": "*fp32", "part_l": "*fp32", "part_a": "*fp32", "max_splits": "i32", "columns": "i32"}


def serving(heads: Heads, max_rows: int, config: AttentionConfig | None = None) -> Serving:
    config = config or heads.config
    width, launch = decode_launch(heads, max_rows, config)
    return Serving(
        f"decode {heads} {width} columns {config.segment}/{config.block_keys} {launch}",
        _segment_kernel,
        {**OPERANDS, **PARTS, "segments": "*i32", "pages_per_slot": "i32"},
        {
            **tile_constants(heads, config, PAGE_SIZE),
            "C": width,
            "KEYS_ON_M": launch.keys_on_m,
            "EARLY": True,
        },
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        wgmma=True,
        stack=32,  # a few biases of a block
        options={"enable_fp_fusion": False, "launch_pdl": True},
    )


def _serving_merge(heads: Heads) -> Serving:
    return Serving(
        f"merge {heads}",
        _merge_kernel,
        {**PARTS, "segments": "*i32", "out": "*bf16"},
        {**merge_constants(heads, heads.config, heads.splits(8192, 1, heads.config.segment)), "EARLY": True},
        num_warps=1,
        options={"enable_fp_fusion": False, "launch_pdl": True},
    )


SERVING = [serving(heads, max_rows) for heads in SERVING_HEADS for max_rows in (1, 5, 9)]
SERVING += [_serving_merge(heads) for heads in SERVING_HEADS[:2]]

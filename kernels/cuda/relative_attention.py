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

from kernels.cuda.compile import Serving
from kernels.cuda.relative_attention_blocks import (
    attend_block,
    by_column,
    by_key,
    column_sums,
    empty_segment,
    far_end,
    load_pages,
    load_queries,
    merge_scales,
    merged,
    reciprocal,
)

MERGED_AT_ONCE = 8  # segments whose loads are in flight together
LEAST_M = 64  # rows of the matrix instruction's M side; with fewer another instruction is chosen


@dataclass(frozen=True)
class Launch:
    """Speed alone: no bit depends on it."""

    keys_on_m: bool
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class AttentionConfig:
    """``segment`` and ``block_keys`` order a row's sums and are part of its definition."""

    segment: int = 512  # keys
    block_keys: int = 64
    narrow: Launch = Launch(True, 4, 3)  # decodes of up to 32 columns
    wide: Launch = Launch(False, 8, 3)  # and of more
    prompt: Launch = Launch(False, 8, 3)
    prompt_columns: int = 128

    def __post_init__(self) -> None:
        if self.segment % self.block_keys or self.block_keys % LEAST_M:
            raise ValueError(
                f"block_keys is {self.block_keys}; it must be a multiple of {LEAST_M} that divides {self.segment}"
            )


FULL_CONFIG = AttentionConfig()
LOCAL_CONFIG = AttentionConfig(prompt=Launch(False, 4, 2), prompt_columns=64)  # keys of the pass cost registers
CONFIGS: dict[tuple[int, bool], AttentionConfig] = {  # (head_dim, has a window)
    (d, local): LOCAL_CONFIG if local else FULL_CONFIG for d in (16, 32, 64, 128) for local in (False, True)
}


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
    tl.store(part_l + part, sums, mask=held)
    mask = by_column(held, KEYS_ON_M) & by_key(dim < d, KEYS_ON_M)
    tl.store(part_a + by_column(part * d, KEYS_ON_M) + by_key(dim, KEYS_ON_M), values, mask=mask)


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
    """(m, l, a) of the key segments ``program_id(0) + i * num_programs(0)`` of one query tile and KV head."""
    per_kv: tl.constexpr = num_heads // num_kv
    sequence, kv_head = tl.program_id(2), tl.program_id(1) % num_kv
    begin_row = tl.program_id(1) // num_kv * (C // per_kv)
    meta = segments + sequence * 4
    slot, first_row, pass_start, count = tl.load(meta), tl.load(meta + 1), tl.load(meta + 2), tl.load(meta + 3)
    rows = tl.minimum(count - begin_row, C // per_kv)
    if (slot < 0) | (rows <= 0):
        return
    column = tl.arange(0, C)
    has_row = column < rows * per_kv
    step = column // per_kv
    first_row, first_position = first_row + begin_row, pass_start + begin_row
    head = kv_head * per_kv + column % per_kv
    queries = load_queries(q, first_row + step, head, has_row, num_heads, d)
    bank_tile = bank + (first_row.to(tl.int64) * num_heads + kv_head * per_kv) * BANK_WIDTH
    bank_offset = (step.to(tl.int64) * num_heads + column % per_kv) * BANK_WIDTH + step

    page_row = page_table + slot.to(tl.int64) * pages_per_slot
    end = first_position + rows
    first_key = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW > 0 else 0
    # of all tiles of the sequence: what a tile does not see it leaves empty
    first_split = tl.maximum(pass_start - WINDOW + 1, 0) // SEGMENT if WINDOW > 0 else 0
    for split in range(first_split + tl.program_id(0), tl.cdiv(pass_start + count, SEGMENT), tl.num_programs(0)):
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
                    start, pages, queries, first_position, step, has_row, bank_tile, bank_offset,
                    key_cache, value_cache, None, None, 0, 0, kv_head, first_key, end, m, sums, values,
                    num_kv, d, DV, EXTENT, WINDOW, PAGE, BLOCK_KEYS, False, KEYS_ON_M,
                )  # fmt: skip
                pages = following
        for start in range(near, stop, BLOCK_KEYS):
            following = load_pages(page_row, start + BLOCK_KEYS, end, PAGE, BLOCK_KEYS)
            m, sums, values = attend_block(
                start, pages, queries, first_position, step, has_row, bank_tile, bank_offset,
                key_cache, value_cache, None, None, 0, 0, kv_head, first_key, end, m, sums, values,
                num_kv, d, DV, EXTENT, WINDOW, PAGE, BLOCK_KEYS, True, KEYS_ON_M,
            )  # fmt: skip
            pages = following
        _store_part(
            part_m, part_l, part_a, segments, split - first_split, m, column_sums(sums, KEYS_ON_M), values,
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
            at = part + (first + i) * columns
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
        if (self.head_dim, False) not in CONFIGS:
            raise ValueError(f"head_dim is {self.head_dim}; there are kernels for {sorted({d for d, _ in CONFIGS})}")
        if self.num_heads % self.num_kv:
            raise ValueError(f"{self.num_heads} heads do not share {self.num_kv} KV heads evenly")

    @property
    def config(self) -> AttentionConfig:
        return CONFIGS[self.head_dim, self.window > 0]

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


def tile_constants(heads: Heads, config: AttentionConfig, bank_width: int, page_size: int) -> dict[str, int]:
    """Compile-time values of the kernels that attend."""
    return {
        "num_heads": heads.num_heads,
        "num_kv": heads.num_kv,
        "d": heads.head_dim,
        "EXTENT": heads.extent,
        "BANK_WIDTH": bank_width,
        "WINDOW": heads.window,
        "PAGE": page_size,
        "SEGMENT": config.segment,
        "BLOCK_KEYS": config.block_keys,
        "DV": max(heads.head_dim, LEAST_M),
    }


def check_operands(heads: Heads, q: Tensor, bank: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
    """Kernels address by shape alone and load 16 bytes at a time."""
    rows, d = q.shape[0], heads.head_dim
    assert q.shape == (rows, heads.num_heads, d), q.shape
    assert bank.shape[:2] == q.shape[:2] and bank.shape[2] >= heads.extent, (bank.shape, heads)
    assert keys.shape == values.shape and keys.shape[1::2] == (heads.num_kv, d), (keys.shape, heads)
    assert out.shape == (rows, heads.num_heads * d), out.shape
    for x in (q, bank, keys, values, out):
        assert x.is_contiguous() and x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0, (x.shape, x.dtype)


def decode_launch(heads: Heads, max_rows: int, config: AttentionConfig) -> tuple[int, Launch]:
    """Columns of a tile (of several, where ``max_rows`` do not fit), and its launch."""
    columns = min(max(16, triton.next_power_of_2(max_rows * heads.per_kv)), LEAST_M)
    if columns <= 32 and config.narrow.keys_on_m:
        return columns, config.narrow
    return LEAST_M, config.wide


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
    config = config or heads.config
    check_operands(heads, q, bank, key_cache, value_cache, out)
    sequences, _, splits, columns = parts.m.shape
    assert columns == max_rows * heads.per_kv and sequences == segments.shape[0], (parts.m.shape, segments.shape)
    width, launch = decode_launch(heads, max_rows, config)
    tiles = triton.cdiv(max_rows, width // heads.per_kv)
    _segment_kernel[(programs or splits, heads.num_kv * tiles, sequences)](
        q, bank, key_cache, value_cache, page_table, segments, parts.m, parts.l, parts.a,
        page_table.shape[1], splits, columns, **tile_constants(heads, config, bank.shape[2], key_cache.shape[2]),
        C=width, KEYS_ON_M=launch.keys_on_m, num_warps=launch.num_warps, num_stages=launch.num_stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    _merge_kernel[(heads.num_heads, max_rows, sequences)](
        parts.m, parts.l, parts.a, segments, out, splits, columns, heads.num_heads, heads.num_kv, heads.head_dim,
        WINDOW=heads.window, SEGMENT=config.segment, AT_ONCE=MERGED_AT_ONCE, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


SERVING_HEADS = [
    Heads(32, 8, 128, extent=1024),
    Heads(32, 8, 128, extent=512, window=512),
    Heads(64, 8, 128, extent=1024),
    Heads(64, 16, 128, extent=512, window=512),
    Heads(4, 1, 128, extent=1024),
    Heads(4, 1, 128, extent=512, window=512),
    Heads(32, 8, 64, extent=1024),
]
OPERANDS = {"q": "*bf16", "bank": "*bf16", "key_cache": "*bf16", "value_cache": "*bf16", "page_table": "*i32"}
PARTS = {"part_m": "*fp32", "part_l": "*fp32", "part_a": "*fp32", "max_splits": "i32", "columns": "i32"}
PAGE_SIZE = 64  # positions, as served


def _serving(heads: Heads, max_rows: int) -> Serving:
    width, launch = decode_launch(heads, max_rows, heads.config)
    return Serving(
        f"decode {heads} {width} columns",
        _segment_kernel,
        {**OPERANDS, **PARTS, "segments": "*i32", "pages_per_slot": "i32"},
        {**tile_constants(heads, heads.config, heads.extent, PAGE_SIZE), "C": width, "KEYS_ON_M": launch.keys_on_m},
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        wgmma=True,
        options={"enable_fp_fusion": False},
    )


def _serving_merge(heads: Heads) -> Serving:
    constants = {"num_heads": heads.num_heads, "num_kv": heads.num_kv, "d": heads.head_dim, "WINDOW": heads.window}
    return Serving(
        f"merge {heads}",
        _merge_kernel,
        {**PARTS, "segments": "*i32", "out": "*bf16"},
        {**constants, "SEGMENT": heads.config.segment, "AT_ONCE": MERGED_AT_ONCE},
        num_warps=1,
        options={"enable_fp_fusion": False},
    )


SERVING = [_serving(heads, max_rows) for heads in SERVING_HEADS for max_rows in (1, 5, 9)]
SERVING += [_serving_merge(heads) for heads in SERVING_HEADS[:2]]

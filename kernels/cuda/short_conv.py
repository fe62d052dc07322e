"""Short convolution over pages, the residual addition behind it and the norm that follows, in one kernel.

    y_t = u_t + sum_{j=0..3} w_j * u_{t-3+j}      x_t <- x_t + y_t      out_t = norm(x_t)

y and the sum are rounded, products and additions are separate operations in this order: ((w_0 u_{t-3} + w_1 u_{t-2})
+ w_2 u_{t-1}) + w_3 u_t, + u_t. Inputs of the same pass come from the pass, older ones from the cache.

A program walks over ROWS consecutive rows with the last three inputs, the taps and the norm's weight in registers, so
each input is read once; STAGES rows are on their way at once. A row is in all threads, whatever ROWS is: no bit depends
on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.compile import Serving
from kernels.cuda.early_launch import begin_launch
from kernels.cuda.norm import (
    MANY_ROWS,
    NormConfig,
    check_rows,
    constants,
    normed_rows,
    options,
    placed,
    row_warps,
)
from kernels.cuda.rows_meta import Rows, page_place

HISTORY = 3  # older inputs of a row


@dataclass(frozen=True)
class ConvConfig(NormConfig):
    stages: int = 1  # rows of a program that are on their way at once


CONFIGS: dict[int, ConvConfig] = {  # by width, from MANY_ROWS rows on; fewer rows have a program each
    2048: ConvConfig(8, 8, max_registers=64, is_early=True, stages=4),
    4096: ConvConfig(8, 8, is_early=True, stages=4),
    6144: ConvConfig(16, 8, is_early=True, stages=4),
}


def conv_config(width: int, num_rows: int) -> ConvConfig:
    """The committed configuration of a width."""
    config = CONFIGS.get(width) or ConvConfig(row_warps(width))
    return config if num_rows >= MANY_ROWS else ConvConfig(config.num_warps)


@triton.jit
def older_input(
    u, stride, cache, cache_stride, pages, row, slot, position, offset, channel, mask, pages_per_slot,
    LAG: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Input LAG positions before ``row``: of this pass, of the cache, or 0 before the sequence begins."""
    in_pass = offset >= LAG
    in_cache = (offset < LAG) & (position >= LAG) & (slot >= 0)
    place = page_place(pages, slot, tl.maximum(position - LAG, 0), pages_per_slot, PAGE_SIZE, in_cache)
    source = tl.where(in_pass, u + (row - LAG) * stride, cache + place * cache_stride)
    return tl.load(source + channel, mask=mask & (in_pass | in_cache), other=0)


@triton.jit
def _older_inputs(
    u, stride, cache, cache_stride, pages, row, slot, position, offset, channel, mask, pages_per_slot,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Inputs 3, 2 and 1 positions before ``row``."""
    old_3 = older_input(
        u, stride, cache, cache_stride, pages, row, slot, position, offset, channel, mask, pages_per_slot, 3, PAGE_SIZE
    )  # fmt: skip
    old_2 = older_input(
        u, stride, cache, cache_stride, pages, row, slot, position, offset, channel, mask, pages_per_slot, 2, PAGE_SIZE
    )  # fmt: skip
    old_1 = older_input(
        u, stride, cache, cache_stride, pages, row, slot, position, offset, channel, mask, pages_per_slot, 1, PAGE_SIZE
    )  # fmt: skip
    return old_3, old_2, old_1


@triton.jit
def widened(pairs):
    """int32 [1, N / 2], two bf16 in each -> fp32 [1, N]: a shift or a mask a value."""
    low = (pairs << 16).to(tl.float32, bitcast=True)
    high = (pairs & -65536).to(tl.float32, bitcast=True)
    return tl.interleave(low, high)


@triton.jit
def _tapped(b_u, old_1, old_2, old_3, tap_0, tap_1, tap_2, tap_3):
    """y of a row from its input, the three before it and the taps, all fp32."""
    return old_3 * tap_0 + old_2 * tap_1 + old_1 * tap_2 + b_u * tap_3 + b_u


@triton.jit
def _tap(taps, lag_from_oldest, channels, channel, mask):
    return tl.load(taps + lag_from_oldest * channels + channel, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def convolved(
    b_u, u, stride, taps, cache, channels, pages, row, slot, position, offset, channel, mask, pages_per_slot,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """fp32 y of ``row``, whose input is ``b_u``. Taps and older inputs of this pass come from the first-level cache."""
    old_3, old_2, old_1 = _older_inputs(
        u, stride, cache, channels, pages, row, slot, position, offset, channel, mask, pages_per_slot, PAGE_SIZE
    )  # fmt: skip
    return _tapped(
        b_u.to(tl.float32), old_1.to(tl.float32), old_2.to(tl.float32), old_3.to(tl.float32),
        _tap(taps, 0, channels, channel, mask), _tap(taps, 1, channels, channel, mask),
        _tap(taps, 2, channels, channel, mask), _tap(taps, 3, channels, channel, mask),
    )  # fmt: skip


@triton.jit
def _vector(source, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """WIDTH values from element ``first`` on as they lie in memory, fp32 or pairs of bf16; they stay in the caches."""
    if source.dtype.element_ty == tl.int32:
        pair = tl.arange(0, BLOCK // 2)[None, :]
        return tl.load(
            source + first // 2 + pair, mask=pair < WIDTH // 2, other=0, eviction_policy="evict_last"
        )
    else:
        channel = tl.arange(0, BLOCK)[None, :]
        return tl.load(
            source + first + channel, mask=channel < WIDTH, other=0.0, eviction_policy="evict_last"
        )


@triton.jit
def _wide(vector, IN_LOOP: tl.constexpr):
    """A ``_vector`` in fp32. IN_LOOP: widened for every row anew, as pairs take half the registers."""
    if vector.dtype == tl.int32:
        if IN_LOOP:  # else the compiler takes it out of the loop
            vector = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [vector], dtype=tl.int32, is_pure=False, pack=1
            )
        vector = widened(vector)
    return vector


@triton.jit(do_not_specialize=["num_rows", "pages_per_slot", "keep_rows"])
def _conv_add_kernel(
    u, x, taps, cache, weight, out, slots, positions, offsets, from_ends, pages, eps, num_rows, pages_per_slot,
    keep_rows,
    HAS_NORM: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """u, cache and, of bf16, taps and weight: int32, two bf16 in each. x, out: bf16."""
    PAIRS: tl.constexpr = WIDTH // 2
    channel, pair = tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK // 2)[None, :]
    is_channel, is_pair = channel < WIDTH, pair < PAIRS
    first = tl.program_id(0).to(tl.int64) * ROWS
    tap_0, tap_1 = _vector(taps, 0, WIDTH, BLOCK), _vector(taps, WIDTH, WIDTH, BLOCK)
    tap_2, tap_3 = _vector(taps, 2 * WIDTH, WIDTH, BLOCK), _vector(taps, 3 * WIDTH, WIDTH, BLOCK)
    norm = _vector(weight, 0, WIDTH, BLOCK) if HAS_NORM else 0
    begin_launch(EARLY)
    old_1 = tl.zeros((1, BLOCK // 2), tl.int32)
    old_2, old_3 = old_1, old_1
    if ROWS > 1:  # of the pass; rows that need others ask for them below
        old_1 = tl.load(u + tl.maximum(first - 1, 0) * PAIRS + pair, mask=is_pair, other=0)
        old_2 = tl.load(u + tl.maximum(first - 2, 0) * PAIRS + pair, mask=is_pair, other=0)
        old_3 = tl.load(u + tl.maximum(first - 3, 0) * PAIRS + pair, mask=is_pair, other=0)
    for row in tl.range(first, tl.minimum(first + ROWS, num_rows), num_stages=STAGES):
        b_u = tl.load(u + row * PAIRS + pair, mask=is_pair, other=0)
        b_x = tl.load(x + row * WIDTH + channel, mask=is_channel, other=0.0)
        slot, position, offset = tl.load(slots + row), tl.load(positions + row), tl.load(offsets + row)
        is_kept = tl.load(from_ends + row) <= keep_rows  # a later pass reads it
        if slot >= 0:  # else padding
            if (offset < 3) | (ROWS == 1):
                old_3, old_2, old_1 = _older_inputs(
                    u, PAIRS, cache, PAIRS, pages, row, slot, position, offset, pair, is_pair, pages_per_slot,
                    PAGE_SIZE,
                )  # fmt: skip
            y = _tapped(
                widened(b_u), widened(old_1), widened(old_2), widened(old_3), _wide(tap_0, STAGES > 1),
                _wide(tap_1, STAGES > 1), _wide(tap_2, STAGES > 1), _wide(tap_3, STAGES > 1),
            )  # fmt: skip
            b_sum = (b_x.to(tl.float32) + y.to(b_x.dtype).to(tl.float32)).to(b_x.dtype)
            tl.store(x + row * WIDTH + channel, b_sum, mask=is_channel)
            if HAS_NORM:
                b_out = normed_rows(b_sum.to(tl.float32), _wide(norm, STAGES > 1), eps, WIDTH)
                tl.store(out + row * WIDTH + channel, b_out.to(b_x.dtype), mask=is_channel)
            if is_kept:
                place = page_place(pages, slot, position, pages_per_slot, PAGE_SIZE, True)
                tl.store(cache + place * PAIRS + pair, b_u, mask=is_pair)
        old_3, old_2, old_1 = old_2, old_1, b_u


def _pairs(x: Tensor | None) -> Tensor | None:
    """bf16 values seen as int32, two in each; others as they are."""
    return x.view(torch.int32) if x is not None and x.dtype is torch.bfloat16 else x


def short_conv_add_norm(
    u: Tensor,  # [T, H] inputs of this pass
    x: Tensor,  # [T, H] residual stream, updated in place
    taps: Tensor,  # [4, H] bf16 or fp32
    cache: Tensor,  # [slots, H] inputs; slot = page * page_size + offset
    rows: Rows,
    pages: Tensor,  # int32 [sequence slots, pages of one sequence]
    page_size: int,
    keep_after: int,
    weight: Tensor | None = None,  # [H] of the norm that follows; None: no norm
    eps: float = 0.0,
    out: Tensor | None = None,  # [T, H] the norm
    config: ConvConfig | None = None,
    early: bool = False,
) -> None:
    """``x += conv(u)``; ``out = norm(x)``; rows with from_end <= 3 + keep_after leave their input in ``cache``.

    Padding rows change nothing, neither in ``x`` and ``out`` nor in ``cache``.
    """
    num_rows, width = x.shape
    assert u.shape == x.shape and rows.num_rows == num_rows and taps.shape == (4, width), (
        u.shape,
        taps.shape,
    )
    assert (weight is None) == (out is None), "weight and out go together"
    assert u.dtype == x.dtype == cache.dtype == torch.bfloat16 and pages.dtype == torch.int32, (
        u.dtype,
        cache.dtype,
        pages.dtype,
    )
    check_rows(width, u, x, taps, cache, weight, out)
    config = config or conv_config(width, num_rows)
    config = placed(replace(config, is_early=True) if early else config, x)
    _conv_add_kernel[(triton.cdiv(num_rows, config.rows),)](
        _pairs(u), x, _pairs(taps), _pairs(cache), _pairs(weight), out, rows.slot, rows.position,
        rows.offset, rows.from_end, pages, eps, num_rows, pages.shape[1], HISTORY + keep_after,
        HAS_NORM=weight is not None, PAGE_SIZE=page_size, STAGES=config.stages if x.is_cuda else 1,
        **constants(width, config), **options(config),
    )  # fmt: skip


def serving(width: int, has_norm: bool, config: ConvConfig) -> Serving:
    pointers = dict.fromkeys(["u", "taps", "cache"], "*i32") | {"x": "*bf16"}
    rows = dict.fromkeys(["slots", "positions", "offsets", "from_ends", "pages"], "*i32")
    numbers = dict.fromkeys(["num_rows", "pages_per_slot", "keep_rows"], "i32") | {"eps": "fp32"}
    normed = {"weight": "*i32", "out": "*bf16"} if has_norm else {}
    values = {} if has_norm else {"weight": None, "out": None}
    values |= {"HAS_NORM": has_norm, "PAGE_SIZE": 16, "STAGES": config.stages, **constants(width, config)}
    others = options(config)
    warps = others.pop("num_warps")
    name = f"short_conv_add{'_norm' * has_norm} {width}, {config.rows} rows{', early' * config.is_early}"
    return Serving(
        name, _conv_add_kernel, pointers | normed | rows | numbers, values, num_warps=warps, options=others
    )


SERVING = [
    serving(width, has_norm, conv_config(width, num_rows))
    for width in (1024, 2048, 4096, 6144)
    for has_norm in (True, False)
    for num_rows in (1, MANY_ROWS)
]
SERVING += [serving(2048, True, replace(conv_config(2048, 1), is_early=True))]

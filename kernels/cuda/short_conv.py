"""Short convolution over pages, the residual addition behind it and the norm that follows, in one kernel.

    y_t = u_t + sum_{j=0..3} w_j * u_{t-3+j}      x_t <- x_t + y_t      out_t = norm(x_t)

y and the sum are rounded, products and additions are separate operations in this order: ((w_0 u_{t-3} + w_1 u_{t-2})
+ w_2 u_{t-1}) + w_3 u_t, + u_t. Inputs of the same pass come from the pass, older ones from the cache.

A program owns ROWS consecutive rows and asks for all of their inputs at once; each input is the newest of one row and
an older one of the three rows behind it. Taps and weight are read once a program. A row is in all threads, whatever
ROWS is: no bit depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.compile import Serving
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
from kernels.cuda.weight_tiles import begin_launch

HISTORY = 3  # older inputs of a row


@dataclass(frozen=True)
class ConvConfig(NormConfig):
    taps_held: bool = False  # in registers, for all rows of a program; else read again for each


CONFIGS: dict[int, ConvConfig] = {  # by width
    2048: ConvConfig(4, 2, taps_held=True),
    4096: ConvConfig(8, 2, taps_held=True),
    6144: ConvConfig(16, 2, taps_held=True),
}


def conv_config(width: int, num_rows: int) -> ConvConfig:
    """The committed configuration of a width; few rows want every program they can have."""
    config = CONFIGS.get(width) or ConvConfig(row_warps(width))
    return config if num_rows >= MANY_ROWS else replace(config, rows=1)


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
def _wide(source, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """fp32 [1, BLOCK]: WIDTH values from element ``first`` on, fp32 or pairs of bf16; they stay in the caches."""
    if source.dtype.element_ty == tl.int32:
        pair = tl.arange(0, BLOCK // 2)[None, :]
        mask = pair < WIDTH // 2
        return widened(tl.load(source + first // 2 + pair, mask=mask, other=0, eviction_policy="evict_last"))
    else:
        channel = tl.arange(0, BLOCK)[None, :]
        mask = channel < WIDTH
        return tl.load(source + first + channel, mask=mask, other=0.0, eviction_policy="evict_last").to(
            tl.float32
        )


@triton.jit
def _all_taps(taps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The four taps, for the oldest input first."""
    return (
        _wide(taps, 0, WIDTH, BLOCK), _wide(taps, WIDTH, WIDTH, BLOCK), _wide(taps, 2 * WIDTH, WIDTH, BLOCK),
        _wide(taps, 3 * WIDTH, WIDTH, BLOCK),
    )  # fmt: skip


@triton.jit
def _finish_row(
    x, out, row, b_x, b_u, old_1, old_2, old_3, taps, weight, eps, held,
    HAS_NORM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Adds and norms one row. ``held``: taps and weight in fp32, where HELD."""
    channel = tl.arange(0, BLOCK)[None, :]
    mask = channel < WIDTH
    tap_0, tap_1, tap_2, tap_3 = (
        (held[0], held[1], held[2], held[3]) if HELD else _all_taps(taps, WIDTH, BLOCK)
    )
    y = _tapped(widened(b_u), widened(old_1), widened(old_2), widened(old_3), tap_0, tap_1, tap_2, tap_3)
    b_sum = (b_x.to(tl.float32) + y.to(b_x.dtype).to(tl.float32)).to(b_x.dtype)
    tl.store(x + row * WIDTH + channel, b_sum, mask=mask)
    if HAS_NORM:
        norm = held[4] if HELD else _wide(weight, 0, WIDTH, BLOCK)
        b_out = normed_rows(b_sum.to(tl.float32), norm, eps, WIDTH)
        tl.store(out + row * WIDTH + channel, b_out.to(b_x.dtype), mask=mask)


@triton.jit
def _any_row(
    u, x, taps, cache, weight, out, slots, positions, offsets, from_ends, pages, eps, row, pages_per_slot, keep_rows,
    HAS_NORM: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row whose older inputs may be those of the cache, and whose own may have to be kept there."""
    PAIRS: tl.constexpr = WIDTH // 2
    channel, pair = tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK // 2)[None, :]
    mask = pair < PAIRS
    slot, position, offset = tl.load(slots + row), tl.load(positions + row), tl.load(offsets + row)
    if slot >= 0:
        b_u = tl.load(u + row * PAIRS + pair, mask=mask, other=0)
        b_x = tl.load(x + row * WIDTH + channel, mask=channel < WIDTH, other=0.0)
        old_3, old_2, old_1 = _older_inputs(
            u, PAIRS, cache, PAIRS, pages, row, slot, position, offset, pair, mask, pages_per_slot, PAGE_SIZE
        )  # fmt: skip
        _finish_row(
            x, out, row, b_x, b_u, old_1, old_2, old_3, taps, weight, eps, 0, HAS_NORM, WIDTH, BLOCK, False
        )  # fmt: skip
        if tl.load(from_ends + row) <= keep_rows:
            place = page_place(pages, slot, position, pages_per_slot, PAGE_SIZE, True)
            tl.store(cache + place * PAIRS + pair, b_u, mask=mask)


@triton.jit
def _inner_rows(
    u, x, taps, weight, out, eps, first,
    HAS_NORM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one segment whose older inputs are all of this pass. All of them are on their way at once."""
    channel, pair = tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK // 2)[None, :]
    inputs, residuals = (), ()
    for i in tl.static_range(ROWS + 3):
        inputs = inputs + (
            tl.load(u + (first + i - 3) * (WIDTH // 2) + pair, mask=pair < WIDTH // 2, other=0),
        )
    for i in tl.static_range(ROWS):
        residuals = residuals + (tl.load(x + (first + i) * WIDTH + channel, mask=channel < WIDTH, other=0.0),)
    held = 0
    if HELD:
        held = _all_taps(taps, WIDTH, BLOCK)
        if HAS_NORM:
            held = held + (_wide(weight, 0, WIDTH, BLOCK),)
    for i in tl.static_range(ROWS):
        _finish_row(
            x, out, first + i, residuals[i], inputs[i + 3], inputs[i + 2], inputs[i + 1], inputs[i], taps, weight, eps,
            held, HAS_NORM, WIDTH, BLOCK, HELD,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "pages_per_slot", "keep_rows"])
def _conv_add_kernel(
    u, x, taps, cache, weight, out, slots, positions, offsets, from_ends, pages, eps, num_rows, pages_per_slot,
    keep_rows,
    HAS_NORM: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """u, cache and, of bf16, taps and weight: int32, two bf16 in each. x, out: bf16."""
    begin_launch(EARLY)
    first = tl.program_id(0).to(tl.int64) * ROWS
    is_inner = False
    if ROWS > 1:
        last = first + ROWS - 1
        offset = tl.load(offsets + first)
        is_inner = (offset >= 3) & (
            tl.load(offsets + last, mask=last < num_rows, other=0) == offset + ROWS - 1
        )
        is_inner = is_inner & (tl.load(from_ends + last, mask=last < num_rows, other=0) > keep_rows)
    if is_inner:
        _inner_rows(u, x, taps, weight, out, eps, first, HAS_NORM, WIDTH, BLOCK, ROWS, HELD)
    else:
        for row in range(first, tl.minimum(first + ROWS, num_rows)):
            _any_row(
                u, x, taps, cache, weight, out, slots, positions, offsets, from_ends, pages, eps, row,
                pages_per_slot, keep_rows, HAS_NORM, PAGE_SIZE, WIDTH, BLOCK,
            )  # fmt: skip


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
    config = placed(config or conv_config(width, num_rows), x)
    _conv_add_kernel[(triton.cdiv(num_rows, config.rows),)](
        _pairs(u), x, _pairs(taps), _pairs(cache), _pairs(weight), out, rows.slot, rows.position,
        rows.offset, rows.from_end, pages, eps, num_rows, pages.shape[1], HISTORY + keep_after,
        HAS_NORM=weight is not None, PAGE_SIZE=page_size, HELD=config.taps_held, **constants(width, config),
        **options(config),
    )  # fmt: skip


def serving(width: int, has_norm: bool, config: ConvConfig) -> Serving:
    pointers = dict.fromkeys(["u", "taps", "cache"], "*i32") | {"x": "*bf16"}
    rows = dict.fromkeys(["slots", "positions", "offsets", "from_ends", "pages"], "*i32")
    numbers = dict.fromkeys(["num_rows", "pages_per_slot", "keep_rows"], "i32") | {"eps": "fp32"}
    normed = {"weight": "*i32", "out": "*bf16"} if has_norm else {}
    values = {} if has_norm else {"weight": None, "out": None}
    values |= {"HAS_NORM": has_norm, "PAGE_SIZE": 16, "HELD": config.taps_held, **constants(width, config)}
    others = options(config)
    warps = others.pop("num_warps")
    name = f"short_conv_add{'_norm' * has_norm} {width}, {config.rows} rows"
    return Serving(
        name, _conv_add_kernel, pointers | normed | rows | numbers, values, num_warps=warps, options=others
    )


SERVING = [
    serving(width, has_norm, conv_config(width, num_rows))
    for width in (1024, 2048, 4096, 6144)
    for has_norm in (True, False)
    for num_rows in (1, MANY_ROWS)
]

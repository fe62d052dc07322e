"""Short convolution over pages, the residual addition behind it and the norm that follows, in one kernel.

    y_t = u_t + sum_{j=0..3} w_j * u_{t-3+j}      x_t <- x_t + y_t      out_t = norm(x_t)

y and the sum are rounded, products and additions are separate operations in this order: ((w_0 u_{t-3} + w_1 u_{t-2})
+ w_2 u_{t-1}) + w_3 u_t, + u_t. Inputs of the same pass come from the pass, older ones from the cache.

A program owns a run of rows: the inputs of the next rows are on their way to shared memory while one is in work, its
older inputs stay in registers, the taps in the first-level cache. The length of the run is a run-time argument of one
binary per width: it cannot change a bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.compile import Serving
from kernels.cuda.norm import check_rows, normed_row, row_block, row_warps
from kernels.cuda.rows_meta import Rows, page_place

HISTORY = 3  # older inputs of a row


@dataclass(frozen=True)
class ConvConfig:
    """How one width is launched. Warps order the sum of the norm; the rest changes no bit."""

    num_warps: int
    programs: int  # that a long pass is spread over
    stages: int = 3  # rows in flight, the one in work included
    max_registers: int | None = None


CONFIGS: dict[int, ConvConfig] = {  # by width; 132 processors
    2048: ConvConfig(4, 132 * 4, 4, 128),
    4096: ConvConfig(8, 132 * 2, 3, 128),
    6144: ConvConfig(8, 132, 4),
}


def conv_config(width: int) -> ConvConfig:
    """The committed configuration of a width, or one for about 16 elements a thread."""
    warps = row_warps(width)
    return CONFIGS.get(width) or ConvConfig(warps, 132 * 16 // warps)


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
    return tl.load(source + channel, mask=mask & (in_pass | in_cache), other=0.0)


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
def _tapped(b_u, old_1, old_2, old_3, taps, channels, channel, mask):
    """fp32 y of a row from its input and the three before it."""
    total = old_3.to(tl.float32) * tl.load(taps + channel, mask=mask, other=0.0).to(tl.float32)
    total += old_2.to(tl.float32) * tl.load(taps + channels + channel, mask=mask, other=0.0).to(tl.float32)
    total += old_1.to(tl.float32) * tl.load(taps + 2 * channels + channel, mask=mask, other=0.0).to(
        tl.float32
    )
    total += b_u.to(tl.float32) * tl.load(taps + 3 * channels + channel, mask=mask, other=0.0).to(tl.float32)
    return total + b_u.to(tl.float32)


@triton.jit
def convolved(
    b_u, u, stride, taps, cache, channels, pages, row, slot, position, offset, channel, mask, pages_per_slot,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """fp32 y of ``row``, whose input is ``b_u``. Taps and older inputs of this pass come from the first-level cache."""
    old_3, old_2, old_1 = _older_inputs(
        u, stride, cache, channels, pages, row, slot, position, offset, channel, mask, pages_per_slot, PAGE_SIZE
    )  # fmt: skip
    return _tapped(b_u, old_1, old_2, old_3, taps, channels, channel, mask)


@triton.jit
def _row_meta(slots, positions, offsets, from_ends, row, is_inside):
    """(slot, position, offset, rows to the end) of ``row``; beyond the run, of no row."""
    return (
        tl.load(slots + row, mask=is_inside, other=-1),
        tl.load(positions + row, mask=is_inside, other=0),
        tl.load(offsets + row, mask=is_inside, other=0),
        tl.load(from_ends + row, mask=is_inside, other=0),
    )


@triton.jit(do_not_specialize=["num_rows", "run", "pages_per_slot", "keep_rows"])
def _conv_add_kernel(
    u, x, taps, cache, weight, out, slots, positions, offsets, from_ends, pages, eps,
    num_rows, run, pages_per_slot, keep_rows,
    HAS_NORM: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, BLOCK)
    mask = channel < WIDTH
    first = tl.program_id(0).to(tl.int64) * run
    count = tl.minimum(run, num_rows - first)
    old_3 = tl.zeros((BLOCK,), u.dtype.element_ty)
    old_2, old_1 = old_3, old_3
    slot, position, offset, from_end = _row_meta(slots, positions, offsets, from_ends, first, count > 0)
    for index in tl.range(0, count, num_stages=STAGES):
        row = first + index
        b_u = tl.load(u + row * WIDTH + channel, mask=mask, other=0.0)
        b_x = tl.load(x + row * WIDTH + channel, mask=mask, other=0.0)
        following = _row_meta(slots, positions, offsets, from_ends, row + 1, index + 1 < count)
        if slot >= 0:  # loads of a branch are not copied ahead: taps and weight stay in the first-level cache
            if (index == 0) | (offset == 0):  # otherwise the row before left them
                old_3, old_2, old_1 = _older_inputs(
                    u, WIDTH, cache, WIDTH, pages, row, slot, position, offset, channel, mask, pages_per_slot,
                    PAGE_SIZE,
                )  # fmt: skip
            b_y = _tapped(b_u, old_1, old_2, old_3, taps, WIDTH, channel, mask).to(b_x.dtype)
            b_sum = (b_x.to(tl.float32) + b_y.to(tl.float32)).to(b_x.dtype)
            tl.store(x + row * WIDTH + channel, b_sum, mask=mask)
            if HAS_NORM:
                b_norm = tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
                b_out = normed_row(b_sum.to(tl.float32), b_norm, eps, WIDTH)
                tl.store(out + row * WIDTH + channel, b_out.to(b_x.dtype), mask=mask)
            if from_end <= keep_rows:
                place = page_place(pages, slot, position, pages_per_slot, PAGE_SIZE, True)
                tl.store(cache + place * WIDTH + channel, b_u, mask=mask)
            old_3, old_2, old_1 = old_2, old_1, b_u
        slot, position, offset, from_end = following


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
    assert u.dtype == x.dtype == cache.dtype and pages.dtype == torch.int32, (
        u.dtype,
        cache.dtype,
        pages.dtype,
    )
    check_rows(width, u, x, taps, cache, weight, out)
    config = config or conv_config(width)
    run = triton.cdiv(num_rows, config.programs)  # rows of one program
    _conv_add_kernel[(triton.cdiv(num_rows, run),)](
        u, x, taps, cache, weight, out, rows.slot, rows.position, rows.offset, rows.from_end, pages, eps,
        num_rows, run, pages.shape[1], HISTORY + keep_after,
        HAS_NORM=weight is not None, PAGE_SIZE=page_size, WIDTH=width, BLOCK=row_block(width),
        STAGES=config.stages, num_warps=config.num_warps, maxnreg=config.max_registers, enable_fp_fusion=False,
    )  # fmt: skip


def _serving(width: int, has_norm: bool) -> Serving:
    pointers = dict.fromkeys(["u", "x", "taps", "cache"], "*bf16")
    rows = dict.fromkeys(["slots", "positions", "offsets", "from_ends", "pages"], "*i32")
    numbers = dict.fromkeys(["num_rows", "run", "pages_per_slot", "keep_rows"], "i32") | {"eps": "fp32"}
    normed = {"weight": "*bf16", "out": "*bf16"} if has_norm else {}
    absent = {} if has_norm else {"weight": None, "out": None}
    config = conv_config(width)
    constants = {"HAS_NORM": has_norm, "PAGE_SIZE": 16, "WIDTH": width, "BLOCK": row_block(width)}
    constants["STAGES"] = config.stages
    options = {"enable_fp_fusion": False, "maxnreg": config.max_registers}
    return Serving(
        f"short_conv_add{'_norm' * has_norm} {width}", _conv_add_kernel, pointers | normed | rows | numbers,
        absent | constants, num_warps=config.num_warps, options=options,
    )  # fmt: skip


SERVING = [_serving(width, has_norm) for width in (1024, 2048, 4096, 6144) for has_norm in (True, False)]

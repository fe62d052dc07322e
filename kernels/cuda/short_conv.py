"""Short convolution over pages, the residual addition behind it and the norm that follows, in one kernel.

    y_t = u_t + sum_{j=0..3} w_j * u_{t-3+j}      x_t <- x_t + y_t      out_t = norm(x_t)

y and the sum are rounded, products and additions are separate operations in this order: ((w_0 u_{t-3} + w_1 u_{t-2})
+ w_2 u_{t-1}) + w_3 u_t, + u_t. Inputs of the same pass come from the pass, older ones from the cache.

A program owns a run of rows and keeps the taps and the last three inputs in registers. The length of the run is a
run-time argument of one binary per width, so it cannot change a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.norm import check_rows, normed_row, row_block, row_warps
from kernels.cuda.rows_meta import Rows, page_place

HISTORY = 3  # older inputs of a row
# Programs of the whole device that a long pass is spread over, per width.
CONFIGS: dict[tuple[str, int], int] = {}
_PROCESSORS = 132  # of an H200


def rows_per_program(op: str, num_rows: int, width: int) -> int:
    """Rows of one program: one while the device has room, then as many as make one wave."""
    programs = CONFIGS.get((op, width)) or _PROCESSORS * (2 if width <= 4096 else 1)
    return max(1, -(-num_rows // programs))


@triton.jit
def older_input(
    u, stride, cache, cache_stride, pages, row, slot, position, offset, channel, mask, pages_per_slot,
    LAG: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Input LAG positions before ``row``: of this pass, of the cache, or 0 before the sequence begins."""
    in_pass = offset >= LAG
    in_cache = (offset < LAG) & (position >= LAG) & (slot >= 0)
    place = page_place(pages, slot, tl.maximum(position - LAG, 0), pages_per_slot, PAGE_SIZE, in_cache)
    b_pass = tl.load(u + (row - LAG) * stride + channel, mask=mask & in_pass, other=0.0)
    b_cache = tl.load(cache + place * cache_stride + channel, mask=mask & in_cache, other=0.0)
    return tl.where(in_pass, b_pass, b_cache)


@triton.jit
def convolved(b_u3, b_u2, b_u1, b_u, b_w0, b_w1, b_w2, b_w3):
    """Inputs, oldest first, and taps -> fp32 y."""
    total = b_u3.to(tl.float32) * b_w0.to(tl.float32)
    total += b_u2.to(tl.float32) * b_w1.to(tl.float32)
    total += b_u1.to(tl.float32) * b_w2.to(tl.float32)
    total += b_u.to(tl.float32) * b_w3.to(tl.float32)
    return total + b_u.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "run", "pages_per_slot", "keep_rows"])
def _conv_add_kernel(
    u, x, taps, cache, weight, out, slots, positions, offsets, from_ends, pages, eps,
    num_rows, run, pages_per_slot, keep_rows,
    HAS_NORM: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, BLOCK)
    mask = channel < WIDTH
    first = tl.program_id(0).to(tl.int64) * run
    count = tl.minimum(run, num_rows - first)
    b_w0 = tl.load(taps + channel, mask=mask, other=0.0)
    b_w1 = tl.load(taps + WIDTH + channel, mask=mask, other=0.0)
    b_w2 = tl.load(taps + 2 * WIDTH + channel, mask=mask, other=0.0)
    b_w3 = tl.load(taps + 3 * WIDTH + channel, mask=mask, other=0.0)
    if HAS_NORM:
        b_norm = tl.load(weight + channel, mask=mask, other=0.0)
    base = first * WIDTH
    next_u = tl.load(u + base + channel, mask=mask, other=0.0)
    next_x = tl.load(x + base + channel, mask=mask, other=0.0)
    b_u1 = tl.zeros((BLOCK,), u.dtype.element_ty)
    b_u2, b_u3 = b_u1, b_u1
    for index in range(0, count):
        row = first + index
        b_u, b_x = next_u, next_x
        ahead = mask & (index + 1 < count)  # loaded one row early, to keep the memory busy during the norm
        next_u = tl.load(u + (row + 1) * WIDTH + channel, mask=ahead, other=0.0)
        next_x = tl.load(x + (row + 1) * WIDTH + channel, mask=ahead, other=0.0)
        slot, position = tl.load(slots + row), tl.load(positions + row)
        offset, from_end = tl.load(offsets + row), tl.load(from_ends + row)
        if (index == 0) | (offset == 0):
            b_u1 = older_input(
                u, WIDTH, cache, WIDTH, pages, row, slot, position, offset, channel, mask, pages_per_slot, 1, PAGE_SIZE
            )  # fmt: skip
            b_u2 = older_input(
                u, WIDTH, cache, WIDTH, pages, row, slot, position, offset, channel, mask, pages_per_slot, 2, PAGE_SIZE
            )  # fmt: skip
            b_u3 = older_input(
                u, WIDTH, cache, WIDTH, pages, row, slot, position, offset, channel, mask, pages_per_slot, 3, PAGE_SIZE
            )  # fmt: skip
        held = mask & (slot >= 0)
        b_y = convolved(b_u3, b_u2, b_u1, b_u, b_w0, b_w1, b_w2, b_w3).to(b_x.dtype)
        b_sum = (b_x.to(tl.float32) + b_y.to(tl.float32)).to(b_x.dtype)
        tl.store(x + row * WIDTH + channel, b_sum, mask=held)
        if HAS_NORM:
            b_out = normed_row(b_sum.to(tl.float32), b_norm.to(tl.float32), eps, WIDTH)
            tl.store(out + row * WIDTH + channel, b_out.to(b_x.dtype), mask=held)
        kept = (slot >= 0) & (from_end <= keep_rows)
        place = page_place(pages, slot, position, pages_per_slot, PAGE_SIZE, kept)
        tl.store(cache + place * WIDTH + channel, b_u, mask=mask & kept)
        b_u3, b_u2, b_u1 = b_u2, b_u1, b_u


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
    run: int | None = None,  # rows of one program
    num_warps: int | None = None,
) -> None:
    """``x += conv(u)``; ``out = norm(x)``; rows with from_end <= 3 + keep_after leave their input in ``cache``.

    Padding rows change nothing, neither in ``x`` and ``out`` nor in ``cache``.
    """
    num_rows, width = x.shape
    assert u.shape == x.shape and rows.num_rows == num_rows and taps.shape == (4, width), (u.shape, taps.shape)
    assert (weight is None) == (out is None), "weight and out go together"
    assert u.dtype == x.dtype == cache.dtype and pages.dtype == torch.int32, (u.dtype, cache.dtype, pages.dtype)
    check_rows(width, u, x, taps, cache, weight, out)
    op = "short_conv_add" if weight is None else "short_conv_add_norm"
    run = run or rows_per_program(op, num_rows, width)
    _conv_add_kernel[(triton.cdiv(num_rows, run),)](
        u, x, taps, cache, weight, out, rows.slot, rows.position, rows.offset, rows.from_end, pages, eps,
        num_rows, run, pages.shape[1], HISTORY + keep_after,
        HAS_NORM=weight is not None, PAGE_SIZE=page_size, WIDTH=width, BLOCK=row_block(width),
        num_warps=num_warps or row_warps(op, width), num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip

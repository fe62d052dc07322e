"""RMSNorm and the places where it is fused with a gather, an addition or a concatenation.

    rms_norm(x, w) = x / sqrt(mean(x^2) + eps) * w      statistics, scaling and weight in fp32, rounded once

One row per program at every row count, by one binary per width: the order of the sum depends on the width alone.
Rows are bf16 [T, H]; norm weights [H] are bf16 or fp32. Bytes per row: what is read and written once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.compile import Serving

# Warps per width, where measurements chose other than 16 elements per thread.
CONFIGS: dict[tuple[str, int], int] = {}
ALIGNMENT = 16  # bytes; the vector width, and with it the order of a sum, must not depend on an address


def row_block(width: int) -> int:
    """Elements of the block that holds one row."""
    return triton.next_power_of_2(width)


def row_warps(op: str, width: int) -> int:
    """Warps of a program that owns one row of ``width`` elements."""
    return CONFIGS.get((op, width)) or min(max(row_block(width) // 512, 4), 16)


def check_rows(width: int, *tensors: Tensor | None) -> None:
    """Row tensors must be contiguous, of one width and 16-byte aligned: a copy would hide a cost."""
    for x in tensors:
        if x is not None:
            assert x.shape[-1] == width and x.is_contiguous(), (x.shape, x.stride(), width)
            assert x.data_ptr() % ALIGNMENT == 0, f"address {x.data_ptr():#x} is not {ALIGNMENT}-byte aligned"


@triton.jit
def normed_row(x, weight, eps, WIDTH: tl.constexpr):
    """fp32 row and weight, zero beyond WIDTH -> fp32 normed row."""
    mean_square = tl.sum(x * x, 0) / WIDTH
    return x * tl.rsqrt(mean_square + eps) * weight


@triton.jit
def _rms_norm_kernel(x, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    channel = tl.arange(0, BLOCK)
    mask = channel < WIDTH
    base = tl.program_id(0).to(tl.int64) * WIDTH
    b_x = tl.load(x + base + channel, mask=mask, other=0.0).to(tl.float32)
    b_w = tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + base + channel, normed_row(b_x, b_w, eps, WIDTH).to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, num_warps: int | None = None) -> Tensor:
    """``x [T, H]``, ``weight [H]`` -> ``out [T, H]``, which may be ``x``."""
    num_rows, width = x.shape
    check_rows(width, x, weight, out)
    _rms_norm_kernel[(num_rows,)](
        x, weight, out, eps, WIDTH=width, BLOCK=row_block(width),
        num_warps=num_warps or row_warps("rms_norm", width), enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _embedded_row(ids, table, weight, row, channel, mask, eps, HAS_NORM: tl.constexpr, WIDTH: tl.constexpr):
    """Embedding of ``row``, normed where there is a weight, rounded to the table's dtype; id -1: zeros."""
    token = tl.load(ids + row).to(tl.int64)
    b_x = tl.load(table + token * WIDTH + channel, mask=mask & (token >= 0), other=0.0)
    if HAS_NORM:
        b_w = tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
        b_x = normed_row(b_x.to(tl.float32), b_w, eps, WIDTH).to(b_x.dtype)
    return b_x


@triton.jit
def _embed_norm_kernel(
    ids, table, weight, next_weight, out, next_out, eps,
    HAS_NORM: tl.constexpr, HAS_NEXT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    mask = channel < WIDTH
    b_x = _embedded_row(ids, table, weight, row, channel, mask, eps, HAS_NORM, WIDTH)
    tl.store(out + row * WIDTH + channel, b_x, mask=mask)
    if HAS_NEXT:
        b_w = tl.load(next_weight + channel, mask=mask, other=0.0).to(tl.float32)
        b_next = normed_row(b_x.to(tl.float32), b_w, eps, WIDTH)
        tl.store(next_out + row * WIDTH + channel, b_next.to(b_x.dtype), mask=mask)


def embed_norm(
    ids: Tensor,
    table: Tensor,
    weight: Tensor | None,
    eps: float,
    out: Tensor,
    next_weight: Tensor | None = None,
    next_out: Tensor | None = None,
    num_warps: int | None = None,
) -> Tensor:
    """``ids [T]`` (int32 or int64; -1 gives zeros), ``table [V, H]`` -> normed embeddings ``out [T, H]``.

    ``weight`` None: no norm. With ``next_weight``, ``next_out [T, H]`` receives the norm of ``out``: the input of
    the first layer.
    """
    num_rows, width = out.shape
    assert ids.shape == (num_rows,) and out.dtype == table.dtype, (ids.shape, out.shape, out.dtype)
    assert (next_weight is None) == (next_out is None), "next_weight and next_out go together"
    check_rows(width, table, weight, next_weight, out, next_out)
    _embed_norm_kernel[(num_rows,)](
        ids, table, weight, next_weight, out, next_out, eps,
        HAS_NORM=weight is not None, HAS_NEXT=next_weight is not None, WIDTH=width, BLOCK=row_block(width),
        num_warps=num_warps or row_warps("embed_norm", width), enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _add_norm_kernel(x, y, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    channel = tl.arange(0, BLOCK)
    mask = channel < WIDTH
    base = tl.program_id(0).to(tl.int64) * WIDTH
    b_x = tl.load(x + base + channel, mask=mask, other=0.0)
    b_y = tl.load(y + base + channel, mask=mask, other=0.0)
    b_w = tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
    b_sum = (b_x.to(tl.float32) + b_y.to(tl.float32)).to(b_x.dtype)
    tl.store(x + base + channel, b_sum, mask=mask)
    tl.store(out + base + channel, normed_row(b_sum.to(tl.float32), b_w, eps, WIDTH).to(b_x.dtype), mask=mask)


def add_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, out: Tensor, num_warps: int | None = None
) -> Tensor:
    """``x [T, H] += y [T, H]``, rounded; ``out [T, H]``: the norm of the rounded sum."""
    num_rows, width = x.shape
    check_rows(width, x, y, weight, out)
    _add_norm_kernel[(num_rows,)](
        x, y, weight, out, eps, WIDTH=width, BLOCK=row_block(width),
        num_warps=num_warps or row_warps("add_norm", width), enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _dual_norm_cat_kernel(
    hidden, hidden_weight, ids, table, backbone_weight, embed_weight, out, eps,
    HAS_BACKBONE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    channel = tl.arange(0, BLOCK)
    mask = channel < WIDTH
    if half == 0:
        b_x = tl.load(hidden + row * WIDTH + channel, mask=mask, other=0.0)
        b_w = tl.load(hidden_weight + channel, mask=mask, other=0.0).to(tl.float32)
        b_out = normed_row(b_x.to(tl.float32), b_w, eps, WIDTH).to(out.dtype.element_ty)
        tl.store(out + row * 2 * WIDTH + channel, b_out, mask=mask)
    else:
        b_x = _embedded_row(ids, table, backbone_weight, row, channel, mask, eps, HAS_BACKBONE, WIDTH)
        b_w = tl.load(embed_weight + channel, mask=mask, other=0.0).to(tl.float32)
        b_out = normed_row(b_x.to(tl.float32), b_w, eps, WIDTH).to(out.dtype.element_ty)
        tl.store(out + (row * 2 + 1) * WIDTH + channel, b_out, mask=mask)


def dual_norm_cat(
    hidden: Tensor,
    hidden_weight: Tensor,
    ids: Tensor,
    table: Tensor,
    backbone_weight: Tensor | None,
    embed_weight: Tensor,
    eps: float,
    out: Tensor,
    num_warps: int | None = None,
) -> Tensor:
    """``[norm(hidden); norm(embed_norm(table[ids]))]`` -> ``out [T, 2H]``, the input of a draft depth.

    ``hidden [T, H]``, ``ids [T]``, ``table [V, H]``; the embedding passes the backbone's norm first, rounded.
    """
    num_rows, width = hidden.shape
    assert out.shape == (num_rows, 2 * width) and ids.shape == (num_rows,), (out.shape, ids.shape)
    check_rows(width, hidden, hidden_weight, table, backbone_weight, embed_weight)
    check_rows(2 * width, out)
    _dual_norm_cat_kernel[(num_rows, 2)](
        hidden, hidden_weight, ids, table, backbone_weight, embed_weight, out, eps,
        HAS_BACKBONE=backbone_weight is not None, WIDTH=width, BLOCK=row_block(width),
        num_warps=num_warps or row_warps("dual_norm_cat", width), enable_fp_fusion=False,
    )  # fmt: skip
    return out


_WIDTHS = (1024, 2048, 4096, 6144)
_FUSIONS = {"enable_fp_fusion": False}


def _serving(op: str, kernel, width: int, pointers: list[str], flags: dict[str, object]) -> Serving:
    types = (
        dict.fromkeys(pointers, "*bf16") | ({"ids": "*i32"} if "ids" in pointers else {}) | {"eps": "fp32"}
    )
    constants = {"WIDTH": width, "BLOCK": row_block(width), **flags}
    warps = row_warps(op, width)
    return Serving(f"{op} {width}", kernel, types, constants, num_warps=warps, options=_FUSIONS)


SERVING = [
    serving
    for width in _WIDTHS
    for serving in (
        _serving("rms_norm", _rms_norm_kernel, width, ["x", "weight", "out"], {}),
        _serving("add_norm", _add_norm_kernel, width, ["x", "y", "weight", "out"], {}),
        _serving(
            "embed_norm", _embed_norm_kernel, width,
            ["ids", "table", "weight", "next_weight", "out", "next_out"], {"HAS_NORM": True, "HAS_NEXT": True},
        ),
        _serving(
            "dual_norm_cat", _dual_norm_cat_kernel, width,
            ["hidden", "hidden_weight", "ids", "table", "backbone_weight", "embed_weight", "out"],
            {"HAS_BACKBONE": True},
        ),
    )
]  # fmt: skip

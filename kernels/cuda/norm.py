"""RMSNorm and the places where it is fused with a gather, an addition or a concatenation.

    rms_norm(x, w) = x / sqrt(mean(x^2) + eps) * w      statistics, scaling and weight in fp32, rounded once

A program owns ROWS rows, each in all of its threads: the order of a row's sum depends on the width alone, never on
the rows beside it nor on their number.
Rows are bf16 [T, H]; norm weights [H] are bf16 or fp32. Bytes per row: what is read and written once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.compile import Serving
from kernels.cuda.early_launch import begin_launch

MANY_ROWS = 1024  # from here on a program may own several rows and be launched early


@dataclass(frozen=True)
class NormConfig:
    """How an op is launched at one width. Warps order the sum; the rest changes no bit."""

    num_warps: int
    rows: int = 1  # of a program, a power of two
    max_registers: int | None = None
    is_early: bool = False  # programmatic dependent launch: starts while the last launch ends


_EARLY = {width: NormConfig(warps, is_early=True) for width, warps in ((2048, 4), (4096, 8))}
# From MANY_ROWS rows on, where measurements chose other than 16 elements a thread and a program for each row.
CONFIGS: dict[tuple[str, int], NormConfig] = {
    ("rms_norm", 2048): _EARLY[2048],
    ("rms_norm", 4096): _EARLY[4096],
    ("rms_norm", 6144): NormConfig(8),
    ("add_norm", 2048): _EARLY[2048],
    ("embed_norm", 2048): _EARLY[2048],
    ("embed_norm", 4096): _EARLY[4096],
    ("embed_norm", 6144): NormConfig(8),
    ("dual_norm_cat", 2048): NormConfig(4, 2, is_early=True),
    ("dual_norm_cat", 4096): NormConfig(8, 2, is_early=True),
    ("dual_norm_cat", 6144): NormConfig(8),
}
ALIGNMENT = 16  # bytes; the vector width, and with it the order of a sum, must not depend on an address


def row_block(width: int) -> int:
    """Elements of the block that holds one row."""
    return triton.next_power_of_2(width)


def row_warps(width: int) -> int:
    """Warps of a program that works on one row of ``width`` elements: 16 elements a thread."""
    return min(max(row_block(width) // 512, 4), 16)


def norm_config(op: str, width: int, num_rows: int) -> NormConfig:
    """The committed configuration of an op at a width; the warps are the same for every number of rows."""
    config = CONFIGS.get((op, width)) or NormConfig(row_warps(width))
    return config if num_rows >= MANY_ROWS else NormConfig(config.num_warps)


def _launch(op: str, x: Tensor, config: NormConfig | None) -> tuple[int, dict[str, object]]:
    """(programs, compile-time values) of a launch over the rows of ``x [T, H]``."""
    num_rows, width = x.shape
    config = placed(config or norm_config(op, width, num_rows), x)
    return triton.cdiv(num_rows, config.rows), constants(width, config) | options(config)


def placed(config: NormConfig, x: Tensor) -> NormConfig:
    """``config`` as it can be launched where ``x`` is: the interpreter runs one launch after another."""
    is_whole = config.rows == 1 or row_block(x.shape[1]) >= 256 * config.num_warps
    assert is_whole or not x.is_cuda, (
        f"{config}: a row of {x.shape[1]} has to be in all threads, 8 values in each"
    )
    return config if x.is_cuda else replace(config, is_early=False)


def constants(width: int, config: NormConfig) -> dict[str, object]:
    return {"WIDTH": width, "BLOCK": row_block(width), "ROWS": config.rows, "EARLY": config.is_early}


def options(config: NormConfig) -> dict[str, object]:
    return {
        "num_warps": config.num_warps,
        "maxnreg": config.max_registers,
        "launch_pdl": config.is_early,
        "enable_fp_fusion": False,
    }


def check_rows(width: int, *tensors: Tensor | None) -> None:
    """Row tensors must be contiguous, of one width and 16-byte aligned: a copy would hide a cost."""
    for x in tensors:
        if x is not None:
            assert x.shape[-1] == width and x.is_contiguous(), (x.shape, x.stride(), width)
            assert x.data_ptr() % ALIGNMENT == 0, f"address {x.data_ptr():#x} is not {ALIGNMENT}-byte aligned"


ANY_ROWS = triton.jit(do_not_specialize=["num_rows"])


@triton.jit
def normed_rows(x, weight, eps, WIDTH: tl.constexpr):
    """fp32 rows [ROWS, BLOCK] and weight [1, BLOCK], zero beyond WIDTH -> fp32 normed rows."""
    mean_square = tl.sum(x * x, 1, keep_dims=True) / WIDTH
    return x * tl.rsqrt(mean_square + eps) * weight


@triton.jit
def _places(num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Rows int64 [ROWS, 1] of this program, channels [1, BLOCK], and which of them exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    is_row = (
        row < num_rows if ROWS > 1 else tl.full((1, 1), True, tl.int1)
    )  # one each: as many programs as rows
    return row, channel, is_row, channel < WIDTH


@ANY_ROWS
def _rms_norm_kernel(
    x, weight, out, eps, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    row, channel, is_row, is_channel = _places(num_rows, WIDTH, BLOCK, ROWS)
    b_w = tl.load(weight + channel, mask=is_channel, other=0.0)
    begin_launch(EARLY)
    b_x = tl.load(x + row * WIDTH + channel, mask=is_row & is_channel, other=0.0).to(tl.float32)
    b_out = normed_rows(b_x, b_w.to(tl.float32), eps, WIDTH)
    tl.store(out + row * WIDTH + channel, b_out.to(out.dtype.element_ty), mask=is_row & is_channel)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, config: NormConfig | None = None) -> Tensor:
    """``x [T, H]``, ``weight [H]`` -> ``out [T, H]``, which may be ``x``."""
    check_rows(x.shape[1], x, weight, out)
    programs, launch = _launch("rms_norm", x, config)
    _rms_norm_kernel[(programs,)](x, weight, out, eps, x.shape[0], **launch)
    return out


@triton.jit
def _embedded_rows(
    ids, table, b_w, row, channel, is_row, is_channel, eps, HAS_NORM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Embeddings of ``row``, normed by weights ``b_w`` where there are, rounded to the table's dtype; id -1: zeros."""
    token = tl.load(ids + row, mask=is_row, other=-1).to(tl.int64)
    b_x = tl.load(table + token * WIDTH + channel, mask=(token >= 0) & is_channel, other=0.0)
    if HAS_NORM:
        b_x = normed_rows(b_x.to(tl.float32), b_w.to(tl.float32), eps, WIDTH).to(b_x.dtype)
    return b_x


@ANY_ROWS
def _embed_norm_kernel(
    ids, table, weight, next_weight, out, next_out, eps, num_rows,
    HAS_NORM: tl.constexpr, HAS_NEXT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row, channel, is_row, is_channel = _places(num_rows, WIDTH, BLOCK, ROWS)
    b_w = tl.load(weight + channel, mask=is_channel, other=0.0) if HAS_NORM else 0
    b_next_w = tl.load(next_weight + channel, mask=is_channel, other=0.0) if HAS_NEXT else 0
    begin_launch(EARLY)
    b_x = _embedded_rows(ids, table, b_w, row, channel, is_row, is_channel, eps, HAS_NORM, WIDTH)
    tl.store(out + row * WIDTH + channel, b_x, mask=is_row & is_channel)
    if HAS_NEXT:
        b_next = normed_rows(b_x.to(tl.float32), b_next_w.to(tl.float32), eps, WIDTH)
        tl.store(next_out + row * WIDTH + channel, b_next.to(b_x.dtype), mask=is_row & is_channel)


def embed_norm(
    ids: Tensor,
    table: Tensor,
    weight: Tensor | None,
    eps: float,
    out: Tensor,
    next_weight: Tensor | None = None,
    next_out: Tensor | None = None,
    config: NormConfig | None = None,
) -> Tensor:
    """``ids [T]`` (int32 or int64; -1 gives zeros), ``table [V, H]`` -> normed embeddings ``out [T, H]``.

    ``weight`` None: no norm. With ``next_weight``, ``next_out [T, H]`` receives the norm of ``out``: the input of
    the first layer.
    """
    num_rows, width = out.shape
    assert ids.shape == (num_rows,) and out.dtype == table.dtype, (ids.shape, out.shape, out.dtype)
    assert (next_weight is None) == (next_out is None), "next_weight and next_out go together"
    check_rows(width, table, weight, next_weight, out, next_out)
    programs, launch = _launch("embed_norm", out, config)
    _embed_norm_kernel[(programs,)](
        ids, table, weight, next_weight, out, next_out, eps, num_rows,
        HAS_NORM=weight is not None, HAS_NEXT=next_weight is not None, **launch,
    )  # fmt: skip
    return out


@ANY_ROWS
def _add_norm_kernel(
    x, y, weight, out, eps, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    row, channel, is_row, is_channel = _places(num_rows, WIDTH, BLOCK, ROWS)
    b_w = tl.load(weight + channel, mask=is_channel, other=0.0)
    begin_launch(EARLY)
    b_x = tl.load(x + row * WIDTH + channel, mask=is_row & is_channel, other=0.0)
    b_y = tl.load(y + row * WIDTH + channel, mask=is_row & is_channel, other=0.0)
    b_sum = (b_x.to(tl.float32) + b_y.to(tl.float32)).to(b_x.dtype)
    tl.store(x + row * WIDTH + channel, b_sum, mask=is_row & is_channel)
    b_out = normed_rows(b_sum.to(tl.float32), b_w.to(tl.float32), eps, WIDTH)
    tl.store(out + row * WIDTH + channel, b_out.to(b_x.dtype), mask=is_row & is_channel)


def add_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, out: Tensor, config: NormConfig | None = None
) -> Tensor:
    """``x [T, H] += y [T, H]``, rounded; ``out [T, H]``: the norm of the rounded sum."""
    check_rows(x.shape[1], x, y, weight, out)
    programs, launch = _launch("add_norm", x, config)
    _add_norm_kernel[(programs,)](x, y, weight, out, eps, x.shape[0], **launch)
    return out


@ANY_ROWS
def _dual_norm_cat_kernel(
    hidden, hidden_weight, ids, table, backbone_weight, embed_weight, out, eps, num_rows,
    HAS_BACKBONE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (i, 0) writes the left halves of its rows, (i, 1) the right ones."""
    row, channel, is_row, is_channel = _places(num_rows, WIDTH, BLOCK, ROWS)
    if tl.program_id(1) == 0:
        b_w = tl.load(hidden_weight + channel, mask=is_channel, other=0.0)
        begin_launch(EARLY)
        b_x = tl.load(hidden + row * WIDTH + channel, mask=is_row & is_channel, other=0.0)
        b_out = normed_rows(b_x.to(tl.float32), b_w.to(tl.float32), eps, WIDTH)
        tl.store(out + row * 2 * WIDTH + channel, b_out.to(out.dtype.element_ty), mask=is_row & is_channel)
    else:
        b_w = tl.load(embed_weight + channel, mask=is_channel, other=0.0)
        b_own = tl.load(backbone_weight + channel, mask=is_channel, other=0.0) if HAS_BACKBONE else 0
        begin_launch(EARLY)
        b_x = _embedded_rows(ids, table, b_own, row, channel, is_row, is_channel, eps, HAS_BACKBONE, WIDTH)
        b_out = normed_rows(b_x.to(tl.float32), b_w.to(tl.float32), eps, WIDTH)
        tl.store(
            out + (row * 2 + 1) * WIDTH + channel, b_out.to(out.dtype.element_ty), mask=is_row & is_channel
        )


def dual_norm_cat(
    hidden: Tensor,
    hidden_weight: Tensor,
    ids: Tensor,
    table: Tensor,
    backbone_weight: Tensor | None,
    embed_weight: Tensor,
    eps: float,
    out: Tensor,
    config: NormConfig | None = None,
) -> Tensor:
    """``[norm(hidden); norm(embed_norm(table[ids]))]`` -> ``out [T, 2H]``, the input of a draft depth.

    ``hidden [T, H]``, ``ids [T]``, ``table [V, H]``; the embedding passes the backbone's norm first, rounded.
    """
    num_rows, width = hidden.shape
    assert out.shape == (num_rows, 2 * width) and ids.shape == (num_rows,), (out.shape, ids.shape)
    check_rows(width, hidden, hidden_weight, table, backbone_weight, embed_weight)
    check_rows(2 * width, out)
    programs, launch = _launch("dual_norm_cat", hidden, config)
    _dual_norm_cat_kernel[(programs, 2)](
        hidden, hidden_weight, ids, table, backbone_weight, embed_weight, out, eps, num_rows,
        HAS_BACKBONE=backbone_weight is not None, **launch,
    )  # fmt: skip
    return out


_WIDTHS = (1024, 2048, 4096, 6144)


def serving(
    op: str, kernel, width: int, pointers: list[str], flags: dict[str, object], config: NormConfig
) -> Serving:
    types = dict.fromkeys(pointers, "*bf16") | ({"ids": "*i32"} if "ids" in pointers else {})
    types |= {"eps": "fp32", "num_rows": "i32"}
    others = options(config)
    warps = others.pop("num_warps")
    name = f"{op} {width}, {config.rows} rows"
    return Serving(name, kernel, types, constants(width, config) | flags, num_warps=warps, options=others)


_OPS = (
    ("rms_norm", _rms_norm_kernel, ["x", "weight", "out"], {}),
    ("add_norm", _add_norm_kernel, ["x", "y", "weight", "out"], {}),
    (
        "embed_norm", _embed_norm_kernel, ["ids", "table", "weight", "next_weight", "out", "next_out"],
        {"HAS_NORM": True, "HAS_NEXT": True},
    ),
    (
        "dual_norm_cat", _dual_norm_cat_kernel,
        ["hidden", "hidden_weight", "ids", "table", "backbone_weight", "embed_weight", "out"], {"HAS_BACKBONE": True},
    ),
)  # fmt: skip
SERVING = [
    serving(op, kernel, width, pointers, flags, config)
    for op, kernel, pointers, flags in _OPS
    for width in _WIDTHS
    for config in {norm_config(op, width, num_rows) for num_rows in (1, MANY_ROWS)}
]

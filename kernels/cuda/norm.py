"""RMSNorm and the places where it is fused with a gather, an addition or a concatenation.

    rms_norm(x, w) = x / sqrt(mean(x^2) + eps) * w      statistics, scaling and weight in fp32, rounded once

A program owns a run of rows, often one; where it has more, the next ones are on their way to shared memory while one
is in work. One binary per width at every row count: the order of the sum depends on the width alone, the length of
the run is a run-time argument that cannot change a bit.
Rows are bf16 [T, H]; norm weights [H] are bf16 or fp32. Bytes per row: what is read and written once.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.compile import Serving


@dataclass(frozen=True)
class NormConfig:
    """How an op is launched at one width. Warps order the sum; the rest changes no bit."""

    num_warps: int
    programs: int | None = None  # that a long pass is spread over; None: one for each row
    stages: int = 1  # rows in flight, the one in work included; 1 where a program has one row
    max_registers: int | None = None

    def __post_init__(self) -> None:
        assert (self.programs is None) == (self.stages == 1), f"{self}: several rows need several stages"


# Where measurements chose other than 16 elements a thread and a program for each row. 132 processors.
CONFIGS: dict[tuple[str, int], NormConfig] = {
    ("rms_norm", 6144): NormConfig(8),
    ("embed_norm", 6144): NormConfig(8),
    ("dual_norm_cat", 4096): NormConfig(8, max_registers=40),
    ("dual_norm_cat", 6144): NormConfig(8),
}
ALIGNMENT = 16  # bytes; the vector width, and with it the order of a sum, must not depend on an address


def row_block(width: int) -> int:
    """Elements of the block that holds one row."""
    return triton.next_power_of_2(width)


def row_warps(width: int) -> int:
    """Warps of a program that works on one row of ``width`` elements: 16 elements a thread."""
    return min(max(row_block(width) // 512, 4), 16)


def norm_config(op: str, width: int) -> NormConfig:
    """The committed configuration of an op at a width."""
    return CONFIGS.get((op, width)) or NormConfig(row_warps(width))


def _launch(
    op: str, num_rows: int, width: int, config: NormConfig | None
) -> tuple[int, int, dict[str, object]]:
    """(programs, rows of one, compile-time values) of a launch."""
    config = config or norm_config(op, width)
    run = triton.cdiv(num_rows, config.programs or num_rows)
    constants = {"WIDTH": width, "BLOCK": row_block(width), "STAGES": config.stages}
    options = {"num_warps": config.num_warps, "maxnreg": config.max_registers, "enable_fp_fusion": False}
    return triton.cdiv(num_rows, run), run, constants | options


def check_rows(width: int, *tensors: Tensor | None) -> None:
    """Row tensors must be contiguous, of one width and 16-byte aligned: a copy would hide a cost."""
    for x in tensors:
        if x is not None:
            assert x.shape[-1] == width and x.is_contiguous(), (x.shape, x.stride(), width)
            assert x.data_ptr() % ALIGNMENT == 0, f"address {x.data_ptr():#x} is not {ALIGNMENT}-byte aligned"


ANY_ROWS = triton.jit(do_not_specialize=["num_rows", "run"])


@triton.jit
def normed_row(x, weight, eps, WIDTH: tl.constexpr):
    """fp32 row and weight, zero beyond WIDTH -> fp32 normed row."""
    mean_square = tl.sum(x * x, 0) / WIDTH
    return x * tl.rsqrt(mean_square + eps) * weight


@triton.jit
def _rms_norm_row(x, b_w, out, row, channel, mask, eps, WIDTH: tl.constexpr):
    b_x = tl.load(x + row * WIDTH + channel, mask=mask, other=0.0).to(tl.float32)
    b_out = normed_row(b_x, b_w.to(tl.float32), eps, WIDTH)
    tl.store(out + row * WIDTH + channel, b_out.to(out.dtype.element_ty), mask=mask)


@ANY_ROWS
def _rms_norm_kernel(
    x, weight, out, eps, num_rows, run, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    channel = tl.arange(0, BLOCK)
    mask = channel < WIDTH
    b_w = tl.load(weight + channel, mask=mask, other=0.0)
    first = tl.program_id(0).to(tl.int64) * run
    if STAGES == 1:
        _rms_norm_row(x, b_w, out, first, channel, mask, eps, WIDTH)
    else:
        for row in tl.range(first, tl.minimum(first + run, num_rows), num_stages=STAGES):
            _rms_norm_row(x, b_w, out, row, channel, mask, eps, WIDTH)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, config: NormConfig | None = None) -> Tensor:
    """``x [T, H]``, ``weight [H]`` -> ``out [T, H]``, which may be ``x``."""
    num_rows, width = x.shape
    check_rows(width, x, weight, out)
    programs, run, options = _launch("rms_norm", num_rows, width, config)
    _rms_norm_kernel[(programs,)](x, weight, out, eps, num_rows, run, **options)
    return out


@triton.jit
def _embedded_row(ids, table, b_w, row, channel, mask, eps, HAS_NORM: tl.constexpr, WIDTH: tl.constexpr):
    """Embedding of ``row``, normed by weights ``b_w`` where there are, rounded to the table's dtype; id -1: zeros."""
    token = tl.load(ids + row).to(tl.int64)
    b_x = tl.load(table + token * WIDTH + channel, mask=mask & (token >= 0), other=0.0)
    if HAS_NORM:
        b_x = normed_row(b_x.to(tl.float32), b_w.to(tl.float32), eps, WIDTH).to(b_x.dtype)
    return b_x


@triton.jit
def _embed_norm_row(
    ids, table, b_w, b_next_w, out, next_out, row, channel, mask, eps,
    HAS_NORM: tl.constexpr, HAS_NEXT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    b_x = _embedded_row(ids, table, b_w, row, channel, mask, eps, HAS_NORM, WIDTH)
    tl.store(out + row * WIDTH + channel, b_x, mask=mask)
    if HAS_NEXT:
        b_next = normed_row(b_x.to(tl.float32), b_next_w.to(tl.float32), eps, WIDTH)
        tl.store(next_out + row * WIDTH + channel, b_next.to(b_x.dtype), mask=mask)


@ANY_ROWS
def _embed_norm_kernel(
    ids, table, weight, next_weight, out, next_out, eps, num_rows, run,
    HAS_NORM: tl.constexpr, HAS_NEXT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, BLOCK)
    mask = channel < WIDTH
    b_w = tl.load(weight + channel, mask=mask, other=0.0) if HAS_NORM else 0
    b_next_w = tl.load(next_weight + channel, mask=mask, other=0.0) if HAS_NEXT else 0
    first = tl.program_id(0).to(tl.int64) * run
    if STAGES == 1:
        _embed_norm_row(
            ids, table, b_w, b_next_w, out, next_out, first, channel, mask, eps, HAS_NORM, HAS_NEXT, WIDTH
        )  # fmt: skip
    else:
        for row in tl.range(first, tl.minimum(first + run, num_rows), num_stages=STAGES):
            _embed_norm_row(
                ids, table, b_w, b_next_w, out, next_out, row, channel, mask, eps, HAS_NORM, HAS_NEXT, WIDTH
            )  # fmt: skip


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
    programs, run, options = _launch("embed_norm", num_rows, width, config)
    _embed_norm_kernel[(programs,)](
        ids, table, weight, next_weight, out, next_out, eps, num_rows, run,
        HAS_NORM=weight is not None, HAS_NEXT=next_weight is not None, **options,
    )  # fmt: skip
    return out


@triton.jit
def _add_norm_row(x, y, b_w, out, row, channel, mask, eps, WIDTH: tl.constexpr):
    b_x = tl.load(x + row * WIDTH + channel, mask=mask, other=0.0)
    b_y = tl.load(y + row * WIDTH + channel, mask=mask, other=0.0)
    b_sum = (b_x.to(tl.float32) + b_y.to(tl.float32)).to(b_x.dtype)
    tl.store(x + row * WIDTH + channel, b_sum, mask=mask)
    b_out = normed_row(b_sum.to(tl.float32), b_w.to(tl.float32), eps, WIDTH)
    tl.store(out + row * WIDTH + channel, b_out.to(b_x.dtype), mask=mask)


@ANY_ROWS
def _add_norm_kernel(
    x, y, weight, out, eps, num_rows, run, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    channel = tl.arange(0, BLOCK)
    mask = channel < WIDTH
    b_w = tl.load(weight + channel, mask=mask, other=0.0)
    first = tl.program_id(0).to(tl.int64) * run
    if STAGES == 1:
        _add_norm_row(x, y, b_w, out, first, channel, mask, eps, WIDTH)
    else:
        for row in tl.range(first, tl.minimum(first + run, num_rows), num_stages=STAGES):
            _add_norm_row(x, y, b_w, out, row, channel, mask, eps, WIDTH)


def add_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, out: Tensor, config: NormConfig | None = None
) -> Tensor:
    """``x [T, H] += y [T, H]``, rounded; ``out [T, H]``: the norm of the rounded sum."""
    num_rows, width = x.shape
    check_rows(width, x, y, weight, out)
    programs, run, options = _launch("add_norm", num_rows, width, config)
    _add_norm_kernel[(programs,)](x, y, weight, out, eps, num_rows, run, **options)
    return out


@triton.jit
def _half_row(
    source, b_w, b_own, ids, out, row, channel, mask, eps,
    EMBEDDED: tl.constexpr, HAS_OWN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One half of a row of ``out``: the norm of a row of ``source``, of an embedding on the right."""
    if EMBEDDED:
        b_x = _embedded_row(ids, source, b_own, row, channel, mask, eps, HAS_OWN, WIDTH)
    else:
        b_x = tl.load(source + row * WIDTH + channel, mask=mask, other=0.0)
    b_out = normed_row(b_x.to(tl.float32), b_w.to(tl.float32), eps, WIDTH).to(out.dtype.element_ty)
    tl.store(out + (row * 2 + EMBEDDED) * WIDTH + channel, b_out, mask=mask)


@ANY_ROWS
def _dual_norm_cat_kernel(
    hidden, hidden_weight, ids, table, backbone_weight, embed_weight, out, eps, num_rows, run,
    HAS_BACKBONE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, BLOCK)
    mask = channel < WIDTH
    first = tl.program_id(0).to(tl.int64) * run
    end = tl.minimum(first + run, num_rows)
    if tl.program_id(1) == 0:
        b_w = tl.load(hidden_weight + channel, mask=mask, other=0.0)
        if STAGES == 1:
            _half_row(hidden, b_w, b_w, ids, out, first, channel, mask, eps, False, False, WIDTH)
        else:
            for row in tl.range(first, end, num_stages=STAGES):
                _half_row(hidden, b_w, b_w, ids, out, row, channel, mask, eps, False, False, WIDTH)
    else:
        b_w = tl.load(embed_weight + channel, mask=mask, other=0.0)
        b_own = tl.load(backbone_weight + channel, mask=mask, other=0.0) if HAS_BACKBONE else 0
        if STAGES == 1:
            _half_row(table, b_w, b_own, ids, out, first, channel, mask, eps, True, HAS_BACKBONE, WIDTH)
        else:
            for row in tl.range(first, end, num_stages=STAGES):
                _half_row(table, b_w, b_own, ids, out, row, channel, mask, eps, True, HAS_BACKBONE, WIDTH)


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
    programs, run, options = _launch("dual_norm_cat", num_rows, width, config)
    _dual_norm_cat_kernel[(programs, 2)](
        hidden, hidden_weight, ids, table, backbone_weight, embed_weight, out, eps, num_rows, run,
        HAS_BACKBONE=backbone_weight is not None, **options,
    )  # fmt: skip
    return out


_WIDTHS = (1024, 2048, 4096, 6144)


def _serving(op: str, kernel, width: int, pointers: list[str], flags: dict[str, object]) -> Serving:
    types = (
        dict.fromkeys(pointers, "*bf16") | ({"ids": "*i32"} if "ids" in pointers else {}) | {"eps": "fp32"}
    )
    types |= {"num_rows": "i32", "run": "i32"}
    config = norm_config(op, width)
    constants = {"WIDTH": width, "BLOCK": row_block(width), "STAGES": config.stages, **flags}
    options = {"maxnreg": config.max_registers, "enable_fp_fusion": False}
    return Serving(f"{op} {width}", kernel, types, constants, num_warps=config.num_warps, options=options)


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

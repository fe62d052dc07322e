"""Row-exact products on the GPU: every row of ``x @ w.T`` has the same bits at every number of rows.

The weights lie on the M side of the matrix instruction and the rows on its N side. K is cut into segments fixed by the
weight's shape (configs.SEGMENTS); each has its own fp32 accumulator, and the accumulators are added in segment order:

    out = ((s0 + s1) + s2) + ...        s_i = sum over segment i of w x, in steps of 16 elements of K

Few rows spread the segments over programs, and the last program of a tile to finish adds them up; many rows run the
segments of a tile one after another in one program.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.cuda.compile import Serving
from kernels.cuda.configs import SEGMENTS, ProductConfig, num_segments, product_config, segment_unit
from kernels.cuda.early_launch import WHOLE, ask_ahead, begin_launch

MAX_TILES = 1 << 16  # output tiles of one spread launch


@triton.jit
def _blocks(x, w, m, t, K: tl.constexpr, BLOCK_K: tl.constexpr, BULK: tl.constexpr):
    """What ``_step`` loads from: tensor descriptors, or pointers to the first blocks of K."""
    if BULK:
        return w, x
    else:
        k = tl.arange(0, BLOCK_K)
        return w + m.to(tl.int64)[:, None] * K + k[None, :], x + t.to(tl.int64)[None, :] * K + k[:, None]


@triton.jit
def _step(w, x, first_m, first_t, start, is_weight, is_row, acc, MASK_M: tl.constexpr, BULK: tl.constexpr):
    """``acc [BLOCK_M, BLOCK_N]`` plus the block of K at ``start``; rows beyond the end count as 0."""
    if BULK:
        weights = w.load([first_m, start])
        rows = x.load([first_t, start]).T
    else:
        if MASK_M:
            weights = tl.load(w + start, mask=is_weight[:, None], other=0.0)
        else:
            weights = tl.load(w + start)
        rows = tl.load(x + start, mask=is_row[None, :], other=0.0)
    return tl.dot(weights, rows, acc)


@triton.jit
def _store_rows(
    out, total, first_m, first_t, num_rows, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Writes ``total [BLOCK_M, BLOCK_N]``, transposed, to its place in ``out [T, N]``, rounded to its type."""
    m, t = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    places = out + (first_t.to(tl.int64) * N + first_m) + (t[:, None] * N + m[None, :])
    inside = (t < num_rows - first_t)[:, None] & (m < N - first_m)[None, :]
    tl.store(places, tl.trans(total.to(out.dtype.element_ty)), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _spread_kernel(
    x,  # bf16 [T, K]
    w,  # bf16 [N, K]
    weights,  # w by pointer, for what is asked ahead
    out,  # [T, N]
    partials,  # fp32 [tiles, SEGMENTS, BLOCK_M, BLOCK_N]
    counters,  # int32 [tiles], zero between launches
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BULK: tl.constexpr,  # x and w are tensor descriptors of the blocks
    EARLY: tl.constexpr,  # launched before the last launch has ended
    AHEAD: tl.constexpr,
):
    """One program a (weight tile, segment, row tile)."""
    segment = tl.program_id(1)
    first_m, first_t = tl.program_id(0) * BLOCK_M, tl.program_id(2) * BLOCK_N
    m, t = first_m + tl.arange(0, BLOCK_M), first_t + tl.arange(0, BLOCK_N)
    units: tl.constexpr = K // UNIT
    first, last = segment * units // SEGMENTS * UNIT, (segment + 1) * units // SEGMENTS * UNIT
    if EARLY:
        ask_ahead(weights, first_m.to(tl.int64), N, first, last, K, BLOCK_M, AHEAD)
    begin_launch(EARLY)
    w_block, x_block = _blocks(x, w, m, t, K, BLOCK_K, BULK)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(first, last, BLOCK_K):
        acc = _step(
            w_block, x_block, first_m, first_t, start, m < N, t < num_rows, acc, N % BLOCK_M != 0, BULK
        )
    if SEGMENTS == 1:
        _store_rows(out, acc, first_m, first_t, num_rows, N, BLOCK_M, BLOCK_N)
    else:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        # [rows, weight rows] and only rows that exist, where that may be one; wide blocks whole, as threads hold them
        IS_NARROW: tl.constexpr = BLOCK_N == 16
        m, t = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
        inside = t * BLOCK_M + m if IS_NARROW else m * BLOCK_N + t
        is_kept = t < (num_rows - first_t if IS_NARROW else BLOCK_N)
        places = partials + tile.to(tl.int64) * (SEGMENTS * BLOCK_M * BLOCK_N) + inside
        tl.store(places + segment * (BLOCK_M * BLOCK_N), acc, mask=is_kept)
        tl.debug_barrier()  # every thread's part is written before the count says so
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SEGMENTS - 1:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for s in tl.static_range(SEGMENTS):
                total += tl.load(
                    places + s * (BLOCK_M * BLOCK_N), mask=is_kept, other=0.0, cache_modifier=".cg"
                )
            _store_rows(out, total, first_m, first_t, num_rows, N, BLOCK_M, BLOCK_N)
            tl.store(counters + tile, 0)


@triton.jit(do_not_specialize=["num_rows"])
def _whole_kernel(
    x,  # bf16 [T, K]
    w,  # bf16 [N, K]
    weights,  # w by pointer, for what is asked ahead
    out,  # [T, N]
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BULK: tl.constexpr,  # x and w are tensor descriptors of the blocks
    EARLY: tl.constexpr,  # launched before the last launch has ended
    AHEAD: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program an output tile; GROUP weight tiles walk the row tiles together, so that both stay in the L2."""
    num_m: tl.constexpr = (N + BLOCK_M - 1) // BLOCK_M
    num_n = tl.cdiv(num_rows, BLOCK_N)
    group = tl.program_id(0) // (GROUP * num_n)
    in_group = tl.program_id(0) % (GROUP * num_n)
    width = min(num_m - group * GROUP, GROUP)
    first_m = (group * GROUP + in_group % width) * BLOCK_M
    first_t = in_group // width * BLOCK_N
    m, t = first_m + tl.arange(0, BLOCK_M), first_t + tl.arange(0, BLOCK_N)
    units: tl.constexpr = K // UNIT
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    segment = 0
    last = units // SEGMENTS * UNIT  # where the segment ends
    if EARLY:
        ask_ahead(weights, first_m.to(tl.int64), N, 0, K, K, BLOCK_M, AHEAD)
    begin_launch(EARLY)
    w_block, x_block = _blocks(x, w, m, t, K, BLOCK_K, BULK)
    for start in tl.range(0, K, BLOCK_K):
        acc = _step(
            w_block, x_block, first_m, first_t, start, m < N, t < num_rows, acc, N % BLOCK_M != 0, BULK
        )
        if SEGMENTS > 1:  # noqa: SIM102 (known to the compiler; the next is not)
            if start + BLOCK_K == last:
                total += acc
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                segment += 1
                last = (segment + 1) * units // SEGMENTS * UNIT
    _store_rows(out, acc if SEGMENTS == 1 else total, first_m, first_t, num_rows, N, BLOCK_M, BLOCK_N)


@cache
def _counters(device: torch.device) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the first product of a device is inside a graph capture; launch one before")
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def linear(
    x: Tensor,
    w: Tensor,
    out: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    config: ProductConfig | None = None,
    segments: int | None = None,
    ahead: int | None = None,
) -> Tensor:
    """``x [T, K] @ w[N, K].T -> [T, N]``, row-exact: bf16 operands, fp32 accumulation, rounded once to ``out``'s type.

    ``out``: bf16 or fp32, given or made in ``out_dtype`` (default: x's). ``config``: another launch with the same bits;
    ``segments``: another order of the sum. ``ahead``: launched early (``early_launch``), with so many elements of K a
    weight row asked of the L2; None: as the configuration has it. Launches of one device run on one stream at a time:
    they share the counters. Raises ValueError for shapes, types or layouts that it does not take.
    """
    (rows, k), n = x.shape, w.shape[0]
    if w.shape[1] != k or k % 16:
        raise ValueError(f"x {list(x.shape)} times w {list(w.shape)}: K has to be equal and a multiple of 16")
    if not (x.is_contiguous() and w.is_contiguous()) or x.data_ptr() % 16 or w.data_ptr() % 16:
        raise ValueError("x and w have to be contiguous and 16-byte aligned")
    if out is None:
        out = torch.empty((rows, n), dtype=out_dtype or x.dtype, device=x.device)
    if out.shape != (rows, n) or not out.is_contiguous():
        raise ValueError(f"out {list(out.shape)} has to be contiguous [{rows}, {n}]")
    if not rows:
        return out
    config = config or product_config(n, k, rows)
    if ahead is not None:
        config = replace(config, is_early=True, ahead=ahead)
    if not x.is_cuda:  # the interpreter runs one launch after another
        config = replace(config, is_early=False)
    segments = segments or num_segments(n, k)
    blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    blocks |= {"BULK": config.is_bulk, "EARLY": config.is_early, "AHEAD": config.ahead}
    shape = {"N": n, "K": k, "UNIT": segment_unit(k), "SEGMENTS": segments}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": config.is_early}
    num_m, num_n = -(-n // config.block_m), -(-rows // config.block_n)
    x_side, w_side = x, w
    if config.is_bulk:
        x_side = TensorDescriptor.from_tensor(x, [config.block_n, config.block_k])
        w_side = TensorDescriptor.from_tensor(w, [config.block_m, config.block_k])
    if not config.is_spread:
        _whole_kernel[(num_m * num_n,)](
            x_side, w_side, w, out, rows, **shape, **blocks, GROUP=config.group, **options
        )
        return out
    if num_m * num_n > MAX_TILES:
        raise ValueError(f"{num_m * num_n} tiles, at most {MAX_TILES} in a spread launch; take a whole one")
    size = num_m * num_n * segments * config.block_m * config.block_n if segments > 1 else 1
    partials = torch.empty(size, dtype=torch.float32, device=x.device)
    grid = (num_m, segments, num_n)
    _spread_kernel[grid](
        x_side, w_side, w, out, partials, _counters(x.device), rows, **shape, **blocks, **options
    )
    return out


_TYPES = {"x": "*bf16", "w": "*bf16", "weights": "*bf16", "out": "*bf16", "num_rows": "i32"}
_SPREAD_TYPES = {**_TYPES, "partials": "*fp32", "counters": "*i32"}


def serving(n: int, k: int, rows: int, config: ProductConfig | None = None, out: str = "*bf16") -> Serving:
    """What ``linear`` launches for ``rows`` rows times a weight ``[N, K]``."""
    config = config or product_config(n, k, rows)
    kernel, types = (_spread_kernel, _SPREAD_TYPES) if config.is_spread else (_whole_kernel, _TYPES)
    values = {
        "N": n,
        "K": k,
        "UNIT": segment_unit(k),
        "SEGMENTS": num_segments(n, k),
        "BLOCK_M": config.block_m,
    }
    values |= {"BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "BULK": config.is_bulk}
    values |= {"EARLY": config.is_early, "AHEAD": config.ahead}
    if config.is_bulk:
        sides = {"x": config.block_n, "w": config.block_m}
        types = types | {name: f"tensordesc<bf16[{side}, {config.block_k}]>" for name, side in sides.items()}
    values |= {} if config.is_spread else {"GROUP": config.group}
    return Serving(
        name=f"linear {rows} x {k} -> {n}: {config}",
        kernel=kernel,
        signature=types | {"out": out},
        constexprs=values,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        wgmma=True,
        stack=64 if config.num_warps == 16 else 0,  # a few of the 64 sums a thread, touched once a segment
        options={"launch_pdl": config.is_early},
    )


# Every configuration of Inkling-Small and mini: row counts of each class.
SERVING = [
    serving(n, k, rows, out="*fp32" if n < 1024 else "*bf16")
    for n, k in SEGMENTS
    for rows in {product_config(n, k, rows): rows for rows in (1, 32, 64, 128, 512, 2048)}.values()
]
SERVING += [  # of a layer's few rows
    serving(n, k, 1, replace(product_config(n, k, 1), is_early=True, ahead=WHOLE))
    for n, k in ((3328, 2048), (2048, 2048))
]

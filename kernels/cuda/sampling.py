"""Draw one token per row on the device, by the definition of ``kernels/sampling.py``; log-sum-exp on the way.

Launches: maxima and sums of tiles; for top_k and top_p the cut of each row (``rank_cut``); noise and argmax of tiles;
the merge of tiles, in an order that V' alone fixes. A row that needs less leaves a launch at once.

What has the reference's bits: greedy tokens, temperature, Philox words, maxima, top_k with its ties, and every
comparison. What may differ in the last bits: the two logarithms of the noise and the exponential of min_p and top_p,
so another token is possible only where two scores lie within a few ulp, or a share within 1e-7 of its bound. The
masses of top_p are summed as integers, multiples of 2^-44 (the reference adds in fp64): V' <= 2^18 of them lose less
than 2e-8, and no order can change their sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.compile import Serving
from kernels.cuda.philox import gumbel, philox_block
from kernels.cuda.rank_cut import (
    ANY_LOGITS,
    LOWEST_TEMPERATURE,
    cut_rows,
    exp_nonpositive,
    row_maximum,
    scaled_logits,
)
from kernels.sampling import SamplingRows

TILE = 4096  # ids of one program; the order of the log-sum-exp depends on it and V' alone
MAX_VOCAB = 1 << 18


@ANY_LOGITS
def _tile_sums_kernel(logits, part_max, part_id, part_sum, stride, vocab_size, num_tiles, TILE: tl.constexpr):
    tile, row = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab_size, other=float("-inf"))
    largest = tl.max(x, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    at = row * num_tiles + tile
    tl.store(part_max + at, largest)
    tl.store(part_id + at, tl.min(tl.where(x == largest, ids, 2147483647), 0))
    tl.store(part_sum + at, tl.sum(exp_nonpositive(x - base), 0))


@ANY_LOGITS
def _draw_kernel(
    logits, temperatures, min_ps, seeds, positions, part_max, cut_values, cut_ids, drawn, drawn_id, stride,
    vocab_size, num_tiles, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The largest score of a tile and its lowest id, of rows with a temperature."""
    tile, row = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        temperature = tl.maximum(temperature, LOWEST_TEMPERATURE)
        row_max = tl.div_rn(row_maximum(part_max, row, num_tiles, TILES), temperature)
        ids = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab_size, other=float("-inf"))
        x = scaled_logits(x, temperature, row_max, tl.load(min_ps + row))
        cut_value, cut_id = tl.load(cut_values + row), tl.load(cut_ids + row)
        x = tl.where((x > cut_value) | ((x == cut_value) & (ids <= cut_id)), x, float("-inf"))
        at = row * num_tiles + tile
        if tl.max(x, 0) > float("-inf"):
            block = tile * (TILE // 4) + tl.arange(0, TILE // 4)
            w0, w1, w2, w3 = philox_block(block, tl.load(positions + row), tl.load(seeds + row))
            words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (TILE,))
            score = gumbel(words) + x
            largest = tl.max(score, 0)
            tl.store(drawn + at, largest)
            tl.store(drawn_id + at, tl.min(tl.where(score == largest, ids, 2147483647), 0))
        else:  # nothing left in this tile: no noise
            tl.store(drawn + at, float("-inf"))
            tl.store(drawn_id + at, tile * TILE)


@triton.jit
def _merge_kernel(
    temperatures, part_max, part_id, part_sum, drawn, drawn_id, tokens, row_max, log_sum, num_tiles,
    TILES: tl.constexpr, HAS_DRAW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    tile = tl.arange(0, TILES)
    mask = tile < num_tiles
    at = row * num_tiles + tile
    largest = tl.load(part_max + at, mask=mask, other=float("-inf"))
    ids = tl.load(part_id + at, mask=mask, other=2147483647)
    top = tl.max(largest, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.load(part_sum + at, mask=mask, other=0.0) * exp_nonpositive(largest - base), 0)
    tl.store(row_max + row, top)
    tl.store(log_sum + row, tl.log(total))
    if HAS_DRAW:  # noqa: SIM102 - decided at compilation, the other at run time
        if tl.load(temperatures + row) > 0:
            largest = tl.load(drawn + at, mask=mask, other=float("-inf"))
            ids = tl.load(drawn_id + at, mask=mask, other=2147483647)
    top = tl.max(largest, 0)
    tl.store(tokens + row, tl.min(tl.where(largest == top, ids, 2147483647), 0).to(tokens.dtype.element_ty))


def sample(
    logits: Tensor,
    rows: SamplingRows | None,
    tokens: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    *,
    ranked: bool = True,
) -> Tensor:
    """One token per row: ``logits [R, V']`` fp32 (rows may be strided) -> ``tokens [R]`` int64 or int32.

    Also ``row_max [R]`` and ``log_sum [R]`` fp32, so that log_prob(i) = (x_i - row_max) - log_sum. ``rows`` None: all
    greedy. ``ranked`` False: the caller knows that no row uses top_k or top_p, which saves their launches.
    """
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())
    assert vocab_size <= MAX_VOCAB, f"{vocab_size} ids; at most {MAX_VOCAB}: masses are 64-bit sums"
    num_tiles = triton.cdiv(vocab_size, TILE)
    tiles, stride, grid = triton.next_power_of_2(num_tiles), logits.stride(0), (num_tiles, num_rows)
    options = {"num_warps": 8, "enable_fp_fusion": False}

    def parts(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

    part_max, part_sum = parts(torch.float32, num_tiles), parts(torch.float32, num_tiles)
    part_id = parts(torch.int32, num_tiles)
    _tile_sums_kernel[grid](
        logits, part_max, part_id, part_sum, stride, vocab_size, num_tiles, TILE=TILE, **options
    )  # fmt: skip
    drawn, drawn_id = part_max, part_id
    if rows is not None:
        cut_values, cut_ids = parts(torch.float32), parts(torch.int32)
        if ranked:
            cut_rows(logits, rows, part_max, TILE, cut_values, cut_ids)
        else:
            cut_values.fill_(-torch.inf)
            cut_ids.fill_(vocab_size)
        drawn, drawn_id = torch.empty_like(part_max), torch.empty_like(part_id)
        _draw_kernel[grid](
            logits, rows.temperature, rows.min_p, rows.seed, rows.position, part_max, cut_values, cut_ids, drawn,
            drawn_id, stride, vocab_size, num_tiles, TILE=TILE, TILES=tiles, **options,
        )  # fmt: skip
    _merge_kernel[(num_rows,)](
        None if rows is None else rows.temperature, part_max, part_id, part_sum, drawn, drawn_id, tokens, row_max,
        log_sum, num_tiles, TILES=tiles, HAS_DRAW=rows is not None, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens


def _serving(
    name: str, kernel, pointers: dict[str, str], flags: dict[str, object], num_warps: int
) -> Serving:
    integers = {n: "i32" for n in ("stride", "vocab_size", "num_tiles") if n in kernel.arg_names}
    options = {"enable_fp_fusion": False}
    return Serving(
        f"sampling {name}", kernel, pointers | integers, flags, num_warps=num_warps, options=options
    )


_TILES = triton.next_power_of_2(triton.cdiv(201024, TILE))
_TYPES = {
    **dict.fromkeys(
        ("logits", "temperatures", "min_ps", "part_max", "part_sum", "cut_values", "drawn"), "*fp32"
    ),
    **dict.fromkeys(("row_max", "log_sum"), "*fp32"),
    **dict.fromkeys(("part_id", "cut_ids", "drawn_id"), "*i32"),
    **dict.fromkeys(("seeds", "positions", "tokens"), "*i64"),
}
SERVING = [
    _serving(name, kernel, {n: t for n, t in _TYPES.items() if n in kernel.arg_names}, flags, num_warps)
    for name, kernel, flags, num_warps in (
        ("tile sums", _tile_sums_kernel, {"TILE": TILE}, 8),
        ("draw", _draw_kernel, {"TILE": TILE, "TILES": _TILES}, 8),
        ("merge", _merge_kernel, {"TILES": _TILES, "HAS_DRAW": True}, 1),
    )
]

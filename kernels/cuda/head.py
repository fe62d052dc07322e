"""Head: fp32 logits of the rows that draw, or the drawn tokens alone.

    logits = (h . W_U^T) / mup                            fp32 from the product on
    token  = argmax(logits)                               rows with temperature 0
    token  = argmax(logits / temperature + noise)         others; noise as in ``kernels.sampling``, no filters

The draw stores no logits: each tile of the vocabulary leaves its best entry and its log-sum-exp, which one program a
row then merges in one fixed order. Ties go to the lowest id.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.compile import Serving
from kernels.cuda.philox import gumbel_tile
from kernels.cuda.weight_tiles import TileConfig, weight_tile
from kernels.sampling import MIN_TEMPERATURE

# H -> blocks, on an H200.
CONFIGS: dict[int, TileConfig] = {}
DEFAULT = TileConfig(128, 64, 4, 4)

_MOST_ROWS = {"logits": 128, "draw": 32}  # of one tile: noise of wider ones spills
_NO_ID = tl.constexpr(2**31 - 1)


def tile_config(hidden: int) -> TileConfig:
    """Blocks of a head with K = ``hidden``."""
    return CONFIGS.get(hidden, DEFAULT)


def row_block(num_rows: int, most: int) -> int:
    """Rows of one tile."""
    return min(most, max(16, triton.next_power_of_2(num_rows)))


@triton.jit
def _tile_logits(
    hidden, index, head, num_rows, inverse_mup,
    V: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """-> logits [BLOCK_M, BLOCK_N], ids [BLOCK_M], rows [BLOCK_N] and which of those are drawn."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(index + n, mask=n < num_rows, other=-1)
    first = tl.program_id(1) * BLOCK_M
    held = row >= 0
    logits = weight_tile(
        head, first, V - 1, hidden, tl.maximum(row, 0), held, K, BLOCK_M, BLOCK_N, BLOCK_K, TMA
    )
    return logits * inverse_mup, first + tl.arange(0, BLOCK_M), n, held


@triton.jit(do_not_specialize=["num_rows"])
def _logits_kernel(
    hidden,  # bf16 [T, K]
    index,  # int32 [n], -1: no row
    head,  # bf16 [V, K], or its descriptor
    logits,  # fp32 [n, V]
    num_rows,
    inverse_mup,
    V: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    value, ids, n, held = _tile_logits(
        hidden, index, head, num_rows, inverse_mup, V, K, BLOCK_M, BLOCK_N, BLOCK_K, TMA
    )
    target = logits + n.to(tl.int64)[None, :] * V + ids[:, None]
    tl.store(target, value, mask=held[None, :] & (ids < V)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _draw_kernel(
    hidden, index, head,  # as above
    temperature,  # fp32 [n]
    seed,  # int64 [n]
    position,  # int64 [n]
    best_ids,  # int32 [n, tiles]
    parts,  # fp32 [4, n, tiles]: best value with its noise, its logit, largest logit, sum of exp(logit - largest)
    num_rows,
    inverse_mup,
    V: tl.constexpr, K: tl.constexpr, MIN_T: tl.constexpr, NOISE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    logits, ids, n, held = _tile_logits(
        hidden, index, head, num_rows, inverse_mup, V, K, BLOCK_M, BLOCK_N, BLOCK_K, TMA
    )
    logits = tl.where((ids < V)[:, None], logits, float("-inf"))
    value = logits
    if NOISE:
        t = tl.load(temperature + n, mask=held, other=0.0)
        if tl.max(t, 0) > 0:
            noise = gumbel_tile(
                tl.program_id(1) * BLOCK_M,
                tl.load(position + n, mask=held, other=0),
                tl.load(seed + n, mask=held, other=0),
                BLOCK_M,
                BLOCK_N,
            )
            value = tl.where((t > 0)[None, :], logits / tl.maximum(t, MIN_T)[None, :] + noise, logits)
    best = tl.max(value, 0)
    best_id = tl.min(tl.where(value == best[None, :], ids[:, None], _NO_ID), 0)
    best_logit = tl.max(tl.where(ids[:, None] == best_id[None, :], logits, float("-inf")), 0)
    largest = tl.max(logits, 0)
    entry = n.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    part = num_rows.to(tl.int64) * tl.num_programs(1)
    tl.store(best_ids + entry, best_id, mask=held)
    tl.store(parts + entry, best, mask=held)
    tl.store(parts + part + entry, best_logit, mask=held)
    tl.store(parts + 2 * part + entry, largest, mask=held)
    tl.store(parts + 3 * part + entry, tl.sum(tl.exp(logits - largest[None, :]), 0), mask=held)


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(
    index,  # int32 [n]
    best_ids,  # int32 [n, TILES]
    parts,  # fp32 [4, n, TILES]
    tokens,  # int32 [n]
    scores,  # fp32 [n, 2]: logit of the token, log-sum-exp
    num_rows,
    V: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    if tl.load(index + n) < 0:
        return
    tile = tl.arange(0, BLOCK_T)
    entry, part = parts + n * TILES + tile, num_rows.to(tl.int64) * TILES
    is_tile = tile < TILES
    value = tl.load(entry, mask=is_tile, other=float("-inf"))
    ids = tl.load(best_ids + n * TILES + tile, mask=is_tile, other=_NO_ID)
    token = tl.min(tl.where(value == tl.max(value, 0), ids, _NO_ID), 0)
    logit = tl.load(entry + part, mask=is_tile, other=float("-inf"))
    largest = tl.load(entry + 2 * part, mask=is_tile, other=float("-inf"))
    exps = tl.load(entry + 3 * part, mask=is_tile, other=0.0)
    most = tl.max(largest, 0)
    tl.store(tokens + n, tl.minimum(token, V - 1))  # NaN logits must not lead out of the embedding
    tl.store(scores + 2 * n, tl.max(tl.where(ids == token, logit, float("-inf")), 0))
    tl.store(scores + 2 * n + 1, most + tl.log(tl.sum(exps * tl.exp(largest - most), 0)))


def head_logits(
    hidden: Tensor, index: Tensor, head: Tensor, mup: float, logits: Tensor, config: TileConfig | None = None
) -> None:
    """``hidden`` bf16 [T, H], ``index`` int32 [n] of its rows, ``head`` bf16 [V', H] -> ``logits`` fp32 [n, V'].

    Row-exact. An index of -1 writes nothing.
    """
    _check(hidden, index, head)
    (vocab_size, width), num_rows = head.shape, index.shape[0]
    assert logits.shape == (num_rows, vocab_size) and logits.dtype == torch.float32 and logits.is_contiguous()
    config, block_n = config or tile_config(width), row_block(num_rows, _MOST_ROWS["logits"])
    _logits_kernel[(triton.cdiv(num_rows, block_n), triton.cdiv(vocab_size, config.block_m))](
        hidden, index, config.weights(head), logits, num_rows, 1.0 / mup, vocab_size, width,
        config.block_m, block_n, config.block_k, config.tma,
        num_warps=config.num_warps, num_stages=config.stages(block_n),
    )  # fmt: skip


@dataclass
class Noise:
    """How each row is drawn; entries of ``kernels.sampling.SamplingRows``."""

    temperature: Tensor  # fp32 [n], 0: greedy
    seed: Tensor  # int64 [n]
    position: Tensor  # int64 [n], of the token drawn


@dataclass
class Drawn:
    """Outputs of a draw of n rows and what its programs hand to one another."""

    tokens: Tensor  # int32 [n]
    scores: Tensor  # fp32 [n, 2]: logit of the token, log-sum-exp of the row's logits
    best_ids: Tensor  # int32 [n, tiles]
    parts: Tensor  # fp32 [4, n, tiles]

    def first(self, count: int) -> Drawn:
        """Room for ``count`` rows, in this one's."""
        tiles = self.best_ids.shape[1]
        parts = self.parts.view(-1)[: 4 * count * tiles].view(4, count, tiles)
        return Drawn(self.tokens[:count], self.scores[:count], self.best_ids[:count], parts)


def allocate_drawn(num_rows: int, head: Tensor, config: TileConfig | None = None) -> Drawn:
    """Room for ``num_rows`` rows."""
    tiles = triton.cdiv(head.shape[0], (config or tile_config(head.shape[1])).block_m)
    return Drawn(
        torch.empty(num_rows, dtype=torch.int32, device=head.device),
        torch.empty(num_rows, 2, dtype=torch.float32, device=head.device),
        torch.empty(num_rows, tiles, dtype=torch.int32, device=head.device),
        torch.empty(4, num_rows, tiles, dtype=torch.float32, device=head.device),
    )


def head_draw(
    hidden: Tensor, index: Tensor, head: Tensor, mup: float, noise: Noise | None, drawn: Drawn,
    config: TileConfig | None = None,
) -> None:  # fmt: skip
    """``hidden`` bf16 [T, H], ``index`` int32 [n] of its rows, ``head`` bf16 [V', H] -> ``drawn``.

    ``noise`` None: every row takes its argmax. Row-exact. An index of -1 leaves its token and scores as they are.
    """
    _check(hidden, index, head)
    (vocab_size, width), num_rows = head.shape, index.shape[0]
    config, block_n = config or tile_config(width), row_block(num_rows, _MOST_ROWS["draw"])
    tiles = triton.cdiv(vocab_size, config.block_m)
    assert drawn.best_ids.shape == (num_rows, tiles), (drawn.best_ids.shape, num_rows, tiles)
    if noise is None:
        temperature = seed = position = index  # not read
    else:
        temperature, seed, position = noise.temperature, noise.seed, noise.position
        assert temperature.dtype == torch.float32 and seed.dtype == position.dtype == torch.int64
        assert temperature.shape == seed.shape == position.shape == index.shape
    _draw_kernel[(triton.cdiv(num_rows, block_n), tiles)](
        hidden, index, config.weights(head), temperature, seed, position, drawn.best_ids, drawn.parts,
        num_rows, 1.0 / mup, vocab_size, width, MIN_TEMPERATURE, noise is not None,
        config.block_m, block_n, config.block_k, config.tma,
        num_warps=config.num_warps, num_stages=config.stages(block_n),
    )  # fmt: skip
    block_t = triton.next_power_of_2(tiles)
    _merge_kernel[(num_rows,)](
        index, drawn.best_ids, drawn.parts, drawn.tokens, drawn.scores, num_rows, vocab_size, tiles, block_t,
        num_warps=min(8, max(1, block_t // 256)),
    )  # fmt: skip


def _check(hidden: Tensor, index: Tensor, head: Tensor) -> None:
    assert hidden.shape[1] == head.shape[1] and index.dtype == torch.int32, (
        hidden.shape,
        head.shape,
        index.dtype,
    )
    for x in (hidden, head):
        assert x.dtype == torch.bfloat16 and x.is_contiguous(), (x.dtype, x.stride())
        assert x.shape[1] % 16 == 0 and x.data_ptr() % 16 == 0, (x.shape, x.data_ptr() % 16)


def _serving(width: int, vocab_size: int, block_n: int, config: TileConfig | None = None) -> list[Serving]:
    label = f"H {width}, {block_n} rows" + (f", {config}" if config else "")
    config = config or tile_config(width)
    weights = f"tensordesc<bf16[{config.block_m}, {config.block_k}]>" if config.tma else "*bf16"
    product = {"hidden": "*bf16", "index": "*i32", "head": weights, "num_rows": "i32", "inverse_mup": "fp32"}
    drawn = {"best_ids": "*i32", "parts": "*fp32", "temperature": "*fp32", "seed": "*i64", "position": "*i64"}
    shape = {"V": vocab_size, "K": width}
    blocks = {"BLOCK_M": config.block_m, "BLOCK_N": block_n, "BLOCK_K": config.block_k, "TMA": config.tma}
    options = {"num_warps": config.num_warps, "num_stages": config.stages(block_n), "wgmma": True}
    draw = {**shape, "MIN_T": MIN_TEMPERATURE, **blocks}
    logits = Serving(
        f"logits {label}", _logits_kernel, {**product, "logits": "*fp32"}, {**shape, **blocks}, **options
    )
    if block_n > _MOST_ROWS["draw"]:
        return [logits]
    return [
        logits,
        Serving(f"draw {label}", _draw_kernel, {**product, **drawn}, {**draw, "NOISE": True}, **options),
        Serving(f"argmax {label}", _draw_kernel, {**product, **drawn}, {**draw, "NOISE": False}, **options),
    ]


_MERGE = {
    "index": "*i32",
    "best_ids": "*i32",
    "parts": "*fp32",
    "tokens": "*i32",
    "scores": "*fp32",
    "num_rows": "i32",
}
SERVING = [
    *(s for n in (16, 32, 64, 128) for s in _serving(4096, 200058, n)),
    *(s for n in (16, 64) for s in _serving(2048, 200058, n)),
    Serving(
        "merge 1563 tiles", _merge_kernel, _MERGE, {"V": 200058, "TILES": 1563, "BLOCK_T": 2048}, num_warps=8
    ),
]

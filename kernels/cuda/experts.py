"""Grouped products of the routed experts, bf16, row-exact.

    act[row, slot]    = silu(G_e m) * (U_e m)       gate, up and act rounded to bf16, silu * up in fp32
    slots[row, slot]  = W2_e act                    rounded to bf16
    out[row]          = shared[row] + sum over slots, in slot order, of gamma * slots[row, slot]    fp32, rounded once

A program multiplies one tile of a group (``kernels.cuda.router.Groups``) by BLOCK_M rows of its expert's weights:
two blocks of them, gate and up, for w13, whose gate rows stand above its up rows. ``kernels.mlp`` has the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.compile import Serving
from kernels.cuda.early_launch import WHOLE, ask_ahead, begin_launch, begin_launch_in_order
from kernels.cuda.router import Groups, direct_tile, grouped_tile
from kernels.cuda.swiglu import silu_mul
from kernels.cuda.weight_tiles import (
    TileConfig,
    load_rows,
    load_weights,
    row_pointers,
    weight_pointers,
    weight_tile,
)

# (product, K) -> blocks, on an H200. With K 1536 a single row has few programs: each keeps more bytes under way.
CONFIGS: dict[tuple[str, int], TileConfig] = {
    ("w13", 2048): TileConfig(64, 64, 4, 6),
    ("w2", 1536): TileConfig(64, 128, 4, 4),
}
DEFAULT = {"w13": TileConfig(64, 64, 4, 4), "w2": TileConfig(128, 64, 4, 4)}

_BLOCK_H = 1024


@dataclass
class SharedExperts:
    """Shared experts that ``gate_up`` computes beside the routed ones: act = gamma * silu(gate) * up."""

    w13: Tensor  # bf16 [S*2f, H], gate rows then up rows of each
    gamma: Tensor  # fp32 [T, k+S]
    act: Tensor  # bf16 [T, S*f], written; rows of padding hold anything


def tile_config(product: str, width: int) -> TileConfig:
    """Blocks of ``product`` ("w13" or "w2") with K = ``width``."""
    return CONFIGS.get((product, width), DEFAULT[product])


@triton.jit
def _tile(chosen, order, tiles, tile, num_pairs, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """Expert, pairs and which exist; BLOCK_P 0: from the tile list."""
    if BLOCK_P > 0:
        expert, pair, held = direct_tile(chosen, tile, num_pairs, BLOCK_P, BLOCK_N)
    else:
        expert, pair, held = grouped_tile(order, tiles, tile, BLOCK_N)
    return expert, pair, held


@triton.jit
def _gate_up_block(
    x, row, held, weights, gate_first, up_first,
    K: tl.constexpr, F: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_M, BLOCK_N]: silu(gate) * up of ``row`` of x, from rows ``gate_first ..`` and ``up_first ..``."""
    m = tl.program_id(0) * BLOCK_M
    x_pointers = row_pointers(x, row, K, BLOCK_K)
    if TMA:
        gate_pointers = x_pointers
        up_pointers = x_pointers
    else:
        gate_pointers = weight_pointers(weights, gate_first, gate_first - m + F - 1, K, BLOCK_M, BLOCK_K)
        up_pointers = weight_pointers(weights, up_first, up_first - m + F - 1, K, BLOCK_M, BLOCK_K)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        rows = load_rows(x_pointers, held, k, K, BLOCK_K)
        gate = tl.dot(
            load_weights(weights, gate_pointers, gate_first, k, K, BLOCK_M, BLOCK_K, TMA), rows, gate
        )
        up = tl.dot(load_weights(weights, up_pointers, up_first, k, K, BLOCK_M, BLOCK_K, TMA), rows, up)
    return silu_mul(gate.to(tl.bfloat16).to(tl.float32), up.to(tl.bfloat16).to(tl.float32))


@triton.jit(do_not_specialize=["num_pairs", "num_rows"])
def _gate_up_kernel(
    x,  # bf16 [T, K]
    w13,  # bf16 [E, 2F, K], or the descriptor of [E * 2F, K]
    chosen, order, tiles,  # of the groups
    act,  # bf16 [P, F], by pair
    shared_w13,  # bf16 [S * 2F, K]; None: without the shared experts
    gamma,  # fp32 [T, k + S]
    shared_act,  # bf16 [T, S * F]
    num_pairs, num_rows,
    K: tl.constexpr, F: tl.constexpr, TOP_K: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    EARLY: tl.constexpr, AHEAD: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Tiles of the shared experts come first: launched early, they ask for their weights before the choice is known."""
    m, tile = tl.program_id(0) * BLOCK_M, tl.program_id(1)
    weights = w13
    if S > 0:
        row_tiles = tl.cdiv(num_rows, BLOCK_N)
        shared_expert, tile = tile // row_tiles, tile - S * row_tiles
        is_shared = tile < 0
        first = (shared_expert * (2 * F) + m).to(tl.int64)
        if EARLY:  # noqa: SIM102 (known to the compiler; the next is not)
            if is_shared:
                ask_ahead(shared_w13, first, first - m + F, 0, K, K, BLOCK_M, AHEAD)
                ask_ahead(shared_w13, first + F, first - m + 2 * F, 0, K, K, BLOCK_M, AHEAD)
    begin_launch_in_order(EARLY)  # ``down`` reads chosen as it begins
    expert, pair, held = _tile(chosen, order, tiles, tl.maximum(tile, 0), num_pairs, BLOCK_P, BLOCK_N)
    row = pair // TOP_K
    if S > 0:
        weights = tl.where(is_shared, shared_w13, w13)
        expert = tl.where(is_shared, shared_expert, expert)
        shared_row = tl.program_id(1) % row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        row = tl.where(is_shared, shared_row, row)
        held = (is_shared & (shared_row < num_rows)) | (held & (tile >= 0))
    if expert < 0:
        return
    gate_first = expert * (2 * F) + m
    product = _gate_up_block(
        x, row, held, weights, gate_first, gate_first + F, K, F, BLOCK_M, BLOCK_N, BLOCK_K, TMA
    )
    m = m + tl.arange(0, BLOCK_M)
    target = act + pair.to(tl.int64) * F
    if S > 0:
        weight = tl.load(gamma + row * (TOP_K + S) + TOP_K + expert, mask=held & is_shared, other=1.0)
        product *= weight[None, :]
        target = tl.where(is_shared, shared_act + (row.to(tl.int64) * S + expert) * F, target)
    tl.store(target[None, :] + m[:, None], product.to(tl.bfloat16), mask=held[None, :] & (m < F)[:, None])


@triton.jit(do_not_specialize=["num_pairs"])
def _down_kernel(
    act,  # bf16 [P, K], by pair
    w2,  # bf16 [E, H, K], or the descriptor of [E * H, K]
    chosen, order, tiles,  # of the groups
    slots,  # bf16 [P, H], by pair
    num_pairs,
    K: tl.constexpr, H: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    EARLY: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M
    expert, pair, held = _tile(chosen, order, tiles, tl.program_id(1), num_pairs, BLOCK_P, BLOCK_N)
    if EARLY and not TMA:  # noqa: SIM102
        if expert >= 0:
            first = expert.to(tl.int64) * H + m
            ask_ahead(w2, first, first - m + H, 0, K, K, BLOCK_M, AHEAD)
    begin_launch(EARLY)
    if expert < 0:
        return
    last = expert * H + H - 1
    product = weight_tile(w2, expert * H + m, last, act, pair, held, K, BLOCK_M, BLOCK_N, BLOCK_K, TMA)
    m = m + tl.arange(0, BLOCK_M)
    target = slots + pair.to(tl.int64)[None, :] * H + m[:, None]
    tl.store(target, product.to(tl.bfloat16), mask=held[None, :] & (m < H)[:, None])


@triton.jit
def _combine_kernel(
    slots,  # bf16 [T, k, H]
    chosen,  # int32 [T, k]
    gamma,  # fp32 [T, k + S]
    shared,  # bf16 [T, H]
    out,  # bf16 [T, H]
    H: tl.constexpr, S: tl.constexpr, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_launch(EARLY)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(chosen + row * TOP_K) < 0:
        return
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for slot in tl.static_range(TOP_K):
        value = tl.load(slots + (row * TOP_K + slot) * H + h, mask=h < H, other=0.0).to(tl.float32)
        total += value * tl.load(gamma + row * (TOP_K + S) + slot)
    total += tl.load(shared + row * H + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(out + row * H + h, total.to(tl.bfloat16), mask=h < H)


def gate_up(
    x: Tensor, w13: Tensor, chosen: Tensor, groups: Groups, act: Tensor, config: TileConfig | None = None,
    early: bool = False, shared: SharedExperts | None = None, ahead: int = 0,
) -> None:  # fmt: skip
    """``x`` bf16 [T, H], ``w13`` bf16 [E, 2f, H], gate rows then up rows, ``chosen`` int32 [T, k] and its groups.

    -> ``act`` bf16 [T * k, f], of ``shared`` too where given. Rows of padding are neither read nor written in ``act``.
    ``ahead``: elements of K of each shared weight row that an early launch asks the L2 for.
    """
    hidden, width = w13.shape[2], w13.shape[1] // 2
    assert x.shape == (chosen.shape[0], hidden), (x.shape, chosen.shape, w13.shape)
    _check_groups(chosen, groups, act, width)
    _check_products(x, w13, act)
    config = config or tile_config("w13", hidden)
    num_rows, num_shared, operands = len(x), 0, (None, None, None)
    if shared is not None:
        num_shared, operands = shared.act.shape[1] // width, (shared.w13, shared.gamma, shared.act)
        assert shared.w13.shape == (num_shared * 2 * width, hidden) and not config.tma, (
            shared.w13.shape,
            config,
        )
        assert shared.act.shape == (num_rows, num_shared * width), (shared.act.shape, num_rows)
        assert shared.gamma.shape == (num_rows, chosen.shape[1] + num_shared), shared.gamma.shape
        _check_products(shared.w13, shared.act)
    num_tiles = num_shared * triton.cdiv(num_rows, groups.tile_rows) + groups.num_tiles
    _gate_up_kernel[(triton.cdiv(width, config.block_m), num_tiles)](
        x, config.weights(w13), chosen, groups.order, groups.tiles, act, *operands, chosen.numel(), num_rows, hidden,
        width, chosen.shape[1], _direct_block(groups, config), config.block_m, groups.tile_rows, config.block_k,
        config.tma, early, ahead, num_shared,
        num_warps=config.num_warps, launch_pdl=early, num_stages=config.stages(groups.tile_rows, 2),
    )  # fmt: skip


def down(
    act: Tensor, w2: Tensor, chosen: Tensor, groups: Groups, slots: Tensor, config: TileConfig | None = None,
    early: bool = False, ahead: int = 0,
) -> None:  # fmt: skip
    """``act`` bf16 [T * k, f], ``w2`` bf16 [E, H, f], ``chosen`` int32 [T, k] and its groups -> ``slots`` [T, k, H].

    Launched early it has to follow ``gate_up``: it reads the choice, and asks for ``ahead`` elements of K of each
    weight row, before ``gate_up`` has ended.
    """
    hidden, width = w2.shape[1:]
    assert slots.shape == (*chosen.shape, hidden), (slots.shape, chosen.shape, w2.shape)
    _check_groups(chosen, groups, act, width)
    _check_products(act, w2, slots)
    config = config or tile_config("w2", width)
    _down_kernel[(triton.cdiv(hidden, config.block_m), groups.num_tiles)](
        act, config.weights(w2), chosen, groups.order, groups.tiles, slots, chosen.numel(), width, hidden,
        _direct_block(groups, config), config.block_m, groups.tile_rows, config.block_k, config.tma, early,
        ahead, num_warps=config.num_warps, launch_pdl=early, num_stages=config.stages(groups.tile_rows),
    )  # fmt: skip


def combine_slots(
    slots: Tensor, chosen: Tensor, gamma: Tensor, shared: Tensor, out: Tensor, early: bool = False
) -> None:
    """``slots`` [T, k, H], ``shared`` [T, H], bf16, ``chosen`` [T, k], ``gamma`` fp32 [T, k+S] -> ``out`` bf16 [T, H].

    ``shared`` is the shared experts' output, weighted already. Padding rows (expert -1) are not written.
    """
    num_rows, top_k, hidden = slots.shape
    assert chosen.shape == (num_rows, top_k) and gamma.shape[0] == num_rows, (chosen.shape, gamma.shape)
    assert shared.shape == out.shape == (num_rows, hidden), (shared.shape, out.shape)
    assert gamma.dtype == torch.float32 and chosen.dtype == torch.int32, (gamma.dtype, chosen.dtype)
    assert all(x.is_contiguous() for x in (chosen, gamma))
    _check_products(slots, shared, out)
    block = min(_BLOCK_H, triton.next_power_of_2(hidden))
    _combine_kernel[(num_rows, triton.cdiv(hidden, block))](
        slots, chosen, gamma, shared, out, hidden, gamma.shape[1] - top_k, top_k, block, early,
        num_warps=4, launch_pdl=early, enable_fp_fusion=False,  # the reference rounds each product
    )  # fmt: skip


def _direct_block(groups: Groups, config: TileConfig) -> int:
    """Pairs that a program looks through for those of its expert, one a thread at least; 0: it has a list."""
    return max(32 * config.num_warps, triton.next_power_of_2(groups.order.numel())) if groups.is_direct else 0


def _check_groups(chosen: Tensor, groups: Groups, act: Tensor, width: int) -> None:
    assert chosen.dtype == torch.int32 and chosen.is_contiguous(), (chosen.dtype, chosen.stride())
    assert groups.order.numel() == chosen.numel(), (groups.order.shape, chosen.shape)
    assert act.shape == (chosen.numel(), width), (act.shape, chosen.shape, width)


def _check_products(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.dtype == torch.bfloat16 and x.is_contiguous(), (x.dtype, x.shape, x.stride())
        assert x.shape[-1] % 16 == 0 and x.data_ptr() % 16 == 0, (x.shape, x.data_ptr() % 16)


def _serving(
    hidden: int, width: int, top_k: int, block_n: int, block_p: int = 0, config: TileConfig | None = None,
    early: bool = False, num_shared: int = 0,
) -> list[Serving]:  # fmt: skip
    """``block_p`` 0: with a tile list."""
    up, down_ = config or tile_config("w13", hidden), config or tile_config("w2", width)

    def weights(c: TileConfig) -> str:
        return f"tensordesc<bf16[{c.block_m}, {c.block_k}]>" if c.tma else "*bf16"

    def blocks(c: TileConfig) -> dict[str, object]:
        return {
            "BLOCK_M": c.block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": c.block_k,
            "TMA": c.tma,
            "BLOCK_P": block_p,
            "EARLY": early,
            "AHEAD": WHOLE if early else 0,
        }

    pairs = {"chosen": "*i32", "order": "*i32", "tiles": "*i32", "num_pairs": "i32"}
    label = (
        f"H {hidden} f {width}, {block_n} rows, {block_p} pairs"
        + (f", {config}" if config else "")
        + ", early" * early
        + f", {num_shared} shared" * (num_shared > 0)
    )
    shared = {"shared_w13": "*bf16", "gamma": "*fp32", "shared_act": "*bf16"}
    present, absent = (shared, {}) if num_shared else ({}, dict.fromkeys(shared))
    options = {"wgmma": True, "options": {"launch_pdl": early}}
    return [
        Serving(f"w13 {label}", _gate_up_kernel,
                {"x": "*bf16", "w13": weights(up), "act": "*bf16", "num_rows": "i32", **pairs, **present},
                {"K": hidden, "F": width, "TOP_K": top_k, "S": num_shared, **blocks(up), **absent},
                up.num_warps, up.stages(block_n, 2), **options),
        Serving(f"w2 {label}", _down_kernel, {"act": "*bf16", "w2": weights(down_), "slots": "*bf16", **pairs},
                {"K": width, "H": hidden, **blocks(down_)}, down_.num_warps, down_.stages(block_n), **options),
    ]  # fmt: skip


_COMBINE = {"slots": "*bf16", "chosen": "*i32", "gamma": "*fp32", "shared": "*bf16", "out": "*bf16"}
SERVING = [
    *(s for n in (16, 32, 64, 128) for s in _serving(4096, 2048, 6, n)),
    *_serving(4096, 2048, 6, 16, 128),
    *(s for n in (16, 64) for s in _serving(2048, 1536, 6, n)),
    *_serving(2048, 1536, 6, 16, 128),
    *_serving(2048, 1536, 6, 16, 128, early=True, num_shared=2),
    *_serving(2048, 1536, 6, 16, early=True, num_shared=2),
    *_serving(4096, 2048, 6, 16, 128, early=True, num_shared=2),
    *(Serving(f"combine H 4096{', early' * early}", _combine_kernel, _COMBINE,
              {"H": 4096, "S": 2, "TOP_K": 6, "BLOCK_H": _BLOCK_H, "EARLY": early},
              options={"enable_fp_fusion": False, "launch_pdl": early})
      for early in (False, True)),
]  # fmt: skip

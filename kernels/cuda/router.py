"""Gate selection, and the grouping of (row, slot) pairs by expert, on the device.

    score  = sigmoid(logit) + bias;  the k largest are chosen, ties to the lowest id
    gamma  = scale * softmax of log sigmoid over the chosen and the shared experts

``kernels.mlp`` holds the reference. A pair is ``row * k + slot``. Padding rows choose expert -1 and join no group.

``early``: see ``kernels.cuda.early_launch``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.compile import Serving
from kernels.cuda.configs import FEW_ROWS, SHARED_ROWS, product_config
from kernels.cuda.early_launch import begin_launch

DIRECT_ROWS = 16  # up to these no grouping is launched


@triton.jit
def _choose_kernel(
    logits,  # fp32 [T, E + S]
    bias,  # fp32 [E]
    row_slot,  # int32 [T], -1: padding row
    chosen,  # int32 [T, k]
    gamma,  # fp32 [T, k + S]
    scale,
    E: tl.constexpr, S: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_A: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert, active = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_A)
    b_bias = tl.load(bias + expert, mask=expert < E, other=0.0)
    begin_launch(EARLY)
    if tl.load(row_slot + row) < 0:
        tl.store(chosen + row * TOP_K + active, tl.full((BLOCK_A,), -1, tl.int32), mask=active < TOP_K)
        return
    logit = tl.load(logits + row * (E + S) + expert, mask=expert < E, other=0.0)
    score = 1.0 / (1.0 + tl.exp(-logit)) + b_bias
    score = tl.where(expert < E, score, float("-inf"))
    is_active = active < TOP_K + S
    is_shared = is_active & (active >= TOP_K)
    picked = tl.where(is_shared, E + active - TOP_K, 0)
    for slot in tl.static_range(TOP_K):
        is_best = score == tl.max(score, 0)
        best = tl.min(tl.where(is_best, expert, E - 1), 0)  # NaN scores must not lead out of the weights
        picked = tl.where(active == slot, best, picked)
        score = tl.where(expert == best, float("-inf"), score)
    tl.store(chosen + row * TOP_K + active, picked, mask=active < TOP_K)
    active_logit = tl.load(logits + row * (E + S) + picked, mask=is_active, other=0.0)
    log_sigmoid = tl.minimum(active_logit, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(active_logit)))
    log_sigmoid = tl.where(is_active, log_sigmoid, float("-inf"))
    share = tl.exp(log_sigmoid - tl.max(log_sigmoid, 0))
    tl.store(gamma + row * (TOP_K + S) + active, share / tl.sum(share, 0) * scale, mask=is_active)


def choose_experts(
    logits: Tensor,
    bias: Tensor,
    row_slot: Tensor,
    scale: float,
    chosen: Tensor,
    gamma: Tensor,
    early: bool = False,
) -> None:
    """``logits`` fp32 [T, E+S], ``bias`` fp32 [E], ``row_slot`` int32 [T] -> ``chosen`` int32 [T, k], ``gamma``.

    ``gamma`` is fp32 [T, k+S]: the chosen in slot order, then the shared. Padding rows get expert -1 and no gamma.
    """
    (num_rows, width), num_experts, top_k = logits.shape, bias.shape[0], chosen.shape[1]
    num_shared = width - num_experts
    assert gamma.shape == (num_rows, top_k + num_shared) and chosen.shape[0] == num_rows == row_slot.shape[0]
    assert logits.dtype == bias.dtype == gamma.dtype == torch.float32, (logits.dtype, bias.dtype, gamma.dtype)
    assert chosen.dtype == row_slot.dtype == torch.int32 and top_k <= num_experts, (
        chosen.dtype,
        row_slot.dtype,
    )
    assert all(x.is_contiguous() for x in (logits, bias, row_slot, chosen, gamma))
    _choose_kernel[(num_rows,)](
        logits, bias, row_slot, chosen, gamma, scale, num_experts, num_shared, top_k,
        triton.next_power_of_2(num_experts), triton.next_power_of_2(top_k + num_shared), early,
        num_warps=1, launch_pdl=early,
    )  # fmt: skip


@dataclass
class Groups:
    """Pairs by expert, in tiles of at most ``tile_rows``; sizes depend on T, k and E alone.

    Up to DIRECT_ROWS rows a tile stands for a pair, and the products find the pairs of its expert by themselves.
    """

    order: (
        Tensor  # int32 [T * k] pairs by expert, ascending within one; the places of padding rows hold nothing
    )
    tiles: Tensor  # int32 [tiles, 3] (expert, first place in ``order``, pairs); expert -1: unused
    tile_rows: int
    is_direct: bool  # order and tiles hold nothing

    @property
    def num_tiles(self) -> int:
        return self.tiles.shape[0]


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """Rows of a tile: few waste nothing on small groups, many read a large group's weights once."""
    mean = num_pairs / num_experts
    return 16 if mean <= 8 else 32 if mean <= 20 else 64 if mean <= 80 else 128


def launch_sizes(products: tuple[tuple[int, int], ...], experts: tuple[int, int], most: int) -> list[int]:
    """Row counts up to ``most``, one for each set of kernels that a pass launches. ``products``: (N, K) of its
    weights; ``experts``: their number and those of a row."""
    (num_experts, top_k), sizes = experts, {}
    for rows in range(1, most + 1):
        pairs = triton.next_power_of_2(rows * top_k) if rows <= DIRECT_ROWS else 0
        configs = tuple(product_config(n, k, rows) for n, k in products)
        limits = rows <= SHARED_ROWS, rows <= FEW_ROWS
        sizes.setdefault((configs, pairs, tile_rows(rows * top_k, num_experts), limits), rows)
    return list(sizes.values())


def allocate_groups(
    num_rows: int, top_k: int, num_experts: int, device: torch.device | str, rows: int | None = None
) -> Groups:
    """Room for every routing of ``num_rows`` rows; ``rows`` of a tile by default as ``tile_rows`` has it."""
    num_pairs = num_rows * top_k
    is_direct = rows is None and num_rows <= DIRECT_ROWS
    rows = DIRECT_ROWS if is_direct else rows or tile_rows(num_pairs, num_experts)
    num_tiles = num_pairs if is_direct else min(num_pairs, num_experts + num_pairs // rows)
    return Groups(
        torch.empty(num_pairs, dtype=torch.int32, device=device),
        torch.empty(num_tiles, 3, dtype=torch.int32, device=device),
        rows,
        is_direct,
    )


@triton.jit
def direct_tile(chosen, tile, num_pairs, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """-> expert, pairs [BLOCK_N] and which of them exist, of ``tile``; expert -1: an earlier tile has it.

    No expert has more than BLOCK_N pairs. The pairs are in ascending order.
    """
    pair = tl.arange(0, BLOCK_P)
    expert = tl.load(chosen + tile, cache_modifier=".cg")  # a program may ask before it waits, and find old lines in L1
    is_mine = tl.load(chosen + pair, mask=pair < num_pairs, other=-1, cache_modifier=".cg") == expert
    rank = tl.cumsum(is_mine.to(tl.int32), 0) - 1
    taken = is_mine[:, None] & (rank[:, None] == tl.arange(0, BLOCK_N)[None, :])
    pairs = tl.sum(tl.where(taken, pair[:, None], 0), 0)
    is_first = tl.min(tl.where(is_mine, pair, BLOCK_P), 0) == tile
    return tl.where(is_first, expert, -1), pairs, tl.arange(0, BLOCK_N) < tl.sum(is_mine.to(tl.int32), 0)


@triton.jit
def grouped_tile(order, tiles, tile, BLOCK_N: tl.constexpr):
    """-> expert, pairs [BLOCK_N] and which of them exist, of ``tile``; expert -1: unused."""
    entry = tiles + tile * 3
    held = tl.arange(0, BLOCK_N) < tl.load(entry + 2, cache_modifier=".cg")
    places = order + tl.load(entry + 1, cache_modifier=".cg") + tl.arange(0, BLOCK_N)
    pairs = tl.load(places, mask=held, other=0, cache_modifier=".cg")
    return tl.load(entry, cache_modifier=".cg"), pairs, held


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _group_kernel(
    chosen,  # int32 [num_pairs]
    order,  # int32 [num_pairs]
    tiles,  # int32 [num_tiles, 3]
    num_pairs,
    num_tiles,
    E: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program e places the pairs of expert e, program E marks the unused tiles. Each counts all pairs for itself."""
    begin_launch(EARLY)
    mine = tl.program_id(0)
    expert, lane = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_P)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, num_pairs, BLOCK_P):
        ids = tl.load(chosen + start + lane, mask=start + lane < num_pairs, other=-1)
        counts += tl.histogram(ids, BLOCK_E, mask=ids >= 0)
    tile_counts = (counts + TILE_ROWS - 1) // TILE_ROWS
    first_place = tl.sum(tl.where(expert < mine, counts, 0), 0)
    first_tile = tl.sum(tl.where(expert < mine, tile_counts, 0), 0)
    if mine == E:
        for start in range(first_tile, num_tiles, BLOCK_P):
            tile = start + lane
            tl.store(tiles + tile * 3, tl.full((BLOCK_P,), -1, tl.int32), mask=tile < num_tiles)
            tl.store(tiles + tile * 3 + 2, tl.zeros((BLOCK_P,), tl.int32), mask=tile < num_tiles)
        return
    count = tl.sum(tl.where(expert == mine, counts, 0), 0)
    for start in range(0, count, BLOCK_P * TILE_ROWS):
        begin = start + lane * TILE_ROWS
        entry = tiles + (first_tile + begin // TILE_ROWS) * 3
        tl.store(entry, tl.zeros((BLOCK_P,), tl.int32) + mine, mask=begin < count)
        tl.store(entry + 1, first_place + begin, mask=begin < count)
        tl.store(entry + 2, tl.minimum(count - begin, TILE_ROWS), mask=begin < count)
    place = first_place
    for start in range(0, num_pairs, BLOCK_P):
        pair = start + lane
        is_mine = (tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == mine).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_mine, 0) - 1, pair, mask=is_mine != 0)
        place += tl.sum(is_mine, 0)


def group_pairs(chosen: Tensor, num_experts: int, groups: Groups, early: bool = False) -> None:
    """``chosen`` int32 [T, k], -1: none -> ``groups``. Integer work alone: the same input gives the same tiles."""
    assert chosen.dtype == torch.int32 and chosen.is_contiguous(), (chosen.dtype, chosen.stride())
    assert groups.order.numel() == chosen.numel(), (groups.order.shape, chosen.shape)
    if groups.is_direct:
        return
    block = 128 if chosen.numel() <= 128 else 512
    _group_kernel[(num_experts + 1,)](
        chosen, groups.order, groups.tiles, chosen.numel(), groups.num_tiles, num_experts, groups.tile_rows,
        max(32, triton.next_power_of_2(num_experts)), block, early, num_warps=4, launch_pdl=early,
    )  # fmt: skip


def _serving(num_experts: int, num_shared: int, top_k: int) -> list[Serving]:
    block_e = max(32, triton.next_power_of_2(num_experts))
    choose = Serving(
        f"choose {num_experts}+{num_shared} top {top_k}", _choose_kernel,
        {"logits": "*fp32", "bias": "*fp32", "row_slot": "*i32", "chosen": "*i32", "gamma": "*fp32", "scale": "fp32"},
        {"E": num_experts, "S": num_shared, "TOP_K": top_k, "BLOCK_E": triton.next_power_of_2(num_experts),
         "BLOCK_A": triton.next_power_of_2(top_k + num_shared), "EARLY": True}, num_warps=1,
        options={"launch_pdl": True},
    )  # fmt: skip
    signature = {"chosen": "*i32", "order": "*i32", "tiles": "*i32", "num_pairs": "i32", "num_tiles": "i32"}
    groups = [
        Serving(f"group {num_experts} in tiles of {rows}, {block} pairs", _group_kernel, signature,
                {"E": num_experts, "TILE_ROWS": rows, "BLOCK_E": block_e, "BLOCK_P": block, "EARLY": rows == 16},
                options={"launch_pdl": rows == 16})
        for rows, block in ((16, 128), (16, 512), (64, 512))
    ]  # fmt: skip
    return [choose, *groups]


SERVING = [*_serving(256, 2, 6), *_serving(128, 2, 6), *_serving(32, 1, 2)]

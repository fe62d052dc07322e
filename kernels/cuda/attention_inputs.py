"""From the fused product to what attention reads: normed q, cached k and v, and the bias bank, in one launch.

    q^ = norm(q) * tau      k^ = norm(conv(k))      v = conv(v)      B[h, delta] = (r_h . P[:, delta]) * tau
    tau_t = 1 + alpha * ln(max((t + 1) / floor, 1))       full layers only; 1 below the floor

k and v are rounded after the convolution and before the norm, q and B before and after tau. Programs of two roles:
the first own some heads of q, k or v for a run of rows (one binary, so the length of the run changes no bit); the
others own all heads of one row at BLOCK_R places of the bank (``bank_order``), one product of K = 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isinf

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.bank_order import BANK_ALIGN, bank_origin, bank_width
from kernels.cuda.compile import Serving
from kernels.cuda.early_launch import ask_for, begin_launch
from kernels.cuda.norm import check_rows
from kernels.cuda.rows_meta import Rows, page_place
from kernels.cuda.short_conv import HISTORY, convolved

REL_WIDTH = 16  # of r
LEAST_BLOCK_R = 64  # the M side of the instruction
_ROW_PROGRAMS = 132 * 16  # that the rows of a long pass are spread over
_ALL_ROWS = 2**31 - 1
# (heads, KV heads, head width, extent): places of a bank program
CONFIGS: dict[tuple[int, int, int, int], int] = {}


@triton.jit
def attention_temperature(position, log_floor, log_alpha):
    """tau of ``position``, fp32: exactly 1 below the floor."""
    return 1.0 + log_alpha * tl.log(tl.maximum((position + 1).to(tl.float32) / log_floor, 1.0))


@triton.jit
def _normed_heads(b_x, b_w, eps, D: tl.constexpr):
    """fp32 [heads, D] normed per head by fp32 weights [D]."""
    mean_square = tl.sum(b_x * b_x, 1) / D
    return b_x * tl.rsqrt(mean_square + eps)[:, None] * b_w[None, :]


@triton.jit
def _query_rows(
    qkvr, q_norm, q, slots, positions, first, count, tile, log_floor, log_alpha, eps,
    ROW: tl.constexpr, NUM_HEADS: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, HAS_TAU: tl.constexpr,
):  # fmt: skip
    head = tile * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, D)
    channel = head[:, None] * D + dim[None, :]
    mask = (head < NUM_HEADS)[:, None]
    b_w = tl.load(q_norm + dim).to(tl.float32)
    for index in range(0, count):
        row = first + index
        held = mask & (tl.load(slots + row) >= 0)
        b_q = tl.load(qkvr + row * ROW + channel, mask=held, other=0.0)
        b_out = _normed_heads(b_q.to(tl.float32), b_w, eps, D).to(b_q.dtype)
        if HAS_TAU:
            tau = attention_temperature(tl.load(positions + row), log_floor, log_alpha)
            b_out = (b_out.to(tl.float32) * tau).to(b_q.dtype)
        tl.store(q + row * (NUM_HEADS * D) + channel, b_out, mask=held)


@triton.jit
def _key_value_rows(
    qkvr, k_norm, taps, conv_cache, key_cache, value_cache, k, v, slots, positions, offsets, from_ends,
    conv_pages, pages, first, count, is_key, tile, conv_pages_per_slot, pages_per_slot, keep_inputs, keep_keys, eps,
    ROW: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    CONV_PAGE: tl.constexpr, PAGE: tl.constexpr, HAS_PASS: tl.constexpr,
):  # fmt: skip
    head = tile * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, D)
    own = head[:, None] * D + dim[None, :]
    channel = tl.where(is_key, own, own + NUM_KV * D)  # in the convolution
    mask = (head < NUM_KV)[:, None] & (dim >= 0)[None, :]
    CHANNELS: tl.constexpr = 2 * NUM_KV * D
    u = qkvr + NUM_HEADS * D
    b_norm = tl.load(k_norm + dim).to(tl.float32)
    for index in range(0, count):
        row = first + index
        slot, position = tl.load(slots + row), tl.load(positions + row)
        offset, from_end = tl.load(offsets + row), tl.load(from_ends + row)
        b_u = tl.load(u + row * ROW + channel, mask=mask & (slot >= 0), other=0.0)
        b_y = convolved(
            b_u, u, ROW, taps, conv_cache, CHANNELS, conv_pages, row, slot, position, offset, channel,
            mask & (slot >= 0), conv_pages_per_slot, CONV_PAGE,
        ).to(b_u.dtype)  # fmt: skip
        if is_key:
            b_y = _normed_heads(b_y.to(tl.float32), b_norm, eps, D).to(b_u.dtype)
        conv_kept = (slot >= 0) & (from_end <= keep_inputs)
        conv_place = page_place(conv_pages, slot, position, conv_pages_per_slot, CONV_PAGE, conv_kept)
        tl.store(conv_cache + conv_place * CHANNELS + channel, b_u, mask=mask & conv_kept)

        kept = (slot >= 0) & (from_end <= keep_keys)
        place = page_place(pages, slot, position, pages_per_slot, PAGE, kept)
        at = (place // PAGE * NUM_KV * PAGE + place % PAGE + head[:, None] * PAGE) * D + dim[None, :]
        held = mask & (slot >= 0)
        if is_key:
            tl.store(key_cache + at, b_y, mask=mask & kept)
            if HAS_PASS:
                tl.store(k + row * (NUM_KV * D) + own, b_y, mask=held)
        else:
            tl.store(value_cache + at, b_y, mask=mask & kept)
            if HAS_PASS:
                tl.store(v + row * (NUM_KV * D) + own, b_y, mask=held)


@triton.jit
def _bank_tile(
    r, rel_proj, bank, slots, positions, tile, log_floor, log_alpha,
    ROW: tl.constexpr, NUM_HEADS: tl.constexpr, EXTENT: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr, HAS_TAU: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = (EXTENT + 2 * BANK_ALIGN - 2) // BANK_ALIGN * BANK_ALIGN
    TILES: tl.constexpr = (WIDTH + BLOCK_R - 1) // BLOCK_R
    row = (tile // TILES).to(tl.int64)
    position, kept = tl.load(positions + row), tl.load(slots + row) >= 0
    place = tile % TILES * BLOCK_R + tl.arange(0, BLOCK_R)
    distance = position - bank_origin(position, EXTENT) - place
    head, rel = tl.arange(0, BLOCK_HEADS), tl.arange(0, 16)
    held = (head < NUM_HEADS) & kept
    b_r = tl.load(r + row * ROW + head[:, None] * 16 + rel[None, :], mask=held[:, None], other=0.0)
    inside = (distance >= 0) & (distance < EXTENT)
    b_p = tl.load(rel_proj + distance[:, None] * 16 + rel[None, :], mask=inside[:, None], other=0.0)
    b_bank = tl.trans(tl.dot(b_p, tl.trans(b_r))).to(bank.dtype.element_ty)
    if HAS_TAU:
        tau = attention_temperature(position, log_floor, log_alpha)
        b_bank = (b_bank.to(tl.float32) * tau).to(bank.dtype.element_ty)
    at = row * (NUM_HEADS * WIDTH) + head[:, None] * WIDTH + place[None, :]
    tl.store(bank + at, b_bank, mask=held[:, None] & (place < WIDTH)[None, :])


@triton.jit(
    do_not_specialize=["num_rows", "run", "conv_pages_per_slot", "pages_per_slot", "keep_inputs", "keep_keys"]
)
def _attention_inputs_kernel(
    qkvr, q_norm, k_norm, taps, rel_proj, conv_cache, key_cache, value_cache, q, k, v, bank,
    slots, positions, offsets, from_ends, conv_pages, pages,
    num_rows, run, conv_pages_per_slot, pages_per_slot, keep_inputs, keep_keys, log_floor, log_alpha, eps,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, EXTENT: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_R: tl.constexpr, CONV_PAGE: tl.constexpr, PAGE: tl.constexpr,
    HAS_TAU: tl.constexpr, HAS_PASS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    ROW: tl.constexpr = NUM_HEADS * D + 2 * NUM_KV * D + NUM_HEADS * 16
    Q_TILES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_TILES: tl.constexpr = (NUM_KV + HEADS - 1) // HEADS
    PARTS: tl.constexpr = Q_TILES + 2 * KV_TILES
    program = tl.program_id(0)
    row_programs = tl.cdiv(num_rows, run) * PARTS
    if EARLY:
        if program == 0:
            ask_for(taps, 8 * NUM_KV * D)
            ask_for(q_norm, D)
            ask_for(k_norm, D)
        elif program == row_programs:
            ask_for(rel_proj, EXTENT * 16)
    begin_launch(EARLY)
    if program < row_programs:
        part = program % PARTS
        first = (program // PARTS).to(tl.int64) * run
        count = tl.minimum(run, num_rows - first)
        if part < Q_TILES:
            _query_rows(
                qkvr, q_norm, q, slots, positions, first, count, part, log_floor, log_alpha, eps,
                ROW, NUM_HEADS, D, HEADS, HAS_TAU,
            )  # fmt: skip
        else:
            is_key = part < Q_TILES + KV_TILES
            _key_value_rows(
                qkvr, k_norm, taps, conv_cache, key_cache, value_cache, k, v, slots, positions, offsets, from_ends,
                conv_pages, pages, first, count, is_key, (part - Q_TILES) % KV_TILES,
                conv_pages_per_slot, pages_per_slot, keep_inputs, keep_keys, eps,
                ROW, NUM_HEADS, NUM_KV, D, HEADS, CONV_PAGE, PAGE, HAS_PASS,
            )  # fmt: skip
    else:
        _bank_tile(
            qkvr + (NUM_HEADS + 2 * NUM_KV) * D, rel_proj, bank, slots, positions, program - row_programs,
            log_floor, log_alpha, ROW, NUM_HEADS, EXTENT, BLOCK_HEADS, BLOCK_R, HAS_TAU,
        )  # fmt: skip


def program_heads(num_heads: int, num_kv: int, head_dim: int) -> int:
    """Heads of one row that a program of the first role owns: 8 to 16 elements a thread at 4 warps."""
    of_kv = min(triton.next_power_of_2(num_kv), max(1, 2048 // head_dim))
    of_q = min(triton.next_power_of_2(num_heads), max(1, 1024 // head_dim))
    return max(of_kv, of_q)


def bank_block(num_heads: int, num_kv: int, head_dim: int, extent: int) -> int:
    """Places of one bank program."""
    block = CONFIGS.get((num_heads, num_kv, head_dim, extent), 128)
    return min(block, max(LEAST_BLOCK_R, triton.next_power_of_2(bank_width(extent))))


def bank_heads(num_heads: int) -> int:
    """Heads of one bank program: the N side of the instruction."""
    return max(16, triton.next_power_of_2(num_heads))


@dataclass(frozen=True)
class LayerGeometry:
    """What one layer's attention inputs depend on, beside its weights."""

    num_heads: int
    num_kv: int
    head_dim: int  # a power of two
    extent: int  # R
    window: int | None  # visible keys, the row's own included; None: full, with tau
    eps: float
    log_floor: float = 1.0
    log_alpha: float = 0.0  # 0: no tau
    keep_after: int = 1  # positions before the end of a pass that the next pass may start at

    @property
    def row_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv) * self.head_dim + self.num_heads * REL_WIDTH

    @property
    def keep_keys(self) -> int:
        """Rows before the end of a segment whose keys and values are kept."""
        return _ALL_ROWS if self.window is None else self.window - 1 + self.keep_after


def attention_inputs(
    qkvr: Tensor,  # [T, n_q*d + 2*n_kv*d + n_q*16]
    q_norm: Tensor,  # [d]
    k_norm: Tensor,
    taps: Tensor,  # [4, 2*n_kv*d] of k, then of v
    rel_proj: Tensor,  # [R, 16]: P transposed
    conv_cache: Tensor,  # [slots, 2*n_kv*d]
    key_cache: Tensor,  # [pages, n_kv, page_size, d]
    value_cache: Tensor,
    q: Tensor,  # [T, n_q, d], written
    bank: Tensor,  # [T, n_q, bank_width(R)], written
    rows: Rows,
    conv_pages: Tensor,  # int32 [sequence slots, pages of one sequence]
    conv_page_size: int,
    pages: Tensor,  # int32, of the layer's kind
    geometry: LayerGeometry,
    pass_keys: tuple[Tensor, Tensor] | None = None,  # k and v of this pass, each [T, n_kv, d], written
    run: int | None = None,  # rows of one program
    block_r: int | None = None,
    early: bool = False,
) -> None:
    """Writes q, the bank, the kept keys, values and convolution inputs; padding rows change nothing.

    Kept: convolution inputs of rows with from_end <= 3 + keep_after; keys and values of all rows (full layers) or of
    those with from_end <= window - 1 + keep_after.
    """
    g = geometry
    num_rows, has_tau = rows.num_rows, g.window is None and g.log_alpha != 0
    assert qkvr.shape == (num_rows, g.row_width), (qkvr.shape, g)
    assert bank.shape == (num_rows, g.num_heads, bank_width(g.extent)), (bank.shape, g)
    assert rel_proj.shape == (g.extent, REL_WIDTH) and rel_proj.dtype == qkvr.dtype, (
        rel_proj.shape,
        rel_proj.dtype,
    )
    assert pages.dtype == conv_pages.dtype == torch.int32 and not isinf(g.log_floor), (
        pages.dtype,
        g.log_floor,
    )
    check_rows(g.row_width, qkvr)
    check_rows(2 * g.num_kv * g.head_dim, taps, conv_cache)
    check_rows(g.head_dim, q_norm, k_norm, key_cache, value_cache, q, *(pass_keys or ()))
    heads = program_heads(g.num_heads, g.num_kv, g.head_dim)
    block_r = block_r or bank_block(g.num_heads, g.num_kv, g.head_dim, g.extent)
    parts = triton.cdiv(g.num_heads, heads) + 2 * triton.cdiv(g.num_kv, heads)
    run = run or max(1, triton.cdiv(num_rows * parts, _ROW_PROGRAMS))
    bank_programs = num_rows * triton.cdiv(bank_width(g.extent), block_r)
    k, v = pass_keys or (None, None)
    _attention_inputs_kernel[(triton.cdiv(num_rows, run) * parts + bank_programs,)](
        qkvr, q_norm, k_norm, taps, rel_proj, conv_cache, key_cache, value_cache, q, k, v, bank,
        rows.slot, rows.position, rows.offset, rows.from_end, conv_pages, pages,
        num_rows, run, conv_pages.shape[1], pages.shape[1], HISTORY + g.keep_after, g.keep_keys,
        g.log_floor, g.log_alpha, g.eps,
        NUM_HEADS=g.num_heads, NUM_KV=g.num_kv, D=g.head_dim, EXTENT=g.extent, HEADS=heads,
        BLOCK_HEADS=bank_heads(g.num_heads), BLOCK_R=block_r, CONV_PAGE=conv_page_size, PAGE=key_cache.shape[2],
        HAS_TAU=has_tau, HAS_PASS=pass_keys is not None, EARLY=early, num_warps=4, num_stages=1, launch_pdl=early,
        enable_fp_fusion=False,
    )  # fmt: skip


def _serving(
    name: str, num_heads: int, num_kv: int, window: bool, extent: int, in_pass: bool, early: bool = False
) -> Serving:
    pointers = dict.fromkeys(
        [
            "qkvr",
            "q_norm",
            "k_norm",
            "taps",
            "rel_proj",
            "conv_cache",
            "key_cache",
            "value_cache",
            "q",
            "bank",
        ],
        "*bf16",
    )
    rows = dict.fromkeys(["slots", "positions", "offsets", "from_ends", "conv_pages", "pages"], "*i32")
    integers = ["num_rows", "run", "conv_pages_per_slot", "pages_per_slot", "keep_inputs", "keep_keys"]
    numbers = dict.fromkeys(integers, "i32") | dict.fromkeys(["log_floor", "log_alpha", "eps"], "fp32")
    passed = {"k": "*bf16", "v": "*bf16"} if in_pass else {}
    absent = {} if in_pass else {"k": None, "v": None}
    constants = {
        "NUM_HEADS": num_heads, "NUM_KV": num_kv, "D": 128, "EXTENT": extent,
        "HEADS": program_heads(num_heads, num_kv, 128), "BLOCK_HEADS": bank_heads(num_heads),
        "BLOCK_R": bank_block(num_heads, num_kv, 128, extent), "CONV_PAGE": 16, "PAGE": 64,
        "HAS_TAU": not window, "HAS_PASS": in_pass, "EARLY": early,
    }  # fmt: skip
    return Serving(
        f"attention_inputs {name}{', early' * early}", _attention_inputs_kernel, pointers | passed | rows | numbers,
        absent | constants, num_warps=4, num_stages=1, wgmma=True,
        options={"enable_fp_fusion": False, "launch_pdl": early},
    )  # fmt: skip


SERVING = [
    _serving("full 32/8", 32, 8, False, 1024, False),
    _serving("local 32/8", 32, 8, True, 512, True),
    _serving("full 64/8", 64, 8, False, 1024, False),
    _serving("local 64/16", 64, 16, True, 512, True),
    _serving("full 4/1", 4, 1, False, 1024, False),
    _serving("full 16/4", 16, 4, False, 1024, False, early=True),
    _serving("local 16/4", 16, 4, True, 512, False, early=True),
]

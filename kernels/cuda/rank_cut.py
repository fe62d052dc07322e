"""Where top_k and top_p cut a row of logits: the last value and id that they leave, without a sort.

A first launch keeps, for every tile of ids, the keys and masses of those near the row's largest; a second bisects the
keys of a row, then the ids of equal keys, by counts (top_k) or masses (top_p): over the candidates where these hold
the cut, otherwise over the whole row. Counts and masses are integers, so no order changes a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.compile import Serving
from kernels.sampling import MIN_TEMPERATURE, SamplingRows

_CANDIDATES = 256  # slots of a tile
_MAX_BLOCK = 4096  # values of one step of the cut: integer sums, so any will do
_REACH = tl.constexpr(12.0)  # a candidate is within e^-12 of the largest probability
_LOWEST = tl.constexpr(-2139095041)  # the key of -inf
# Logits may have any stride and address: one binary for all, since the width of a load may order a sum.
ANY_LOGITS = triton.jit(
    do_not_specialize=["stride", "vocab_size", "num_tiles"], do_not_specialize_on_alignment=["logits"]
)
LOWEST_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)


@triton.jit
def exp_nonpositive(x):
    """e^x of fp32 x <= 0 within 1 ulp (Cephes' expf polynomial); 0 below 2^-126. Same bits in the interpreter."""
    x = tl.maximum(x, -100.0)
    n = tl.floor(x * 1.44269504088896341 + 0.5)
    r = x - n * 0.693359375
    r = r + n * 2.12194440e-4
    p = 1.9875691500e-4 * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = p * (r * r) + r + 1.0
    exponent = tl.maximum(n, -126.0).to(tl.int32) + 127
    return tl.where(x < -87.0, 0.0, p * (exponent << 23).to(tl.float32, bitcast=True))


@triton.jit
def ordered_key(x):
    """int32 that orders as fp32 ``x`` does; -0 is 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def scaled_logits(logits, temperature, row_max, min_p):
    """Logits over the temperature, -inf below min_p; ``row_max`` is scaled."""
    x = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
    return tl.where(exp_nonpositive(x - row_max) < min_p, float("-inf"), x)


@triton.jit
def _mass(x, row_max):
    """int64 multiples of 2^-44."""
    return (exp_nonpositive(x - row_max) * 17592186044416.0).to(tl.int64)


@triton.jit
def row_maximum(part_max, row, num_tiles, TILES: tl.constexpr):
    tile = tl.arange(0, TILES)
    return tl.max(tl.load(part_max + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf")), 0)


@triton.jit
def _ranked(temperature, top_k, top_p, vocab_size):
    return (temperature > 0) & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1))


@ANY_LOGITS
def _candidates_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, part_max, found_keys, found_masses, found_ids, found_count, masses,
    stride, vocab_size, num_tiles, TILE: tl.constexpr, TILES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Keys and masses of a tile's ids near the row's largest, in order of id; their number; the tile's mass."""
    tile, row = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if _ranked(temperature, tl.load(top_ks + row), tl.load(top_ps + row), vocab_size):
        temperature = tl.maximum(temperature, LOWEST_TEMPERATURE)
        row_max = tl.div_rn(row_maximum(part_max, row, num_tiles, TILES), temperature)
        ids = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab_size, other=float("-inf"))
        scaled = scaled_logits(x, temperature, row_max, tl.load(min_ps + row))
        near = scaled >= row_max - _REACH
        place = tl.cumsum(near.to(tl.int32), 0) - 1
        at = row * num_tiles + tile
        slots = at.to(tl.int64) * SLOTS
        slot = tl.arange(0, SLOTS)
        count = tl.sum(near.to(tl.int32), 0)
        tl.store(found_keys + slots + slot, tl.full((SLOTS,), _LOWEST, tl.int32), mask=slot >= count)
        tl.store(found_masses + slots + slot, tl.zeros((SLOTS,), tl.int64), mask=slot >= count)
        stored = near & (place < SLOTS)
        mass = _mass(scaled, row_max)
        tl.store(found_keys + slots + place, ordered_key(scaled), mask=stored)
        tl.store(found_masses + slots + place, mass, mask=stored)
        tl.store(found_ids + slots + place, ids, mask=stored)
        tl.store(found_count + at, count)
        tl.store(masses + at * 2, tl.sum(mass, 0))
        tl.store(masses + at * 2 + 1, tl.sum(tl.where(near, mass, 0), 0))


@triton.jit
def _measure(
    keys, masses, logits, count, temperature, row_max, min_p, cut_key, cut_index, key, index,
    FITS: tl.constexpr, BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """fp64 number (or mass) of the values at or before both cuts: larger key, or same key and index not above.

    Values are the candidates where they suffice (FITS), otherwise the whole row.
    """
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        if FITS:
            k = tl.load(keys + i, mask=i < count, other=_LOWEST)
            mass = tl.load(masses + i, mask=i < count, other=0)
        else:
            x = tl.load(logits + i, mask=i < count, other=float("-inf"))
            x = scaled_logits(x, temperature, row_max, min_p)
            k, mass = ordered_key(x), _mass(x, row_max)
        inside = (k > cut_key) | ((k == cut_key) & (i <= cut_index))
        inside = inside & ((k > key) | ((k == key) & (i <= index))) & (i < count)
        total += tl.where(inside, mass if BY_MASS else 1, 0)
    return tl.sum(total, 0).to(tl.float64)


@triton.jit
def _cut(
    keys, masses, logits, count, temperature, row_max, min_p, cut_key, cut_index, lowest, need,
    FITS: tl.constexpr, BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(key, index) of the last value, by descending key and ascending index, that reaches ``need``."""
    low, high, last = lowest, ordered_key(row_max).to(tl.int64), count.to(tl.int64) - 1
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = _measure(
            keys, masses, logits, count, temperature, row_max, min_p, cut_key, cut_index, middle, last,
            FITS, BY_MASS, BLOCK,
        )  # fmt: skip
        low = tl.where(reached >= need, middle, low)
        high = tl.where(reached >= need, high, middle - 1)
    key = low
    tied = _measure(
        keys, masses, logits, count, temperature, row_max, min_p, key, last, key, last, FITS, False, BLOCK
    ) - _measure(
        keys, masses, logits, count, temperature, row_max, min_p, key, last, key + 1, -1, FITS, False, BLOCK
    )  # fmt: skip
    low, high = tl.where(tied > 1, 0, last), last
    while low < high:
        middle = (low + high) // 2
        reached = _measure(
            keys, masses, logits, count, temperature, row_max, min_p, cut_key, cut_index, key, middle,
            FITS, BY_MASS, BLOCK,
        )  # fmt: skip
        high = tl.where(reached >= need, middle, high)
        low = tl.where(reached >= need, low, middle + 1)
    return key, low


@triton.jit
def _limits(
    keys, masses, logits, count, temperature, row_max, min_p, top_k, top_p, has_k, mass, lowest,
    FITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(key, index) of the last value that top_k, then top_p leave; ``mass`` is the whole row's."""
    key, index = tl.full((), _LOWEST, tl.int64), count.to(tl.int64) - 1
    if has_k:
        key, index = _cut(
            keys, masses, logits, count, temperature, row_max, min_p, key, index, lowest, top_k.to(tl.float64),
            FITS, False, BLOCK,
        )  # fmt: skip
        mass = _measure(
            keys, masses, logits, count, temperature, row_max, min_p, key, index, key, index, FITS, True, BLOCK
        )  # fmt: skip
    if top_p < 1:
        key, index = _cut(
            keys, masses, logits, count, temperature, row_max, min_p, key, index, lowest,
            top_p.to(tl.float64) * mass, FITS, True, BLOCK,
        )  # fmt: skip
    return key, index


@ANY_LOGITS
def _row_cut_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, part_max, found_keys, found_masses, found_ids, found_count, masses,
    cut_values, cut_ids, stride, vocab_size, num_tiles,
    TILES: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last value and id that top_k and top_p leave, among the candidates where these suffice."""
    row = tl.program_id(0)
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    if _ranked(temperature, top_k, top_p, vocab_size):
        temperature = tl.maximum(temperature, LOWEST_TEMPERATURE)
        min_p = tl.load(min_ps + row)
        row_max = tl.div_rn(row_maximum(part_max, row, num_tiles, TILES), temperature)
        has_k = (top_k > 0) & (top_k < vocab_size)
        tile = tl.arange(0, TILES)
        at = row * num_tiles + tile
        counts = tl.load(found_count + at, mask=tile < num_tiles, other=0)
        mass = tl.sum(tl.load(masses + at * 2, mask=tile < num_tiles, other=0), 0).to(tl.float64)
        near = tl.sum(tl.load(masses + at * 2 + 1, mask=tile < num_tiles, other=0), 0).to(tl.float64)
        enough = tl.where(has_k, tl.sum(counts, 0) >= top_k, near >= top_p.to(tl.float64) * mass)
        fits = enough & (tl.max(counts, 0) <= SLOTS)
        slots = row.to(tl.int64) * num_tiles * SLOTS
        keys, row_masses, x = found_keys + slots, found_masses + slots, logits + row.to(tl.int64) * stride
        if fits:
            lowest = ordered_key(row_max - _REACH).to(tl.int64)
            key, index = _limits(
                keys, row_masses, x, num_tiles * SLOTS, temperature, row_max, min_p, top_k, top_p, has_k, mass,
                lowest, True, BLOCK,
            )  # fmt: skip
        else:
            lowest = tl.full((), _LOWEST, tl.int64)
            key, index = _limits(
                keys, row_masses, x, vocab_size, temperature, row_max, min_p, top_k, top_p, has_k, mass,
                lowest, False, BLOCK,
            )  # fmt: skip
        bits = key.to(tl.int32)
        bits = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
        # an index in unused slots is the end of a tile; the ids before it are those of the used ones
        chosen = tl.load(found_ids + slots + index, mask=fits, other=0)
        chosen = tl.where(index == num_tiles.to(tl.int64) * SLOTS - 1, vocab_size, chosen)
        tl.store(cut_values + row, bits.to(tl.float32, bitcast=True))
        tl.store(cut_ids + row, tl.where(fits, chosen, index.to(tl.int32)))
    else:
        tl.store(cut_values + row, float("-inf"))
        tl.store(cut_ids + row, vocab_size)


def _cut_warps(block: int) -> int:
    return max(4, block // 256)


def cut_rows(
    logits: Tensor, rows: SamplingRows, part_max: Tensor, tile: int, cut_values: Tensor, cut_ids: Tensor
) -> None:
    """Writes the last value [R] fp32 and id [R] int32 left in each row; ``part_max [R, tiles]`` of raw logits."""
    num_rows, vocab_size = logits.shape
    num_tiles = part_max.shape[1]
    slots = (num_rows, num_tiles, _CANDIDATES)
    found_keys, found_ids = logits.new_empty(2, *slots, dtype=torch.int32).unbind(0)
    found_masses = logits.new_empty(slots, dtype=torch.int64)
    found_count = torch.empty_like(part_max, dtype=torch.int32)
    masses = logits.new_empty(num_rows, num_tiles, 2, dtype=torch.int64)
    filters = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    sizes = (logits.stride(0), vocab_size, num_tiles)
    tiles = triton.next_power_of_2(num_tiles)
    block = min(_MAX_BLOCK, tiles * _CANDIDATES)
    _candidates_kernel[(num_tiles, num_rows)](
        logits, *filters, part_max, found_keys, found_masses, found_ids, found_count, masses, *sizes,
        TILE=tile, TILES=tiles, SLOTS=_CANDIDATES, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    _row_cut_kernel[(num_rows,)](
        logits, *filters, part_max, found_keys, found_masses, found_ids, found_count, masses, cut_values, cut_ids,
        *sizes,
        TILES=tiles, SLOTS=_CANDIDATES, BLOCK=block, num_warps=_cut_warps(block), enable_fp_fusion=False,
    )  # fmt: skip


def _serving(kernel, flags: dict[str, int], num_warps: int) -> Serving:
    types = dict.fromkeys(("logits", "temperatures", "top_ps", "min_ps", "part_max", "cut_values"), "*fp32")
    types |= dict.fromkeys(("top_ks", "found_keys", "found_ids", "found_count", "cut_ids"), "*i32")
    types |= dict.fromkeys(("found_masses", "masses"), "*i64")
    types |= dict.fromkeys(("stride", "vocab_size", "num_tiles"), "i32")
    signature = {name: types[name] for name in kernel.arg_names if name in types}
    options = {"enable_fp_fusion": False}
    return Serving(
        f"sampling {kernel.__name__}", kernel, signature, flags, num_warps=num_warps, options=options
    )


SERVING = [
    _serving(_candidates_kernel, {"TILE": 4096, "TILES": 64, "SLOTS": _CANDIDATES}, 16),
    _serving(
        _row_cut_kernel, {"TILES": 64, "SLOTS": _CANDIDATES, "BLOCK": _MAX_BLOCK}, _cut_warps(_MAX_BLOCK)
    ),
]

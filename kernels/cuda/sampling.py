"""Draw one token per row on the device, by the definition of ``kernels/sampling.py``; log-sum-exp on the way.

Four launches: maxima and sums of tiles; likely candidates of rows that rank (top_k, top_p); the cut of those rows;
noise and argmax of tiles, merged at the end. A row that needs less leaves a launch at once.

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
from kernels.sampling import MIN_TEMPERATURE, SamplingRows

TILE = 4096  # ids of one program; the order of the log-sum-exp depends on it and V' alone
MAX_VOCAB = 1 << 18
_CANDIDATES = 256  # slots of a tile
_REACH = tl.constexpr(12.0)  # a candidate is within e^-12 of the largest probability
_MAX_BLOCK = 4096  # values of one step of the cut: integer sums, so any will do
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_LOWEST = tl.constexpr(-2139095041)  # the key of -inf


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
def _scaled(logits, temperature, row_max, min_p):
    """Logits over the temperature, -inf below min_p; ``row_max`` is scaled."""
    x = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
    return tl.where(exp_nonpositive(x - row_max) < min_p, float("-inf"), x)


@triton.jit
def _mass(x, row_max):
    """int64 multiples of 2^-44."""
    return (exp_nonpositive(x - row_max) * 17592186044416.0).to(tl.int64)


@triton.jit
def _row_max(part_max, row, num_tiles, TILES: tl.constexpr):
    tile = tl.arange(0, TILES)
    return tl.max(tl.load(part_max + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf")), 0)


@triton.jit
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


@triton.jit
def _ranked(temperature, top_k, top_p, vocab_size):
    return (temperature > 0) & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1))


@triton.jit
def _candidates_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, part_max, found_keys, found_masses, found_ids, found_count, masses,
    stride, vocab_size, num_tiles, TILE: tl.constexpr, TILES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Keys and masses of a tile's ids near the row's largest, in order of id; their number; the tile's mass."""
    tile, row = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if _ranked(temperature, tl.load(top_ks + row), tl.load(top_ps + row), vocab_size):
        temperature = tl.maximum(temperature, _MIN_TEMPERATURE)
        row_max = tl.div_rn(_row_max(part_max, row, num_tiles, TILES), temperature)
        ids = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab_size, other=float("-inf"))
        scaled = _scaled(x, temperature, row_max, tl.load(min_ps + row))
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
            x = _scaled(x, temperature, row_max, min_p)
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


@triton.jit
def _row_cut_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, part_max, found_keys, found_masses, found_ids, found_count, masses,
    cut_values, cut_ids, stride, vocab_size, num_tiles,
    TILES: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last value and id that top_k and top_p leave, among the candidates where these suffice."""
    row = tl.program_id(0)
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    if _ranked(temperature, top_k, top_p, vocab_size):
        temperature = tl.maximum(temperature, _MIN_TEMPERATURE)
        min_p = tl.load(min_ps + row)
        row_max = tl.div_rn(_row_max(part_max, row, num_tiles, TILES), temperature)
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


@triton.jit
def _draw_kernel(
    logits, temperatures, min_ps, seeds, positions, part_max, cut_values, cut_ids, drawn, drawn_id, stride,
    vocab_size, num_tiles, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The largest score of a tile and its lowest id, of rows with a temperature."""
    tile, row = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        temperature = tl.maximum(temperature, _MIN_TEMPERATURE)
        row_max = tl.div_rn(_row_max(part_max, row, num_tiles, TILES), temperature)
        ids = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab_size, other=float("-inf"))
        x = _scaled(x, temperature, row_max, tl.load(min_ps + row))
        cut_value, cut_id = tl.load(cut_values + row), tl.load(cut_ids + row)
        x = tl.where((x > cut_value) | ((x == cut_value) & (ids <= cut_id)), x, float("-inf"))
        block = tile * (TILE // 4) + tl.arange(0, TILE // 4)
        w0, w1, w2, w3 = philox_block(block, tl.load(positions + row), tl.load(seeds + row))
        words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (TILE,))
        score = gumbel(words) + x
        largest = tl.max(score, 0)
        at = row * num_tiles + tile
        tl.store(drawn + at, largest)
        tl.store(drawn_id + at, tl.min(tl.where(score == largest, ids, 2147483647), 0))


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
    greedy. ``ranked`` False: the caller knows that no row uses top_k or top_p, which saves two launches.
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
            _cut_rows(logits, rows, part_max, cut_values, cut_ids)
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


def _cut_warps(block: int) -> int:
    return max(4, block // 256)


def _cut_rows(
    logits: Tensor, rows: SamplingRows, part_max: Tensor, cut_values: Tensor, cut_ids: Tensor
) -> None:
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
        TILE=TILE, TILES=tiles, SLOTS=_CANDIDATES, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    _row_cut_kernel[(num_rows,)](
        logits, *filters, part_max, found_keys, found_masses, found_ids, found_count, masses, cut_values, cut_ids,
        *sizes,
        TILES=tiles, SLOTS=_CANDIDATES, BLOCK=block, num_warps=_cut_warps(block), enable_fp_fusion=False,
    )  # fmt: skip


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
    "logits": "*fp32", "temperatures": "*fp32", "top_ks": "*i32", "top_ps": "*fp32", "min_ps": "*fp32",
    "seeds": "*i64", "positions": "*i64", "part_max": "*fp32", "part_id": "*i32", "part_sum": "*fp32",
    "found_keys": "*i32", "found_masses": "*i64", "found_ids": "*i32", "found_count": "*i32", "masses": "*i64",
    "cut_values": "*fp32", "cut_ids": "*i32",
    "drawn": "*fp32", "drawn_id": "*i32", "tokens": "*i64", "row_max": "*fp32", "log_sum": "*fp32",
}  # fmt: skip
SERVING = [
    _serving(name, kernel, {n: t for n, t in _TYPES.items() if n in kernel.arg_names}, flags, num_warps)
    for name, kernel, flags, num_warps in (
        ("tile sums", _tile_sums_kernel, {"TILE": TILE}, 8),
        ("candidates", _candidates_kernel, {"TILE": TILE, "TILES": _TILES, "SLOTS": _CANDIDATES}, 16),
        ("row cut", _row_cut_kernel, {"TILES": _TILES, "SLOTS": _CANDIDATES, "BLOCK": _MAX_BLOCK}, 32),
        ("draw", _draw_kernel, {"TILE": TILE, "TILES": _TILES}, 8),
        ("merge", _merge_kernel, {"TILES": _TILES, "HAS_DRAW": True}, 1),
    )
]

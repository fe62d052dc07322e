"""Where top_k and top_p cut a row of logits: the last value and id that they leave, without a sort.

Radix selection over many programs a row. The image of a value among the int32, ordered as the values are, has three
digits. Per digit one launch adds up the numbers (top_k) or masses (top_p) of the values that share the digits found so
far, and another takes the digit in which the sum from above reaches what is needed. Of values equal to the last one,
those with the lowest ids stay. Sums are integers, so no order changes one.

All values have part in the first digit of top_k, so each tile counts its own before it adds them: few bins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.compile import Serving
from kernels.sampling import MIN_TEMPERATURE, SamplingRows

_DIGIT_BITS = {False: (8, 12, 12), True: (12, 10, 10)}  # of top_k, of top_p
_ALL_BINS = tl.constexpr(max(sum(1 << bits for bits in all_bits) for all_bits in _DIGIT_BITS.values()))
# of a state: key of the last value, sum above it, its rank among equals, the sum of these
_FIELDS = tl.constexpr(4)
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
def _value(key):
    """fp32 whose ``ordered_key`` is ``key``."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


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
def _scaled_maximum(part_max, row, temperature, num_tiles, TILES: tl.constexpr):
    return tl.div_rn(
        row_maximum(part_max, row, num_tiles, TILES), tl.maximum(temperature, LOWEST_TEMPERATURE)
    )


@triton.jit
def _tile_keys(
    logits, temperatures, min_ps, part_max, row, ids, stride, vocab_size, num_tiles, TILES: tl.constexpr
):
    """Scaled logits of ``ids``, their keys, and the row's scaled maximum."""
    temperature = tl.load(temperatures + row)
    row_max = _scaled_maximum(part_max, row, temperature, num_tiles, TILES)
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab_size, other=float("-inf"))
    x = scaled_logits(x, tl.maximum(temperature, LOWEST_TEMPERATURE), row_max, tl.load(min_ps + row))
    return x, ordered_key(x), row_max


@triton.jit
def _cuts(temperatures, top_ks, top_ps, row, vocab_size):
    """(top_k cuts, top_p cuts) of a row."""
    sampled, top_k = tl.load(temperatures + row) > 0, tl.load(top_ks + row)
    return sampled & (top_k > 0) & (top_k < vocab_size), sampled & (tl.load(top_ps + row) < 1)


@ANY_LOGITS
def _digit_sums_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, part_max, sums, states, stride, vocab_size, num_tiles,
    BY_MASS: tl.constexpr, FIRST: tl.constexpr, SHIFT: tl.constexpr, BINS: tl.constexpr, OFFSET: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Adds a tile's numbers or masses, by digit, of values above -inf whose higher digits are those found."""
    tile, row = tl.program_id(0), tl.program_id(1)
    by_count, by_mass = _cuts(temperatures, top_ks, top_ps, row, vocab_size)
    if by_mass if BY_MASS else by_count:
        ids = tile * TILE + tl.arange(0, TILE)
        x, key, row_max = _tile_keys(
            logits, temperatures, min_ps, part_max, row, ids, stride, vocab_size, num_tiles, TILES
        )  # fmt: skip
        state = states + row * (2 * _FIELDS)
        counted = key > _LOWEST
        if BY_MASS:
            counted = counted & (key >= tl.load(state))  # of top_k
            weight = _mass(x, row_max)
            counted = counted & (weight > 0)
        else:
            weight = tl.full((TILE,), 1, tl.int64)
        if FIRST:
            digit = (key >> SHIFT) + BINS // 2
        else:
            found = tl.load(state + _FIELDS * BY_MASS).to(tl.int32)
            digit = (key >> SHIFT) & (BINS - 1)
            counted = counted & ((key >> SHIFT) - digit == (found >> SHIFT))
        to = sums + (row * 2 + BY_MASS).to(tl.int64) * _ALL_BINS + OFFSET
        if FIRST and not BY_MASS:
            counts = tl.histogram(digit, BINS, mask=counted)
            tl.atomic_add(to + tl.arange(0, BINS), counts.to(tl.int64), mask=counts > 0, sem="relaxed")
        else:
            tl.atomic_add(to + digit, weight, mask=counted, sem="relaxed")


@triton.jit
def _last_rank(need, above, mass, limit):
    """Smallest number of equal masses that, on top of ``above``, reaches ``need``."""
    low, high = tl.full((), 1, tl.int64), limit.to(tl.int64)
    while low < high:
        middle = (low + high) // 2
        reached = (above + middle * mass).to(tl.float64) >= need
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle + 1)
    return low


@ANY_LOGITS
def _take_digit_kernel(
    temperatures, top_ks, top_ps, part_max, sums, states, needs, vocab_size, num_tiles,
    BY_MASS: tl.constexpr, FIRST: tl.constexpr, SHIFT: tl.constexpr, BINS: tl.constexpr, OFFSET: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """The digit of the last value that top_k (or top_p) leaves; after the last digit its rank among equals."""
    row = tl.program_id(0)
    by_count, by_mass = _cuts(temperatures, top_ks, top_ps, row, vocab_size)
    of_k = states + row * (2 * _FIELDS)
    state = of_k + _FIELDS * BY_MASS
    if by_mass if BY_MASS else by_count:
        row_max = _scaled_maximum(part_max, row, tl.load(temperatures + row), num_tiles, TILES)
        bins = tl.arange(0, BINS)
        sum_of = tl.load(sums + (row * 2 + BY_MASS).to(tl.int64) * _ALL_BINS + OFFSET + bins)
        total = tl.sum(sum_of, 0)
        above, found = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
        if not FIRST:
            found, above = tl.load(state), tl.load(state + 1)
        if not BY_MASS:
            need = tl.load(top_ks + row).to(tl.float64)
        elif FIRST:  # of the equals at its end, top_k leaves some
            beyond = tl.maximum(tl.load(of_k + 3) - tl.load(of_k + 2), 0)
            left = total - beyond * _mass(_value(tl.load(of_k).to(tl.int32)), row_max)
            need = tl.load(top_ps + row).to(tl.float64) * left.to(tl.float64)
            tl.store(needs + row, need)
        else:
            need = tl.load(needs + row)
        from_here = above + total - tl.cumsum(sum_of, 0) + sum_of
        digit = tl.max(tl.where(from_here.to(tl.float64) >= need, bins, -1), 0)
        if FIRST:  # too few values above -inf: all stay
            digit = tl.where(digit < 0, (_LOWEST >> SHIFT) + BINS // 2, digit)
            found = (digit - BINS // 2).to(tl.int64) << SHIFT
        else:
            digit = tl.where(digit < 0, (_LOWEST >> SHIFT) & (BINS - 1), digit)
            found = found | (digit.to(tl.int64) << SHIFT)
        above += tl.sum(tl.where(bins > digit, sum_of, 0), 0)
        tl.store(state, found)
        tl.store(state + 1, above)
        if SHIFT == 0:
            if BY_MASS:
                rank = _last_rank(need, above, _mass(_value(found.to(tl.int32)), row_max), vocab_size)
            else:
                rank = tl.load(top_ks + row).to(tl.int64) - above
            tl.store(state + 2, rank)
            tl.store(state + 3, tl.sum(tl.where(bins == digit, sum_of, 0), 0))
    elif BY_MASS:
        for field in tl.static_range(3):
            tl.store(state + field, tl.load(of_k + field))
    else:  # every value stays
        tl.store(state, tl.full((), _LOWEST, tl.int64))
        tl.store(state + 2, vocab_size.to(tl.int64))
        tl.store(state + 3, tl.zeros((), tl.int64))


@ANY_LOGITS
def _count_equals_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, part_max, states, equals, stride, vocab_size, num_tiles,
    TILE: tl.constexpr, TILES: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Number of a tile's values equal to the last value."""
    tile, row = tl.program_id(0), tl.program_id(1)
    by_count, by_mass = _cuts(temperatures, top_ks, top_ps, row, vocab_size)
    if by_count | by_mass:
        ids = tile * TILE + tl.arange(0, TILE)
        _, key, _ = _tile_keys(
            logits, temperatures, min_ps, part_max, row, ids, stride, vocab_size, num_tiles, TILES
        )  # fmt: skip
        last = tl.load(states + (row * 2 + 1) * FIELDS).to(tl.int32)
        tl.store(equals + row * num_tiles + tile, tl.sum(((key == last) & (key > _LOWEST)).to(tl.int32), 0))


@ANY_LOGITS
def _last_id_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, part_max, states, equals, cut_values, cut_ids,
    stride, vocab_size, num_tiles, TILE: tl.constexpr, TILES: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """The last value and the last id that has it, of each row."""
    row = tl.program_id(0)
    value, last_id = tl.full((), float("-inf"), tl.float32), vocab_size
    by_count, by_mass = _cuts(temperatures, top_ks, top_ps, row, vocab_size)
    if by_count | by_mass:
        state = states + (row * 2 + 1) * FIELDS
        last, rank = tl.load(state).to(tl.int32), tl.load(state + 2)
        value = _value(last)
        tile = tl.arange(0, TILES)
        counts = tl.load(equals + row * num_tiles + tile, mask=tile < num_tiles, other=0)
        if tl.sum(counts, 0) > rank:
            through = tl.cumsum(counts, 0)
            holds = (through >= rank) & (through - counts < rank)
            before = tl.sum(tl.where(holds, through - counts, 0), 0)
            ids = tl.sum(tl.where(holds, tile, 0), 0) * TILE + tl.arange(0, TILE)
            _, key, _ = _tile_keys(
                logits, temperatures, min_ps, part_max, row, ids, stride, vocab_size, num_tiles, TILES
            )  # fmt: skip
            equal = (key == last).to(tl.int32)
            is_last = (equal > 0) & (before + tl.cumsum(equal, 0) == rank)
            last_id = tl.min(tl.where(is_last, ids, vocab_size), 0)
    tl.store(cut_values + row, value)
    tl.store(cut_ids + row, last_id)


def cut_rows(
    logits: Tensor, rows: SamplingRows, part_max: Tensor, tile: int, cut_values: Tensor, cut_ids: Tensor
) -> None:
    """Writes the last value [R] fp32 and id [R] int32 left in each row; ``part_max [R, tiles]`` of raw logits."""
    num_rows, vocab_size = logits.shape
    num_tiles = part_max.shape[1]
    sums = logits.new_zeros(num_rows, 2, _ALL_BINS.value, dtype=torch.int64)
    states = logits.new_empty(num_rows, 2, _FIELDS.value, dtype=torch.int64)
    needs = logits.new_empty(num_rows, dtype=torch.float64)
    equals = torch.empty_like(part_max, dtype=torch.int32)
    cuts = (rows.temperature, rows.top_k, rows.top_p)
    tiles, sizes = triton.next_power_of_2(num_tiles), (logits.stride(0), vocab_size, num_tiles)
    grid, options = (num_tiles, num_rows), {"TILES": tiles, "num_warps": 8, "enable_fp_fusion": False}
    for digit in digits():
        _digit_sums_kernel[grid](
            logits, *cuts, rows.min_p, part_max, sums, states, *sizes, TILE=tile, **digit, **options
        )  # fmt: skip
        _take_digit_kernel[(num_rows,)](
            *cuts, part_max, sums, states, needs, vocab_size, num_tiles, **digit, **options
        )  # fmt: skip
    options |= {"TILE": tile, "FIELDS": _FIELDS.value}
    _count_equals_kernel[grid](logits, *cuts, rows.min_p, part_max, states, equals, *sizes, **options)
    _last_id_kernel[(num_rows,)](
        logits, *cuts, rows.min_p, part_max, states, equals, cut_values, cut_ids, *sizes, **options
    )  # fmt: skip


def digits() -> list[dict[str, int | bool]]:
    """Compile-time values of the launches, in order: the digits of top_k, then those of top_p."""
    found = []
    for by_mass, all_bits in _DIGIT_BITS.items():
        shift, offset = 32, 0
        for bits in all_bits:
            shift -= bits
            found.append(
                {"BY_MASS": by_mass, "FIRST": not offset, "SHIFT": shift, "BINS": 1 << bits, "OFFSET": offset}
            )
            offset += 1 << bits
    return found


def _serving(name: str, kernel, flags: dict[str, int | bool]) -> Serving:
    types = dict.fromkeys(("logits", "temperatures", "top_ps", "min_ps", "part_max", "cut_values"), "*fp32")
    types |= dict.fromkeys(("top_ks", "equals", "cut_ids"), "*i32") | dict.fromkeys(
        ("sums", "states"), "*i64"
    )
    types |= dict.fromkeys(("stride", "vocab_size", "num_tiles"), "i32") | {"needs": "*fp64"}
    signature = {name: types[name] for name in kernel.arg_names if name in types}
    options = {"enable_fp_fusion": False}
    return Serving(f"sampling {name}", kernel, signature, flags, num_warps=8, options=options)


_SIZES = {"TILE": 4096, "TILES": 64}
SERVING = [
    *(
        _serving(
            f"{name} {'mass' if flags['BY_MASS'] else 'count'} {flags['SHIFT']}", kernel, {**flags, **sizes}
        )
        for flags in digits()
        for name, kernel, sizes in (
            ("digit sums", _digit_sums_kernel, _SIZES),
            ("take digit", _take_digit_kernel, {"TILES": 64}),
        )
    ),
    _serving("count equals", _count_equals_kernel, {**_SIZES, "FIELDS": _FIELDS.value}),
    _serving("last id", _last_id_kernel, {**_SIZES, "FIELDS": _FIELDS.value}),
]

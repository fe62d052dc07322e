"""The configurations of the row-exact products, one table for an H200: nothing is tuned at run time.

What orders a sum, the K segments, belongs to the weight shape alone; block sizes, warps and stages change the speed and
not the bits, so they may differ by row count.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

UNIT = 128  # elements of K: segments begin at multiples of it where K allows
MIN_SEGMENT = 256  # elements of K of a segment that a rule makes
MAX_SEGMENTS = 16
PROCESSORS = 132  # multiprocessors
FEW_PROGRAMS = 256  # what few rows should spread over: two programs a multiprocessor, nearly
SHARED_BYTES = 220 << 10  # of a multiprocessor, for the stages of its programs
FEW_ROWS = 64  # up to here the weights' bytes are the cost


@dataclass(frozen=True)
class ProductConfig:
    """Blocks of one launch: weight rows, tokens, K; ``is_spread``: segments over programs."""

    block_m: int  # weight rows, a multiple of 64
    block_n: int  # tokens
    block_k: int
    num_warps: int  # 4 or 8
    num_stages: int
    is_spread: bool
    group: int = 8  # weight tiles that walk the token tiles together (many rows)
    is_early: bool = False  # programmatic dependent launch: starts, and fetches weights, while the last launch ends
    is_bulk: bool = False  # blocks come by the bulk tensor copy engine

    def __str__(self) -> str:
        blocks = f"{self.block_m}x{self.block_n}x{self.block_k}"
        kind = "spread" if self.is_spread else f"g{self.group}"
        return f"{blocks} w{self.num_warps} s{self.num_stages} {kind}{' early' * self.is_early}{' bulk' * self.is_bulk}"


# (N, K): segments: the fewest with which few rows keep the memory busy. Changing one changes bits.
SEGMENTS: dict[tuple[int, int], int] = {
    # Inkling-Small, H 4096
    (6656, 4096): 2,
    (4096, 4096): 4,
    (32768, 4096): 1,
    (4096, 16384): 4,
    (8192, 4096): 2,
    (258, 4096): 16,
    (4096, 8192): 4,
    # mini, H 2048
    (3328, 2048): 3,
    (2048, 2048): 4,
    (16384, 2048): 1,
    (2048, 8192): 4,
    (6144, 2048): 2,
    (2048, 3072): 4,
    (130, 2048): 8,
    (2048, 4096): 4,
}

# (N, K): configurations by row count, each up to its number of rows; others follow ``product_config``'s rule.
CONFIGS: dict[tuple[int, int], tuple[tuple[int, ProductConfig], ...]] = {}


def segment_unit(k: int) -> int:
    """The largest power of two up to UNIT that divides K: where segments may begin."""
    return min(UNIT, k & -k)


@cache
def num_segments(n: int, k: int) -> int:
    """K segments of a weight ``[N, K]``: from the table, else enough to spread few rows, never short ones."""
    if (n, k) in SEGMENTS:
        return SEGMENTS[n, k]
    wanted = -(-FEW_PROGRAMS // -(-n // 64))
    allowed = max(1, min(MAX_SEGMENTS, k // MIN_SEGMENT))
    return min(1 << (wanted - 1).bit_length(), 1 << (allowed.bit_length() - 1))


@cache
def product_config(n: int, k: int, rows: int) -> ProductConfig:
    """The configuration of ``rows`` rows times a weight ``[N, K]``."""
    for limit, config in CONFIGS.get((n, k), ()):
        if rows <= limit:
            return config
    return default_config(n, k, rows)


def default_config(n: int, k: int, rows: int) -> ProductConfig:
    """What shapes without an entry run with: shared memory filled by the programs that share a multiprocessor."""
    segments, block_k = num_segments(n, k), min(segment_unit(k), 64)
    if rows <= FEW_ROWS:
        block_n = max(16, 1 << (rows - 1).bit_length())
        # Many rows read their own part again for every weight tile: taller tiles, where enough remain.
        block_m = 128 if rows > 16 and -(-n // 128) * segments >= 100 else 64
        resident = min(4, -(-(-(-n // block_m) * segments) // PROCESSORS))  # programs on one multiprocessor
        shared = SHARED_BYTES // resident // ((block_m + block_n) * 2)  # elements of K in flight
        if shared >= 4 * segment_unit(k):
            block_k = segment_unit(k)
        stages = shared // block_k
        warps = 8 if block_m == 128 and resident == 1 else 4
        return ProductConfig(block_m, block_n, block_k, warps, max(2, min(6, stages)), segments > 1)
    if segments == 1 and rows > 128:
        return ProductConfig(128, 256, block_k, 8, 3, False)
    is_filled = -(-n // 128) * -(-rows // 128) >= PROCESSORS - 4
    if is_filled or segments == 1:
        return ProductConfig(128, 128, block_k, 8, 4, False)
    return ProductConfig(128, 128, block_k, 8, 3, True)

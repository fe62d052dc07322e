"""The configurations of the row-exact products, one table for an H200: nothing is tuned at run time.

What orders a sum, the K segments, belongs to the weight shape alone; block sizes, warps and stages change the speed and
not the bits, so they may differ by row count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

UNIT = 128  # elements of K: segments begin at multiples of it where K allows
MIN_SEGMENT = 256  # elements of K of a segment that a rule makes
MAX_SEGMENTS = 16
PROCESSORS = 132  # multiprocessors
FULL = 96  # programs that keep the memory busy
SHARED_BYTES = 220 << 10  # of a multiprocessor, for the stages of its programs
FEW_ROWS = 64  # up to here the weights' bytes are the cost, and a layer's kernels are launched early
SHARED_ROWS = 32  # up to here a layer computes its shared experts beside the routed ones
EARLY_ROWS = range(33, 65)  # where a product alone gains by an early launch


@dataclass(frozen=True)
class ProductConfig:
    """Blocks of one launch: weight rows, tokens, K; ``is_spread``: segments over programs."""

    block_m: int  # weight rows, a multiple of 64
    block_n: int  # tokens
    block_k: int
    num_warps: int  # 4, 8 or 16
    num_stages: int
    is_spread: bool
    group: int = 8  # weight tiles that walk the token tiles together (many rows)
    is_early: bool = False  # programmatic dependent launch: starts while the last launch ends
    ahead: int = (
        0  # elements of K a weight row that an early launch asks the L2 for as it waits, a multiple of 256
    )
    is_bulk: bool = False  # blocks come by the bulk tensor copy engine

    def __str__(self) -> str:
        blocks = f"{self.block_m}x{self.block_n}x{self.block_k}"
        kind = "spread" if self.is_spread else f"g{self.group}"
        early = f" early{self.ahead}" if self.is_early else ""
        return f"{blocks} w{self.num_warps} s{self.num_stages} {kind}{early}{' bulk' * self.is_bulk}"


# (N, K): segments. Each costs a round trip of partial sums, so as few as keep the memory busy: one from about 100
# weight tiles of 64 on, two from about 50. Changing one changes bits.
SEGMENTS: dict[tuple[int, int], int] = {
    # Inkling-Small, H 4096
    (6656, 4096): 1,
    (4096, 4096): 2,
    (32768, 4096): 1,
    (4096, 16384): 4,
    (8192, 4096): 1,
    (258, 4096): 8,
    (4096, 8192): 4,
    # mini, H 2048
    (3328, 2048): 1,
    (2048, 2048): 4,
    (16384, 2048): 1,
    (2048, 8192): 4,
    (6144, 2048): 1,
    (2048, 3072): 4,
    (130, 2048): 8,
    (2048, 4096): 4,
}


def _whole(block_n: int, block_k: int, stages: int, is_bulk: bool = False) -> ProductConfig:
    return ProductConfig(64, block_n, block_k, 4, stages, False, is_bulk=is_bulk)


def _spread(block_n: int, block_k: int, stages: int, is_bulk: bool = False) -> ProductConfig:
    return ProductConfig(64, block_n, block_k, 4, stages, True, is_bulk=is_bulk)


def _early(config: ProductConfig, ahead: int = 0) -> ProductConfig:
    return replace(config, is_early=True, ahead=ahead)


# One program a multiprocessor: deep pipelines of wide blocks.
_ALONE = ((16, _whole(16, 128, 5)), (32, _whole(32, 128, 6, True)), (64, _whole(64, 128, 6, True)))

# (N, K): configurations by row count, each up to its number of rows; others follow ``default_config``.
CONFIGS: dict[tuple[int, int], tuple[tuple[int, ProductConfig], ...]] = {
    (6656, 4096): _ALONE,
    (8192, 4096): _ALONE,
    (6144, 2048): _ALONE,
    (4096, 4096): ((16, _spread(16, 128, 5)), (32, _spread(32, 128, 6)), (64, _spread(64, 128, 6, True))),
    (32768, 4096): (
        (16, _whole(16, 64, 5)),
        (32, ProductConfig(128, 32, 64, 4, 5, False)),
        (64, _whole(64, 64, 3, True)),
    ),
    (16384, 2048): (
        (16, _whole(16, 128, 5, True)),
        (32, _whole(32, 128, 4, True)),
        (64, _whole(64, 128, 3, True)),
    ),
    # Few weight tiles: read again for every 16 or 32 rows.
    (258, 4096): ((64, _early(_spread(16, 128, 4), 512)),),
    (130, 2048): ((64, _early(_spread(16, 128, 2), 512)),),
    (3328, 2048): ((16, _whole(16, 128, 6)), (64, _whole(32, 128, 6, True))),
    (2048, 2048): (
        (16, _spread(16, 128, 5)),
        (32, _spread(32, 128, 6)),
        (64, _early(ProductConfig(64, 64, 128, 8, 6, True), 256)),
    ),
}


def segment_unit(k: int) -> int:
    """The largest power of two up to UNIT that divides K: where segments may begin."""
    return min(UNIT, k & -k)


@cache
def num_segments(n: int, k: int) -> int:
    """K segments of a weight ``[N, K]``: from the table, else enough for FULL weight tiles, never short ones."""
    if (n, k) in SEGMENTS:
        return SEGMENTS[n, k]
    wanted = -(-FULL // -(-n // 64))
    allowed = max(1, min(MAX_SEGMENTS, k // MIN_SEGMENT))
    return min(1 << (wanted - 1).bit_length(), 1 << (allowed.bit_length() - 1))


@cache
def product_config(n: int, k: int, rows: int) -> ProductConfig:
    """The configuration of ``rows`` rows times a weight ``[N, K]``."""
    for limit, config in CONFIGS.get((n, k), ()):
        if rows <= limit:
            return _early(config) if rows in EARLY_ROWS and not config.is_early else config
    return default_config(n, k, rows, num_segments(n, k))


def default_config(n: int, k: int, rows: int, segments: int) -> ProductConfig:
    """What shapes without an entry run with, by row count."""
    if rows > FEW_ROWS:
        return _many_rows(n, k, rows, segments)
    config = _few_rows(n, k, rows, segments)
    return _early(config) if rows in EARLY_ROWS else config


def _few_rows(n: int, k: int, rows: int, segments: int) -> ProductConfig:
    """Shared memory filled by the programs that share a multiprocessor."""
    block_n, block_k = max(16, 1 << (rows - 1).bit_length()), min(segment_unit(k), 64)
    # Many rows read their own part again for every weight tile: taller tiles, where enough remain.
    block_m = 128 if rows > 16 and -(-n // 128) * segments >= FULL else 64
    resident = min(4, -(-(-(-n // block_m) * segments) // PROCESSORS))  # programs on one multiprocessor
    shared = SHARED_BYTES // resident // ((block_m + block_n) * 2)  # elements of K in flight
    if shared >= 4 * segment_unit(k):
        block_k = segment_unit(k)
    warps = 8 if block_m == 128 and resident == 1 else 4
    return ProductConfig(block_m, block_n, block_k, warps, max(2, min(6, shared // block_k)), segments > 1)


def _many_rows(n: int, k: int, rows: int, segments: int) -> ProductConfig:
    """The largest tiles of which there are enough. A second accumulator leaves no room for the widest."""
    block_k = min(segment_unit(k), 64)
    if segments > 1 and k >= 8192 and rows <= 128:
        return ProductConfig(128, 128, block_k, 8, 4, True, is_bulk=True)
    for block_m, block_n, warps in ((128, 256, 8), (128, 128, 8), (64, 128, 4)):
        is_enough = -(-n // block_m) * -(-rows // block_n) >= FULL and block_n < 2 * rows
        if is_enough and (segments == 1 or block_n < 256):
            return ProductConfig(block_m, block_n, block_k, warps, 4, False, is_bulk=True)
    return ProductConfig(64, 64, segment_unit(k), 4, 6, False, is_bulk=True)

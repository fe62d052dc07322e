"""One pass over a ragged batch: which rows, where they read, where they write. Computed once, used by all layers.

A segment is a run of consecutive positions of one sequence. Segments mix freely: prompt chunks, single decodes,
verification windows, draft windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch
from torch import Tensor

from inkling.config import AttentionGeometry, ModelConfig
from inkling.errors import ProtocolError
from inkling.protocol import Kind
from kernels.attention_inputs import KeyWrites
from kernels.relative_attention import AttentionRows, QueryTiles
from kernels.rows import padded_rows, row_quantum
from kernels.short_conv import ConvRows

_SHORT_SEGMENT = 16  # rows; longer segments are cut into tiles of _TILE_ROWS
_TILE_ROWS = 32
_SCORES_PER_GROUP = 1 << 22  # elements of the score tensor of one attention call
_OLDER = np.array([-3, -2, -1])


class PageTables:
    """The page ids of every slot: per kind int64 [slots, pages of one sequence]; 0 where nothing is held."""

    def __init__(self, num_slots: int, max_positions: int, page_size: Mapping[Kind, int]):
        self.page_size = page_size
        self.pages = {
            k: np.zeros((num_slots, -(-max_positions // s) + 1), np.int64) for k, s in page_size.items()
        }

    def clear(self, slot: int) -> None:
        for table in self.pages.values():
            table[slot] = 0

    def assign(self, updates: np.ndarray) -> dict[Kind, np.ndarray]:
        """Applies (slot, kind, index, page, fresh) records; returns the fresh pages per kind."""
        fresh: dict[Kind, np.ndarray] = {}
        if not len(updates):
            return fresh
        for kind, table in self.pages.items():
            mine = updates[updates[:, 1] == kind]
            if len(mine):
                table[mine[:, 0], mine[:, 2]] = mine[:, 3]
                fresh[kind] = mine[mine[:, 4] != 0, 3].astype(np.int64)
        return fresh


@dataclass(frozen=True)
class PassShape:
    """What address computation needs to know of a model."""

    geometries: Mapping[Kind, AttentionGeometry]  # of the kinds that occur
    keep_after: int  # positions before the end of a pass that the next pass may start at: N + 1
    log_scaling_floor: float
    log_scaling_alpha: float

    @classmethod
    def of(cls, config: ModelConfig, is_local: tuple[bool, ...], num_draft_tokens: int) -> PassShape:
        geometries = {
            Kind.LOCAL if local else Kind.FULL: config.local if local else config.full for local in is_local
        }
        return cls(geometries, num_draft_tokens + 1, config.log_scaling_floor, config.log_scaling_alpha)


@dataclass
class Pass:
    num_rows: int  # T
    positions: np.ndarray  # [T]
    starts: np.ndarray  # [segments + 1] first row of each segment
    conv: ConvRows
    keys: dict[Kind, KeyWrites]
    attention: dict[Kind, AttentionRows]
    tau: Tensor | None  # [Tp] fp32 attention temperature of full layers; None: all 1


def build_pass(
    slots: np.ndarray, firsts: np.ndarray, counts: np.ndarray, tables: PageTables, shape: PassShape
) -> Pass:
    """Addresses for segments of ``counts`` rows at positions ``firsts`` of ``slots``, each int [segments]."""
    starts = np.concatenate(([0], np.cumsum(counts)))
    num_rows = int(starts[-1])
    segment = np.repeat(np.arange(len(slots)), counts)
    offset = np.arange(num_rows) - starts[segment]
    positions = firsts[segment] + offset
    from_end = counts[segment] - offset
    rows = _Rows(slots, firsts, counts, starts, segment, offset, positions, from_end, padded_rows(num_rows))
    return Pass(
        num_rows,
        positions,
        starts,
        _conv_rows(rows, tables, shape),
        {kind: _key_writes(rows, tables, shape, kind) for kind in shape.geometries},
        {kind: _attention_rows(rows, tables, shape, kind) for kind in shape.geometries},
        _tau(rows, shape),
    )


@dataclass
class _Rows:
    slots: np.ndarray
    firsts: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    segment: np.ndarray  # [T]
    offset: np.ndarray  # [T] within the segment
    positions: np.ndarray  # [T]
    from_end: np.ndarray  # [T] rows from here to the end of the segment, this one included
    padded: int  # Tp


def _conv_rows(rows: _Rows, tables: PageTables, shape: PassShape) -> ConvRows:
    size, table = tables.page_size[Kind.CONV], tables.pages[Kind.CONV]
    older = rows.firsts[:, None] + _OLDER
    pages = table[rows.slots[:, None], older.clip(0) // size]
    _require(pages, older >= 0, "conv input", rows.slots)
    history = np.where(older < 0, 0, pages * size + older % size)

    taps = np.tile(np.arange(rows.padded), (4, 1))
    offset = (
        rows.offset + _OLDER[:, None]
    )  # [3, T] of u_{t-3}, u_{t-2}, u_{t-1} in the segment; negative: history
    start = np.where(offset >= 0, rows.starts[rows.segment], rows.padded + 3 * rows.segment + 3)
    taps[:3, : len(rows.segment)] = start + offset

    kept = np.flatnonzero(rows.from_end <= 3 + shape.keep_after)
    positions = rows.positions[kept]
    pages = table[rows.slots[rows.segment[kept]], positions // size]
    _require(pages, None, "conv row", rows.slots)
    slots = pages * size + positions % size
    history, taps, slots = (torch.from_numpy(a) for a in (history.ravel(), taps.ravel(), slots))
    return ConvRows(history, taps, _row_index(kept), slots)


def _row_index(rows: np.ndarray) -> Tensor | slice:
    """An index of ascending ``rows``; a slice, whose rows are not copied, where they are consecutive."""
    first, count = (int(rows[0]), len(rows)) if len(rows) else (0, 0)
    if count and rows[-1] - first + 1 != count:
        return torch.from_numpy(rows)
    return slice(first, first + count)


def _kept_rows(rows: _Rows, shape: PassShape, kind: Kind) -> np.ndarray:
    window = shape.geometries[kind].window
    return rows.from_end <= (np.iinfo(np.int64).max if window is None else window - 1 + shape.keep_after)


def _key_writes(rows: _Rows, tables: PageTables, shape: PassShape, kind: Kind) -> KeyWrites:
    size = tables.page_size[kind]
    kept = np.flatnonzero(_kept_rows(rows, shape, kind))
    positions = rows.positions[kept]
    pages = tables.pages[kind][rows.slots[rows.segment[kept]], positions // size]
    _require(pages, None, f"{kind.name.lower()} key", rows.slots)
    heads = shape.geometries[kind].num_kv_heads
    places = (pages[:, None] * heads + np.arange(heads)) * size + (positions % size)[:, None]
    return KeyWrites(_row_index(kept), torch.from_numpy(places.ravel()))


def _attention_rows(rows: _Rows, tables: PageTables, shape: PassShape, kind: Kind) -> AttentionRows:
    geometry, size = shape.geometries[kind], tables.page_size[kind]
    per_kv = geometry.num_heads // geometry.num_kv_heads
    step = row_quantum() // gcd(row_quantum(), per_kv)  # tile rows * per_kv must be a multiple of the quantum
    groups: list[QueryTiles] = []
    output_rows = np.zeros(rows.padded, np.int64)
    base = 0
    for width, segments in _tile_widths(rows.counts, step):
        first = np.concatenate([np.arange(rows.starts[s], rows.starts[s + 1], width) for s in segments])
        count = np.minimum(width, rows.from_end[first])
        blocks = int(rows.positions[first + count - 1].max()) // size + 1
        if geometry.window is not None:
            blocks = min(blocks, (width + geometry.window - 2) // size + 2)
        cut = max(1, _SCORES_PER_GROUP // (width * geometry.num_heads * blocks * size))
        for start in range(0, len(first), cut):
            f, c = first[start : start + cut], count[start : start + cut]
            tile_rows = f[:, None] + np.minimum(np.arange(width), c[:, None] - 1)
            output_rows[tile_rows] = base + np.arange(tile_rows.size).reshape(tile_rows.shape)
            # a tile's tail repeats its last row: point that row at its first, true, place
            output_rows[f + c - 1] = base + np.arange(len(f)) * width + c - 1
            groups.append(_query_tiles(rows, tile_rows, tables, shape, kind))
            base += tile_rows.size
    return AttentionRows(groups, torch.from_numpy(output_rows))


def _tile_widths(counts: np.ndarray, step: int) -> list[tuple[int, np.ndarray]]:
    """(tile rows, segments) of the short segments and of the long ones."""
    short = counts <= _SHORT_SEGMENT
    widths = []
    if short.any():
        widths.append((-(-int(counts[short].max()) // step) * step, np.flatnonzero(short)))
    if not short.all():
        widths.append((-(-_TILE_ROWS // step) * step, np.flatnonzero(~short)))
    return widths


def _query_tiles(
    rows: _Rows, tile_rows: np.ndarray, tables: PageTables, shape: PassShape, kind: Kind
) -> QueryTiles:
    geometry, size = shape.geometries[kind], tables.page_size[kind]
    segment = rows.segment[tile_rows[:, 0]]
    query = rows.positions[tile_rows]  # [n, Q]
    last = query[:, -1] // size
    window = geometry.window
    first = np.zeros_like(last) if window is None else (query[:, 0] - window + 1).clip(0) // size
    blocks = first[:, None] + np.arange(int((last - first).max()) + 1)  # [n, b]
    held = blocks <= last[:, None]
    pages = np.where(
        held, tables.pages[kind][rows.slots[segment][:, None], np.minimum(blocks, last[:, None])], 0
    )

    keys = (blocks[:, :, None] * size + np.arange(size)).reshape(len(blocks), 1, -1)
    distance = query[:, :, None] - keys
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    extent = geometry.rel_extent
    bias_index = np.where(hidden, extent + 1, np.minimum(distance, extent))

    fill = None
    if window is not None:
        fill = _fills(rows, tile_rows, segment, first, blocks.shape[1], size, window - 1 + shape.keep_after)
    if fill is None:
        _require(pages, held, f"{kind.name.lower()} key", rows.slots)
    return QueryTiles(
        torch.from_numpy(tile_rows.ravel()),
        torch.from_numpy(pages.ravel()),
        torch.from_numpy(bias_index),
        *(fill or (None, None, None)),
    )


def _fills(
    rows: _Rows,
    tile_rows: np.ndarray,  # [n, Q]
    segment: np.ndarray,  # [n]
    first_block: np.ndarray,  # [n]
    num_blocks: int,
    size: int,
    keep: int,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Rows of this pass that the tiles see and the cache does not hold, with their block and offset."""
    unkept_end = rows.starts[segment] + (rows.counts[segment] - keep).clip(0)  # row index, per tile
    begin = rows.starts[segment] + (first_block * size - rows.firsts[segment]).clip(0)
    end = np.minimum(unkept_end, tile_rows.max(1) + 1)
    tiles = np.flatnonzero(end > begin)
    if not len(tiles):
        return None
    lengths = (end - begin)[tiles]
    tile = np.repeat(tiles, lengths)
    row = np.concatenate([np.arange(begin[t], end[t]) for t in tiles])
    position = rows.positions[row]
    block = tile * num_blocks + position // size - first_block[tile]
    return torch.from_numpy(row), torch.from_numpy(block), torch.from_numpy(position % size)


def _tau(rows: _Rows, shape: PassShape) -> Tensor | None:
    """tau_t = 1 + alpha * ln(max((t + 1) / floor, 1)), fp32."""
    if shape.log_scaling_alpha == 0 or int(rows.positions.max()) + 1 <= shape.log_scaling_floor:
        return None
    tau = torch.ones(rows.padded)
    ratio = torch.from_numpy(rows.positions + 1).float() / shape.log_scaling_floor
    tau[: len(rows.positions)] = 1.0 + shape.log_scaling_alpha * torch.log(ratio.clamp(min=1.0))
    return tau


def _require(pages: np.ndarray, where: np.ndarray | None, what: str, slots: np.ndarray) -> None:
    missing = pages == 0 if where is None else (pages == 0) & where
    if missing.any():
        raise ProtocolError(f"a {what} of slots {slots.tolist()} has no page: {int(missing.sum())} positions")

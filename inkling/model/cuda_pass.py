"""Passes on the device: page tables, row metadata and attention plans of a runner, all at addresses that never change.

A step fills one pinned host buffer; one copy takes it to the device, where two small kernels make of it what the
layers read. A captured graph thus needs nothing of the host but that copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

from inkling.config import ModelConfig
from inkling.model.batch import PageTables
from inkling.model.cuda_layer import AttentionPlan, CudaPass
from inkling.protocol import Kind
from kernels.cuda.relative_attention import Heads, SegmentParts
from kernels.cuda.relative_attention_prompt import prompt_tiles
from kernels.cuda.rows_meta import Rows, fill_rows
from kernels.cuda.step_inputs import assign_pages

_ALIGN = 4  # words: every array begins at 16 bytes
_COPY_UNIT = 256  # words; few lengths of copy, so that their views are made once
_MOST_UPDATES = 1024  # page-table entries of a usual step
_NO_SEGMENT = (-1, 0, 0, 0)

ArrayTypes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class StepBuffer:
    """Named arrays that a step fills on the host and one copy takes to their fixed place on the device."""

    def __init__(self, arrays: ArrayTypes, device: torch.device):
        self._ends: dict[str, int] = {}  # array -> word behind it
        starts, words = {}, 0
        for name, (dtype, shape) in arrays.items():
            starts[name] = words
            self._ends[name] = words + prod(shape) * dtype.itemsize // 4
            words = -(-self._ends[name] // _ALIGN) * _ALIGN
        self._host = torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Tensor] = {}
        for name, (dtype, shape) in arrays.items():
            place = slice(starts[name], self._ends[name])
            self.host[name] = self._host[place].view(dtype).view(shape).numpy()
            self.device[name] = self._device[place].view(dtype).view(shape)

    def upload(self, last: str, count: int) -> None:
        """Copies everything up to the first ``count`` words of the array ``last``."""
        start = self._ends[last] - self.host[last].size
        words = min(-(-(start + count) // _COPY_UNIT) * _COPY_UNIT, len(self._host))
        if words not in self._copies:
            self._copies[words] = self._device[:words], self._host[:words]
        target, source = self._copies[words]
        target.copy_(source, non_blocking=True)


class CudaPasses:
    """Builds the passes of one model. ``tables`` mirrors the device's page tables on the host."""

    def __init__(
        self,
        config: ModelConfig,
        is_local: tuple[bool, ...],
        tables: PageTables,
        *,
        max_rows: int,  # of a pass
        max_segment_rows: int,  # of a segment that decode attention takes
        max_keys: int,  # positions of one sequence
        arrays: ArrayTypes,  # that the runner itself fills
        device: torch.device,
    ):
        self.max_rows, self.max_segment_rows, self.max_keys = max_rows, max_segment_rows, max_keys
        self._tables = tables
        kinds = {Kind.LOCAL if local else Kind.FULL for local in is_local}
        geometries = {kind: config.local if kind is Kind.LOCAL else config.full for kind in sorted(kinds)}
        self.heads = {
            kind: Heads(g.num_heads, g.num_kv_heads, g.head_dim, g.rel_extent, g.window or 0)
            for kind, g in geometries.items()
        }
        num_slots = len(tables.pages[Kind.CONV])
        self.num_slots = num_slots
        most_tiles = {
            kind: max_rows // max(1, h.config.prompt_columns // h.per_kv) + num_slots
            for kind, h in self.heads.items()
        }
        self.buffer = StepBuffer(
            {
                "num_updates": (torch.int32, (1,)),
                "updates": (torch.int32, (_MOST_UPDATES, 2)),
                "segments": (torch.int32, (num_slots, 4)),
                "short_segments": (torch.int32, (num_slots, 4)),
                **{f"tiles {kind.name}": (torch.int32, (n, 2)) for kind, n in most_tiles.items()},
                **arrays,
            },
            device,
        )
        self._allocate_tables(device)
        self._row_fields = torch.zeros(5, -(-max_rows // 4) * 4, dtype=torch.int32, device=device)
        self._parts: dict[tuple[Kind, int, int], SegmentParts] = {}
        most = [self._part_sizes(h, num_slots, max_segment_rows) for h in self.heads.values()]
        self._part_memory = torch.empty(max(map(sum, most), default=0), dtype=torch.float32, device=device)

    def _allocate_tables(self, device: torch.device) -> None:
        sizes = {kind: table.size for kind, table in self._tables.pages.items()}
        starts = np.cumsum([0, *(-(-size // _ALIGN) * _ALIGN for size in sizes.values())])
        self._flat_tables = torch.zeros(int(starts[-1]), dtype=torch.int32, device=device)
        self._table_starts = np.zeros(len(Kind), np.int64)
        self._table_widths = np.zeros(len(Kind), np.int64)
        self.pages: dict[Kind, Tensor] = {}
        for (kind, table), start in zip(self._tables.pages.items(), starts, strict=False):
            self._table_starts[kind], self._table_widths[kind] = start, table.shape[1]
            self.pages[kind] = self._flat_tables[start : start + table.size].view(table.shape)

    # On the host, before the copy.

    def write_pages(self, records: np.ndarray) -> None:
        """``records``: int32 [n, 5] of a step. Fresh pages are not cleared: no kernel reads what was not written."""
        count = len(records)
        if count:
            slot, kind, index, page = records[:, :4].T.astype(np.int64)
            place = self._table_starts[kind] + slot * self._table_widths[kind] + index
            last = dict(
                zip(place.tolist(), page.tolist(), strict=True)
            )  # of equal places the last record counts
            count = len(last)
            place, page = (np.fromiter(column, np.int64, count) for column in (last.keys(), last.values()))
            if count > _MOST_UPDATES:  # every sequence opened again: not through the buffer
                at = torch.from_numpy(place).to(self._flat_tables.device)
                self._flat_tables[at] = torch.from_numpy(page).int().to(at.device)
                count = 0
            else:
                self.buffer.host["updates"][:count, 0] = place
                self.buffer.host["updates"][:count, 1] = page
        self.buffer.host["num_updates"][0] = count

    def write_segments(
        self, slots: np.ndarray, starts: np.ndarray, firsts: np.ndarray, counts: np.ndarray, capacity: int
    ) -> None:
        """Segments (slot -1: none) in the order of their rows, then empty ones up to ``capacity``."""
        table, count = self.buffer.host["segments"], len(slots)
        for column, values in enumerate((slots, starts, firsts, counts)):
            table[:count, column] = values
        table[count:capacity] = _NO_SEGMENT

    def write_nothing(self) -> None:
        """A pass without segments and changes of pages."""
        self.write_segments(*np.zeros((4, 0), np.int32), capacity=self.num_slots)
        self.write_pages(np.zeros((0, 5), np.int32))

    def write_tiles(self, num_segments: int) -> dict[Kind, int]:
        """For a pass with long segments; -> number of tiles per kind. After ``write_segments``."""
        segments = self.buffer.host["segments"][:num_segments]
        is_long = segments[:, 3] > self.max_segment_rows
        short = self.buffer.host["short_segments"][:num_segments]
        short[:] = segments
        short[is_long] = _NO_SEGMENT
        long = np.where(is_long[:, None], segments, _NO_SEGMENT)
        counts = {}
        for kind, heads in self.heads.items():
            tiles = prompt_tiles(heads, long)
            self.buffer.host[f"tiles {kind.name}"][: len(tiles)] = tiles
            counts[kind] = len(tiles)
        return counts

    def write_prompt(self, num_rows: int) -> dict[Kind, int]:
        """A pass of ``num_rows`` rows in segments as long as they can be, for a run that nobody reads: where no page
        is held, rows land in the null page. -> number of tiles per kind."""
        segments = np.arange(-(-num_rows // self.max_keys))
        starts = segments * self.max_keys
        counts = np.minimum(self.max_keys, num_rows - starts)
        self.write_segments(segments, starts, 0 * starts, counts, len(segments))
        self.write_pages(np.zeros((0, 5), np.int32))
        return self.write_tiles(len(segments))

    # On the device, after the copy.

    def begin(self, num_segments: int, num_rows: int) -> Rows:
        """Brings the page tables up to date and spreads the segments to rows."""
        arrays = self.buffer.device
        assign_pages(arrays["updates"], arrays["num_updates"], self._flat_tables)
        rows = Rows(*self._row_fields[:, :num_rows].unbind(0), arrays["segments"][:num_segments])
        fill_rows(rows)
        return rows

    def short(self, rows: Rows, max_rows: int) -> dict[Kind, CudaPass]:
        """For segments of up to ``max_rows`` rows each."""
        parts = {kind: self._parts_of(kind, rows.segments.shape[0], max_rows) for kind in self.heads}
        plans = {kind: AttentionPlan(self.pages[kind], max_rows, parts[kind]) for kind in self.heads}
        return {kind: self._pass(rows, plan) for kind, plan in plans.items()}

    def mixed(self, rows: Rows, num_tiles: dict[Kind, int], has_short: bool) -> dict[Kind, CudaPass]:
        """For segments of any length, after ``write_tiles``."""
        num_segments, passes = rows.segments.shape[0], {}
        for kind in self.heads:
            plan = AttentionPlan(self.pages[kind], self.max_segment_rows)
            plan.tiles = self.buffer.device[f"tiles {kind.name}"][: num_tiles[kind]]
            if has_short:
                plan.parts = self._parts_of(kind, num_segments, self.max_segment_rows)
                plan.short_segments = self.buffer.device["short_segments"][:num_segments]
            passes[kind] = self._pass(rows, plan)
        return passes

    def _pass(self, rows: Rows, plan: AttentionPlan) -> CudaPass:
        return CudaPass(rows, self.pages[Kind.CONV], self._tables.page_size[Kind.CONV], plan)

    def _part_sizes(self, heads: Heads, sequences: int, max_rows: int) -> tuple[int, int, int]:
        """Elements of (m, l, a), each a multiple of 16 bytes."""
        splits = heads.splits(self.max_keys, max_rows, heads.config.segment)
        size = sequences * heads.num_kv * splits * max_rows * heads.per_kv
        padded = -(-size // _ALIGN) * _ALIGN
        return padded, padded, size * heads.head_dim

    def _parts_of(self, kind: Kind, sequences: int, max_rows: int) -> SegmentParts:
        """Views of one memory, which all layers and passes use in turn."""
        key = kind, sequences, max_rows
        if key not in self._parts:
            heads = self.heads[kind]
            splits = heads.splits(self.max_keys, max_rows, heads.config.segment)
            shape = (sequences, heads.num_kv, splits, max_rows * heads.per_kv)
            views, start = [], 0
            sizes = self._part_sizes(heads, sequences, max_rows)
            for size, tail in zip(sizes, ((), (), (heads.head_dim,)), strict=True):
                views.append(self._part_memory[start : start + prod(shape) * prod(tail)].view(*shape, *tail))
                start += size
            self._parts[key] = SegmentParts(*views)
        return self._parts[key]

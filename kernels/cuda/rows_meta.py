"""Which row of a step belongs to which sequence and position, kept on the device.

A step is a list of segments: runs of consecutive positions of one sequence, in ascending rows. One small kernel
spreads it to the rows, so a captured graph needs nothing of the host but the segments themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

SEGMENT_FIELDS = 4  # slot, first row, first position, rows
_BLOCK_ROWS = 128
_BLOCK_SEGMENTS = 32


@dataclass
class Rows:
    """Rows and segments of one step; T and S are the capacities that a graph was captured with."""

    slot: Tensor  # int32 [T]; -1: padding row, reads and writes nothing
    position: Tensor  # int32 [T], absolute
    offset: Tensor  # int32 [T] earlier rows of the same segment in this pass
    from_end: Tensor  # int32 [T] rows from here to the end of the segment, this one included
    segment: Tensor  # int32 [T] index of the row's segment; -1: padding row
    segments: Tensor  # int32 [S, 4] (slot, first row, first position, rows); unused ones have no rows

    @property
    def num_rows(self) -> int:
        return self.slot.shape[0]


def allocate_rows(num_rows: int, num_segments: int, device: torch.device | str) -> Rows:
    """Empty metadata for ``num_rows`` rows, all of them padding, in up to ``num_segments`` segments."""
    # each field begins at a multiple of 16 bytes: an address must not choose another binary
    fields = torch.zeros(5, -(-num_rows // 4) * 4, dtype=torch.int32, device=device)[:, :num_rows]
    fields[0] = fields[4] = -1
    segments = torch.zeros(num_segments, SEGMENT_FIELDS, dtype=torch.int32, device=device)
    segments[:, 0] = -1
    return Rows(*fields.unbind(0), segments)


@triton.jit
def page_place(pages, slot, position, pages_per_slot, PAGE_SIZE: tl.constexpr, mask):
    """int64 page * PAGE_SIZE + offset of ``position`` in the sequence of ``slot``; 0 where masked."""
    entry = slot.to(tl.int64) * pages_per_slot + position // PAGE_SIZE
    page = tl.load(pages + entry, mask=mask, other=0)
    return page.to(tl.int64) * PAGE_SIZE + tl.where(mask, position % PAGE_SIZE, 0)


@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def _fill_rows_kernel(
    segments, slot, position, offset, from_end, segment, num_rows, num_segments,
    BLOCK_ROWS: tl.constexpr, BLOCK_SEGMENTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    found = tl.full((BLOCK_ROWS,), -1, tl.int32)
    for start in range(0, num_segments, BLOCK_SEGMENTS):
        candidate = start + tl.arange(0, BLOCK_SEGMENTS)
        valid = candidate < num_segments
        first = tl.load(segments + candidate * 4 + 1, mask=valid, other=0)
        count = tl.load(segments + candidate * 4 + 3, mask=valid, other=0)
        inside = (row[:, None] >= first[None, :]) & (row[:, None] < (first + count)[None, :])
        found = tl.maximum(found, tl.max(tl.where(inside, candidate[None, :], -1), 1))
    held = found >= 0
    record = segments + tl.maximum(found, 0) * 4
    first_row = tl.load(record + 1, mask=held, other=0)
    first_position = tl.load(record + 2, mask=held, other=0)
    count = tl.load(record + 3, mask=held, other=0)
    earlier = tl.where(held, row - first_row, 0)
    stored = row < num_rows
    tl.store(slot + row, tl.load(record, mask=held, other=-1), mask=stored)
    tl.store(position + row, first_position + earlier, mask=stored)
    tl.store(offset + row, earlier, mask=stored)
    tl.store(from_end + row, count - earlier, mask=stored)
    tl.store(segment + row, found, mask=stored)


def fill_rows(rows: Rows) -> None:
    """Fills the per-row tensors of ``rows`` from ``rows.segments``; rows of no segment become padding.

    Segments must not share rows. A padding row has slot and segment -1, its other fields are 0.
    """
    num_rows, num_segments = rows.num_rows, rows.segments.shape[0]
    _fill_rows_kernel[(triton.cdiv(num_rows, _BLOCK_ROWS),)](
        rows.segments, rows.slot, rows.position, rows.offset, rows.from_end, rows.segment, num_rows, num_segments,
        BLOCK_ROWS=_BLOCK_ROWS, BLOCK_SEGMENTS=_BLOCK_SEGMENTS, num_warps=4,
    )  # fmt: skip


def make_rows(
    segments: list[tuple[int, int, int]], device: torch.device | str, num_rows: int | None = None
) -> Rows:
    """Metadata for (slot, first position, rows) segments placed one after the other; padded up to ``num_rows``."""
    total = sum(count for _, _, count in segments)
    rows = allocate_rows(total if num_rows is None else num_rows, len(segments), device)
    records, first = [], 0
    for slot, position, count in segments:
        records.append((slot, first, position, count))
        first += count
    rows.segments.copy_(torch.tensor(records, dtype=torch.int32))
    fill_rows(rows)
    return rows

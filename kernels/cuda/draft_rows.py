"""What the rows of a draft window read: target states of this step or of a sequence's ring, and ids known or drawn.

A window is a segment of entries. Entry p of depth k takes the target state of position p (depth 0) and the id of
position p + k + 1, which the step brings or which depth k - 1 has just drawn. The last states of every sequence are
kept in a ring, entry p in row p mod its size, for windows that begin before the step's own states.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.compile import Serving
from kernels.cuda.rows_meta import Rows

_BLOCK_ROWS = 128


@triton.jit
def _state(address, row, WIDTH: tl.constexpr):
    """Row ``row`` of the bf16 states whose address is stored at ``address``."""
    return tl.load(address).to(tl.pointer_type(tl.bfloat16)) + row.to(tl.int64) * WIDTH


@triton.jit
def _window_states_kernel(
    address,  # int64 [1], of bf16 [., WIDTH]
    ring,  # bf16 [slots * RING, WIDTH]
    records,  # int32 [S, 4] (slot, first hidden row, its position, hidden rows)
    slots, positions, segments,  # of the rows
    out,  # bf16 [T, WIDTH]
    RING: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        channel = tl.arange(0, BLOCK)
        mask = channel < WIDTH
        entry, record = tl.load(positions + row), records + tl.load(segments + row) * 4
        hidden_row, hidden_position = tl.load(record + 1), tl.load(record + 2)
        if entry >= hidden_position:
            state = tl.load(_state(address, hidden_row + entry - hidden_position, WIDTH) + channel, mask=mask)
        else:
            place = slot.to(tl.int64) * RING + entry % RING
            state = tl.load(ring + place * WIDTH + channel, mask=mask)
        tl.store(out + row.to(tl.int64) * WIDTH + channel, state, mask=mask)


@triton.jit
def _keep_states_kernel(address, ring, records, RING: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    record, back = records + tl.program_id(1) * 4, tl.program_id(0) + 1
    slot, count = tl.load(record), tl.load(record + 3)
    if (slot >= 0) & (back <= count):
        channel = tl.arange(0, BLOCK)
        mask = channel < WIDTH
        row, entry = tl.load(record + 1) + count - back, tl.load(record + 2) + count - back
        state = tl.load(_state(address, row, WIDTH) + channel, mask=mask)
        place = slot.to(tl.int64) * RING + entry % RING
        tl.store(ring + place * WIDTH + channel, state, mask=mask)


@triton.jit(do_not_specialize=["depth", "drafts_stride", "vocab_size", "num_rows"])
def _depth_ids_kernel(
    known,  # int32 [S, 2] (first of the segment's ids, their number)
    ids,  # int32, known ids of all segments
    drafts,  # int32 [depths, drafts_stride], by depth and segment
    offsets, segments,  # of the rows
    out,  # int32 [T]
    depth, drafts_stride, vocab_size, num_rows, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    segment = tl.load(segments + row, mask=row < num_rows, other=-1)
    held = segment >= 0
    column = tl.load(offsets + row, mask=held, other=0) + depth
    first = tl.load(known + segment * 2, mask=held, other=0)
    count = tl.load(known + segment * 2 + 1, mask=held, other=0)
    is_known = column < count
    id_known = tl.load(ids + first + column, mask=held & is_known, other=0)
    # a window that ends before this depth may look beyond what was drawn: any id will do, nothing reads its row
    drawn = tl.minimum(column - count, depth - 1) * drafts_stride + segment
    id_drawn = tl.load(drafts + drawn, mask=held & (column >= count) & (depth > 0), other=0)
    token = tl.minimum(tl.maximum(tl.where(is_known, id_known, id_drawn), 0), vocab_size - 1)
    tl.store(out + row, tl.where(held, token, -1), mask=row < num_rows)


def window_states(
    address: Tensor, ring: Tensor, records: Tensor, rows: Rows, ring_rows: int, out: Tensor
) -> None:
    """Target states of the windows' rows -> ``out`` bf16 [T, H]; padding rows stay as they are.

    ``address``: int64 [1], where the step's states bf16 [., H] lie; ``ring`` bf16 [slots * ring_rows, H]; ``records``
    int32 [S, 4] (slot, first hidden row, its position, hidden rows) beside ``rows.segments``.
    """
    width = _check(ring, records, out)
    _window_states_kernel[(rows.num_rows,)](
        address, ring, records, rows.slot, rows.position, rows.segment, out,
        RING=ring_rows, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


def keep_states(address: Tensor, ring: Tensor, records: Tensor, ring_rows: int) -> None:
    """The last ``ring_rows`` new states of each of ``records`` (slot -1: none) go to its ring."""
    width = _check(ring, records)
    _keep_states_kernel[(ring_rows, records.shape[0])](
        address, ring, records, RING=ring_rows, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4
    )  # fmt: skip


def depth_ids(
    depth: int, known: Tensor, ids: Tensor, drafts: Tensor, rows: Rows, vocab_size: int, out: Tensor
) -> None:
    """Ids of positions entry + depth + 1 -> ``out`` int32 [T], -1 for padding rows.

    ``known`` int32 [S, 2] (first id, ids of the segment), ``ids`` int32: from the position after a window's first
    entry on; later ones from ``drafts`` int32 [depths, S or more], drawn after the window's last known id.
    """
    num_rows = rows.num_rows
    assert out.shape == (num_rows,) and out.dtype == ids.dtype == drafts.dtype == torch.int32, (
        out.shape,
        out.dtype,
    )
    _depth_ids_kernel[(triton.cdiv(num_rows, _BLOCK_ROWS),)](
        known, ids, drafts, rows.offset, rows.segment, out, depth, drafts.shape[1], vocab_size, num_rows,
        BLOCK=_BLOCK_ROWS, num_warps=4,
    )  # fmt: skip


def _check(ring: Tensor, records: Tensor, *states: Tensor) -> int:
    assert records.shape[1] == 4 and records.is_contiguous() and records.dtype == torch.int32, records.shape
    for x in (ring, *states):
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] == ring.shape[1], (
            x.shape,
            x.dtype,
        )
    return ring.shape[1]


_WIDTH = {"RING": 39, "WIDTH": 2048, "BLOCK": 2048}
_INT32 = ("records", "slots", "positions", "segments", "known", "ids", "drafts", "offsets")


def _serving(name: str, kernel, constants: dict[str, int]) -> Serving:
    types = dict.fromkeys(_INT32, "*i32") | {"address": "*i64", "ring": "*bf16"}
    types |= dict.fromkeys(("depth", "drafts_stride", "vocab_size", "num_rows"), "i32")
    types["out"] = "*i32" if kernel is _depth_ids_kernel else "*bf16"
    return Serving(name, kernel, {n: types[n] for n in kernel.arg_names if n in types}, constants)


SERVING = [
    _serving("window_states 2048", _window_states_kernel, _WIDTH),
    _serving("keep_states 2048", _keep_states_kernel, _WIDTH),
    _serving("depth_ids", _depth_ids_kernel, {"BLOCK": _BLOCK_ROWS}),
]

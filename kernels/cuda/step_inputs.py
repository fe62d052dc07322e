"""What a captured step reads of the host and hands out: page-table changes in, final states out.

Everything is addressed through buffers whose place never changes; what differs from step to step are numbers in them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.compile import Serving

_BLOCK_UPDATES = 256
_BLOCK_WIDTH = 1024


@triton.jit
def _assign_pages_kernel(updates, num_updates, tables, BLOCK: tl.constexpr):
    update = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = update < tl.load(num_updates)
    place = tl.load(updates + update * 2, mask=mask, other=0)
    tl.store(tables + place, tl.load(updates + update * 2 + 1, mask=mask, other=0), mask=mask)


def assign_pages(updates: Tensor, num_updates: Tensor, tables: Tensor) -> None:
    """``tables[place] = page`` of the first ``num_updates`` (int32 [1]) ``updates``, int32 [n, 2], no place twice."""
    blocks = triton.cdiv(updates.shape[0], _BLOCK_UPDATES)
    _assign_pages_kernel[(blocks,)](updates, num_updates, tables, BLOCK=_BLOCK_UPDATES, num_warps=4)


@triton.jit(do_not_specialize=["capacity"])
def _hand_out_kernel(states, outputs, which, capacity, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < WIDTH
    target = outputs + (tl.load(which).to(tl.int64) * capacity + row) * WIDTH
    tl.store(target + channel, tl.load(states + row * WIDTH + channel, mask=mask), mask=mask)


def hand_out(states: Tensor, outputs: Tensor, which: Tensor) -> None:
    """Copies ``states [T, H]`` to the first rows of ``outputs[which]``, of ``outputs [n, capacity, H]``.

    ``which``: int32 [1] on the device, so that one captured graph writes to all outputs in turn.
    """
    num_rows, width = states.shape
    assert outputs.shape[1] >= num_rows and outputs.shape[2] == width, (outputs.shape, states.shape)
    assert states.is_contiguous() and outputs.is_contiguous() and states.dtype == outputs.dtype, states.dtype
    grid = (num_rows, triton.cdiv(width, _BLOCK_WIDTH))
    _hand_out_kernel[grid](
        states, outputs, which, outputs.shape[1], WIDTH=width, BLOCK=_BLOCK_WIDTH, num_warps=4
    )  # fmt: skip


SERVING = [
    Serving(
        "assign_pages", _assign_pages_kernel, dict.fromkeys(["updates", "num_updates", "tables"], "*i32"),
        {"BLOCK": _BLOCK_UPDATES},
    ),
    Serving(
        "hand_out", _hand_out_kernel, {"states": "*bf16", "outputs": "*bf16", "which": "*i32", "capacity": "i32"},
        {"WIDTH": 2048, "BLOCK": _BLOCK_WIDTH},
    ),
]  # fmt: skip

"""Programmatic dependent launch: a kernel of a chain is launched while those before it still run.

A kernel launched early begins once every program of the one before has let it (or has ended). So that neither a value
is read before it is written nor overwritten while it is still read, every such kernel keeps one rule:

    every program waits, and until then it stores nothing and reads nothing that a kernel of the pass may write.

The wait ends when the kernel before has completed and its stores are visible. That one had waited itself before it
could complete, so everything earlier has completed too: a wait covers the whole chain, and with it memory that the
allocator hands out again. A kernel that is not launched early waits as a whole, and keeps the rule by that.

Weights are written by no kernel: they may be loaded, or asked of the L2, before the wait.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

WHOLE = 1 << 14  # elements of K to ask for: all that a program reads
REQUESTS = tl.constexpr(256)  # of one program for weights: one or two a thread


@triton.jit
def begin_launch(EARLY: tl.constexpr):
    """Lets the next kernel begin, and waits for the last one."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def begin_launch_in_order(EARLY: tl.constexpr):
    """The same in the other order: when the next kernel begins, all that came before this one has completed."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def ask_ahead(
    weights, first_row, end_row, first, last, K: tl.constexpr, BLOCK_M: tl.constexpr, AHEAD: tl.constexpr
):
    """Asks the L2 for AHEAD elements (a multiple of 32), from ``first`` up to ``last``, of BLOCK_M rows of ``[., K]``.

    ``first_row`` int64; rows from ``end_row`` on are left out.
    """
    if AHEAD > 0:
        parts: tl.constexpr = REQUESTS // BLOCK_M  # of a row
        lane = tl.arange(0, REQUESTS)
        m, k = first_row + lane // parts, first + lane % parts * (AHEAD // parts)
        size = tl.where(m < end_row, tl.maximum(tl.minimum(AHEAD // parts, last - k), 0), 0) * 2  # bytes
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r",
            [(weights + m.to(tl.int64) * K + k).to(tl.int64), size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def ask_for(weights, COUNT: tl.constexpr):
    """Asks the L2 for the lines of COUNT elements of 2 bytes."""
    lines: tl.constexpr = (COUNT + 63) // 64
    line = tl.arange(0, triton.next_power_of_2(lines))
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [(weights + tl.minimum(line * 64, COUNT - 1)).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )

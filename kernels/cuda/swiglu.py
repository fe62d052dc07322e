"""Gated activation of fused products on CUDA: silu(gate) * up, in fp32, rounded once.

    out[t, s, :] = gamma[t, k + s] * silu(gate) * up        gamma: of shared experts; 1 where there is none

Elementwise, so row-exact by itself; contraction is off, as each product of the reference is rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.compile import Serving
from kernels.cuda.early_launch import begin_launch

_BLOCK = 1024


@triton.jit
def silu_mul(gate, up):
    """silu(gate) * up of fp32 blocks; the caller rounds."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _swiglu_kernel(
    gate_up,  # bf16 [T, S, 2f], gate rows then up rows of each expert
    gamma,  # fp32 [T, gammas], or None
    out,  # bf16 [T, S * f]
    width, gammas, first,
    NUM_SHARED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_launch(EARLY)
    row, expert = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    pair = row * NUM_SHARED + expert
    gate = tl.load(gate_up + pair * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + pair * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
    act = silu_mul(gate, up)
    if gamma is not None:
        act *= tl.load(gamma + row * gammas + first + expert)
    tl.store(out + pair * width + column, act.to(tl.bfloat16), mask=mask)


def swiglu(
    gate_up: Tensor, out: Tensor, gamma: Tensor | None = None, num_shared: int = 1, early: bool = False
) -> Tensor:
    """``gate_up`` bf16 [T, S*2f] -> ``out`` bf16 [T, S*f].

    ``gamma``: fp32 [T, k + S] of ``choose_experts``, whose last S weigh the shared experts; None: no weight.
    """
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // (2 * num_shared)
    assert out.shape == (num_rows, num_shared * width), (gate_up.shape, out.shape)
    assert all(x.is_contiguous() and x.dtype == torch.bfloat16 for x in (gate_up, out))
    gammas = 0 if gamma is None else gamma.shape[1]
    _swiglu_kernel[(num_rows, num_shared, triton.cdiv(width, _BLOCK))](
        gate_up, gamma, out, width, gammas, gammas - num_shared, num_shared, _BLOCK, early,
        launch_pdl=early, enable_fp_fusion=False,
    )  # fmt: skip
    return out


SERVING = [
    Serving(
        (f"swiglu {shared} shared" if shared else "swiglu dense") + ", early" * early,
        _swiglu_kernel,
        {"gate_up": "*bf16", "out": "*bf16", "width": "i32", "gammas": "i32", "first": "i32"}
        | ({"gamma": "*fp32"} if shared else {}),
        {"NUM_SHARED": shared or 1, "BLOCK": _BLOCK, "EARLY": early} | ({} if shared else {"gamma": None}),
        options={"enable_fp_fusion": False, "launch_pdl": early},
    )
    for shared in (0, 2)
    for early in (False, True)
]

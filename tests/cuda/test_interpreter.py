"""Without a GPU the interpreter is really on, and its bf16 is the hardware's."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction


@triton.jit
def _round_and_multiply(source, rounded, product, BLOCK: tl.constexpr):
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    value = tl.load(source + row * BLOCK + column).to(tl.bfloat16)
    tl.store(rounded + row * BLOCK + column, value)
    tl.store(product + row * BLOCK + column, tl.dot(value, tl.trans(value)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here")
def test_the_interpreter_is_on_where_there_is_no_gpu():
    assert isinstance(_round_and_multiply, InterpretedFunction)


def test_bf16_is_rounded_to_the_nearest_and_multiplied_as_numbers(device):
    source = torch.randn(32, 32, device=device)
    source[0, :4] = torch.tensor([1.00390625, 1.01171875, float("inf"), 3.3e38])  # two ties, the largest values
    rounded, product = torch.empty(32, 32, dtype=torch.bfloat16, device=device), torch.empty_like(source)
    _round_and_multiply[(1,)](source, rounded, product, BLOCK=32)
    assert torch.equal(rounded, source.bfloat16())
    wanted = source.bfloat16()[1:].double() @ source.bfloat16()[1:].double().T
    torch.testing.assert_close(product[1:, 1:].double(), wanted, rtol=1e-5, atol=1e-4)

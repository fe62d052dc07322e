"""Noise on the device against the reference's."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernels.cuda.philox import gumbel_tile
from kernels.sampling import gumbel_noise
from tests.kernels.rounding import UNIT


@triton.jit
def _noise_kernel(noise, position, seed, V: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row, first = tl.arange(0, ROWS), tl.program_id(0) * BLOCK
    tile = gumbel_tile(first, tl.load(position + row), tl.load(seed + row), BLOCK, ROWS)
    ids = first + tl.arange(0, BLOCK)
    tl.store(noise + row[None, :] * V + ids[:, None], tile, mask=(ids < V)[:, None])


def check_noise(vocab_size: int, block: int, device: str) -> None:
    """Another word would be far off; the logarithms of the same word err by some units."""
    position = torch.tensor([0, 5, 2**33 + 7, 2**31 + 1])
    seed = torch.tensor([1, -5, 2**62 + 3, -(2**63)])
    noise = torch.full((4, vocab_size), float("nan"), device=device)
    _noise_kernel[(triton.cdiv(vocab_size, block),)](
        noise, position.to(device), seed.to(device), V=vocab_size, BLOCK=block, ROWS=4
    )
    expected = gumbel_noise(seed, position, vocab_size).double()
    # where -log1p(-v) is near 1 the noise is near 0, and errs by a few units of 1
    assert ((noise.cpu().double() - expected).abs() <= 16 * UNIT * (1 + expected.abs())).all()


@pytest.mark.parametrize("vocab_size, block", [(71, 4), (403, 128)])
def test_noise_is_the_references(vocab_size, block, device):
    check_noise(vocab_size, block, device)


@pytest.mark.gpu
def test_noise_of_a_whole_vocabulary_is_the_references(device):
    check_noise(200058, 128, device)

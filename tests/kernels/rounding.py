"""Error bounds of fp32 arithmetic, and padding, for the tests of single operations."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.rows import pad_rows

UNIT = 2.0**-24  # fp32 rounds to nearest with a relative error up to this


def assert_within(actual: Tensor, exact: Tensor, bound: Tensor | float) -> None:
    """|actual - exact| <= bound elementwise; ``exact`` and ``bound`` in fp64."""
    assert actual.shape == exact.shape, (actual.shape, exact.shape)
    error = (actual.double() - exact).abs()
    excess = (error - bound).max()
    assert excess <= 0, f"off by {error.max():.3e}, {excess:.3e} beyond the bound"


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def rows_alike(op, *inputs: Tensor, most: int = 40) -> bool:
    """Whether ``op`` (of row tensors [T, ...]) gives each row the same bits in batches of 1 .. ``most`` rows.

    Row t of a batch of n is row t of ``inputs`` whatever n; then rows are drawn from other places too.
    """
    whole = op(*inputs)
    for n in range(1, most + 1):
        if not torch.equal(op(*(x[:n] for x in inputs))[:n], whole[:n]):
            return False
        places = torch.randperm(len(inputs[0]), generator=torch.Generator().manual_seed(n))[:n]
        if not torch.equal(op(*(x[places] for x in inputs))[:n], whole[places]):
            return False
    return True


def padded(x: Tensor) -> Tensor:
    """Rows of any trailing shape, zero-padded to the row quantum."""
    return pad_rows(x.reshape(x.shape[0], -1)).view(-1, *x.shape[1:])

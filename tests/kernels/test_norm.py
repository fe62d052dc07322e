"""RMSNorm and its two fusions with a gather."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.norm import dual_norm_cat_reference, embed_norm_reference, rms_norm_reference
from tests.kernels.rounding import UNIT, assert_within, random, rows_alike

WIDTHS = (1, 7, 64, 257)
EPS = 1e-6


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.double(), weight.double()
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def bound(exact: Tensor) -> Tensor:
    """Relative: half of (n + 1) units for the mean of n positive terms, 2 for rsqrt, 3 products."""
    return (exact.shape[-1] / 2 + 6) * UNIT * exact.abs()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("scale", "eps"), [(1.0, EPS), (1e-4, EPS), (30.0, 1e-2)])
def test_norm_is_within_the_bound(width: int, scale: float, eps: float) -> None:
    x, weight = random(9, 3, width, seed=1, scale=scale), 1 + random(width, seed=2, scale=0.3)
    exact = exact_norm(x, weight, eps)
    assert_within(rms_norm_reference(x, weight, eps), exact, bound(exact))


def test_a_bfloat16_row_is_rounded_once() -> None:
    x, weight = random(9, 65, seed=3).bfloat16(), (1 + random(65, seed=4, scale=0.3)).bfloat16()
    wide = rms_norm_reference(x.float(), weight.float(), EPS)
    assert torch.equal(rms_norm_reference(x, weight, EPS), wide.bfloat16())


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_a_norm_do_not_depend_on_the_others(width: int) -> None:
    weight = 1 + random(width, seed=5, scale=0.3)
    assert rows_alike(lambda x: rms_norm_reference(x, weight, EPS), random(45, width, seed=6))
    heads = random(45, 3, width, seed=7)
    assert rows_alike(lambda x: rms_norm_reference(x, weight, EPS), heads)


def test_embeddings_are_normed_rows_of_the_table() -> None:
    table, weight = random(11, 33, seed=8), 1 + random(33, seed=9, scale=0.3)
    ids = torch.tensor([10, 0, 3, 3])
    exact = exact_norm(table[ids], weight, EPS)
    assert_within(embed_norm_reference(ids, table, weight, EPS), exact, bound(exact))
    assert torch.equal(embed_norm_reference(ids, table, None, EPS), table[ids])


def test_a_depths_input_has_the_hidden_half_first() -> None:
    hidden, embedding = random(5, 33, seed=10), random(5, 33, seed=11)
    w_hidden, w_embed = 1 + random(33, seed=12, scale=0.3), 1 + random(33, seed=13, scale=0.3)
    out = dual_norm_cat_reference(hidden, w_hidden, embedding, w_embed, EPS)
    exact = torch.cat((exact_norm(hidden, w_hidden, EPS), exact_norm(embedding, w_embed, EPS)), -1)
    assert_within(out, exact, (33 / 2 + 6) * UNIT * exact.abs())

"""Logits of the rows that draw, and the greedy choice."""

from __future__ import annotations

import pytest
import torch

from kernels.head import greedy_reference, head_logits_reference
from tests.kernels.rounding import UNIT, assert_within, padded, random, rows_alike


@pytest.mark.parametrize("mup", [1.0, 3.0, 24.0])
@pytest.mark.parametrize(("hidden_size", "vocab"), [(5, 3), (64, 251), (33, 130)])
def test_logits_of_the_rows_are_within_the_bound(hidden_size: int, vocab: int, mup: float) -> None:
    hidden, head = random(21, hidden_size, seed=1), random(vocab, hidden_size, seed=2)
    rows = torch.tensor([20, 0, 7, 7, 3])
    exact = hidden[rows].double() @ head.double().T / mup
    size = hidden[rows].double().abs() @ head.double().abs().T / mup
    logits = head_logits_reference(hidden, rows, head, mup)
    assert logits.dtype == torch.float32
    assert_within(logits, exact, (hidden_size + 3) * UNIT * size)  # the sum, 1/mup, its product


def test_logits_do_not_depend_on_the_other_rows() -> None:
    head = random(131, 40, seed=3)
    assert rows_alike(
        lambda x: head_logits_reference(padded(x), torch.arange(len(x)), head, 3.0), random(45, 40, seed=4)
    )


def test_bfloat16_logits_are_scaled_in_fp32() -> None:
    hidden, head = random(8, 40, seed=5).bfloat16(), random(12, 40, seed=6).bfloat16()
    rows = torch.arange(8)
    unscaled = head_logits_reference(hidden, rows, head, 1.0)
    assert torch.equal(head_logits_reference(hidden, rows, head, 24.0), unscaled * (1 / 24.0))


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = torch.full((3, 37), -1.0)
    logits[0, [5, 20, 36]] = 2.0
    logits[1, [36, 0]] = 2.0
    assert greedy_reference(logits).tolist() == [5, 0, 0]

"""Products: the formula, row-exactness, and the start-up check that refuses a product without it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import rows
from kernels.rows import (
    find_row_quantum,
    linear_reference,
    pad_rows,
    padded_rows,
    row_counts,
    row_quantum,
    set_row_quantum,
)
from tests.kernels.rounding import UNIT, assert_within, padded, random, rows_alike

SHAPES = [(1, 1), (3, 5), (37, 129), (64, 251), (260, 33)]  # (K, N)


@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_product_is_within_the_bound_of_fp32_sums(k: int, n: int) -> None:
    x, w = random(13, k, seed=1), random(n, k, seed=2)
    exact = x.double() @ w.double().T
    bound = (k + 1) * UNIT * (x.double().abs() @ w.double().abs().T)  # any order of summation
    assert_within(linear_reference(pad_rows(x), w)[:13], exact, bound)


@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_rows_of_a_product_do_not_depend_on_the_others(k: int, n: int) -> None:
    w = random(n, k, seed=3)
    assert rows_alike(lambda x: linear_reference(padded(x), w), random(45, k, seed=4))


def test_padding_appends_zero_rows_up_to_the_quantum() -> None:
    quantum = row_quantum()
    x = random(quantum + 1, 3, seed=5)
    out = pad_rows(x)
    assert out.shape == (2 * quantum, 3) and padded_rows(quantum + 1) == 2 * quantum
    assert torch.equal(out[: quantum + 1], x) and not out[quantum + 1 :].any()
    assert pad_rows(out) is out
    with pytest.raises(AssertionError):
        linear_reference(x, random(2, 3, seed=6))


def test_row_counts_reach_the_bound() -> None:
    for quantum in (4, 8, 16):
        for most in (1, 100, 512, 513):
            counts = row_counts(quantum, most)
            assert all(count % quantum == 0 for count in counts)
            assert counts[0] == quantum and most <= counts[-1] < most + 2 * quantum


def broken(product, holds):
    """``product`` whose last bits depend on the row count unless ``holds(count)``."""

    def run(x: Tensor, w: Tensor) -> Tensor:
        out = product(x, w)
        return out if holds(x.shape[-2]) else out * (1 + 1e-6)

    return run


def test_the_first_quantum_that_holds_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    linears, batched = [(48, 40), (16, 24)], [(16, 64)]
    assert find_row_quantum(linears, batched, 300, torch.float32) == 4
    for quantum in (8, 16):
        with monkeypatch.context() as patch:
            patch.setattr(rows.F, "linear", broken(F.linear, lambda count, q=quantum: count % q == 0))
            assert find_row_quantum(linears, batched, 300, torch.float32) == quantum
        with monkeypatch.context() as patch:
            patch.setattr(rows.torch, "bmm", broken(torch.bmm, lambda count, q=quantum: count % q == 0))
            assert find_row_quantum(linears, batched, 300, torch.float32) == quantum


@pytest.mark.parametrize(("function", "shape"), [("linear", "K=48, N=40"), ("bmm", "K=16, N=64")])
def test_a_product_that_is_exact_at_no_quantum_is_refused(
    monkeypatch: pytest.MonkeyPatch, function: str, shape: str
) -> None:
    owner = rows.F if function == "linear" else rows.torch
    monkeypatch.setattr(owner, function, broken(getattr(owner, function), lambda count: count < 256))
    with pytest.raises(RuntimeError, match=f"{shape}.*threads"):
        find_row_quantum([(48, 40)], [(16, 64)], 300, torch.float32)


def test_only_the_shape_that_breaks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = F.linear

    def bad(x: Tensor, w: Tensor) -> Tensor:
        return linear(x, w) * (1 + 1e-6 * (x.shape[0] > 32)) if w.shape == (40, 48) else linear(x, w)

    monkeypatch.setattr(rows.F, "linear", bad)
    with pytest.raises(RuntimeError, match="K=48, N=40"):
        find_row_quantum([(16, 24), (48, 40), (64, 8)], [], 300, torch.float32)
    assert find_row_quantum([(16, 24), (64, 8)], [], 300, torch.float32) == 4


def test_a_process_that_pads_to_16_rows_finds_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check tries 4 rows too, which are no product of the model any more."""
    monkeypatch.setattr(rows.F, "linear", broken(F.linear, lambda count: count % 16 == 0))
    before = row_quantum()
    try:
        for _ in range(2):
            set_row_quantum(find_row_quantum([(48, 40)], [(16, 64)], 300, torch.float32))
            assert row_quantum() == 16
    finally:
        set_row_quantum(before)

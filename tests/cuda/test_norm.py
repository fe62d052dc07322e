"""The fused norms: bounds against float64, rows that depend on nothing but themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cuda.norm import NormConfig, add_norm, dual_norm_cat, embed_norm, rms_norm
from tests.cuda.early_chains import assert_overlap_changes_no_bit

EPS = 1e-6
VOCAB = 50


def widths(device: str) -> tuple[int, ...]:
    return (4096, 6144, 2048, 1024) if device == "cuda" else (48, 64)


def counts(device: str) -> tuple[int, ...]:
    return (1, 2, 3, 17, 64, 255, 256) if device == "cuda" else (1, 2, 9)


def random(*shape: int, seed: int, device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


def poisoned(*shape: int, device: str) -> Tensor:
    return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


def assert_rounded(found: Tensor, expected: Tensor) -> None:
    """Half a bf16 unit of the exact value, and a little for the fp32 sum before it."""
    assert ((found.double() - expected).abs() <= expected.abs() * (2**-8 + 2**-19) + 1e-30).all()


def run_all(
    t: int, width: int, device: str, order: Tensor | None = None, config: NormConfig | None = None
) -> list[Tensor]:
    """Outputs of every op for the first ``t`` of 256 rows (of those rows in ``order``)."""
    x, y = (random(256, width, seed=s, device=device) for s in (1, 2))
    weight, other = (random(width, seed=s, device=device) for s in (3, 4))
    table = random(VOCAB, width, seed=5, device=device)
    ids = (torch.arange(256, device=device) * 7 % VOCAB).int()
    index = torch.arange(t, device=device) if order is None else order
    x, y, ids = x[index].contiguous(), y[index].contiguous(), ids[index].contiguous()
    normed, embedded, chained, added = (poisoned(t, width, device=device) for _ in range(4))
    both = poisoned(t, 2 * width, device=device)
    total = x.clone()
    rms_norm(x, weight, EPS, normed, config)
    embed_norm(ids, table, weight, EPS, embedded, other, chained, config)
    add_norm(total, y, weight, EPS, added, config)
    dual_norm_cat(x, other, ids, table, weight, other, EPS, both, config)
    assert_rounded(normed, exact(x, weight))
    assert_rounded(embedded, exact(table[ids.long()], weight))
    assert_rounded(chained, exact(embedded, other))
    assert torch.equal(total, x + y)
    assert_rounded(added, exact(total, weight))
    assert_rounded(both[:, :width], exact(x, other))
    assert_rounded(both[:, width:], exact(embedded, other))
    return [normed, embedded, chained, total, added, both]


def check_norms_are_row_exact(device: str) -> None:
    for width in widths(device):
        largest = counts(device)[-1]
        whole = run_all(largest, width, device)
        for t in counts(device):
            assert all(torch.equal(a, b[:t]) for a, b in zip(run_all(t, width, device), whole, strict=True))
        order = torch.randperm(largest, generator=torch.Generator().manual_seed(9)).to(device)
        shuffled = run_all(largest, width, device, order)
        assert all(torch.equal(a, b[order]) for a, b in zip(shuffled, whole, strict=True))


def test_norms_round_once_and_rows_keep_their_bits_in_every_batch(device):
    check_norms_are_row_exact(device)


def test_the_rows_of_a_program_change_no_bit(device):
    for width in widths(device):
        for t in counts(device):
            wanted = run_all(t, width, device, config=NormConfig(4))
            for rows in (2, 4):
                found = run_all(t, width, device, config=NormConfig(4, rows))
                assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), (width, t, rows)


def test_an_embedding_without_a_norm_is_the_table_and_id_minus_one_is_zero(device):
    table = random(VOCAB, 64, seed=1, device=device)
    out = poisoned(3, 64, device=device)
    embed_norm(torch.tensor([7, -1, 0], device=device), table, None, EPS, out)
    assert torch.equal(out[[0, 2]], table[[7, 0]]) and not out[1].any()


@pytest.mark.gpu
def test_a_table_beyond_two_to_the_31_elements_is_addressed(device):
    table = torch.zeros(600_000, 4096, dtype=torch.bfloat16, device=device)
    table[599_999] = 3.0
    out = poisoned(1, 4096, device=device)
    embed_norm(torch.tensor([599_999], device=device), table, None, EPS, out)
    assert (out == 3.0).all()


@pytest.mark.gpu
def test_early_launches_in_a_chain_change_no_bit(device):
    for width in widths(device):
        x, y = (random(2048, width, seed=s, device=device) for s in (1, 2))
        weight = random(width, seed=3, device=device)

        def chain(is_early: bool, x=x, y=y, weight=weight, width=width) -> list[Tensor]:
            total, found = x + 0, [y]
            for rows in (1, 2) * 6:
                config = NormConfig(4, rows, is_early=is_early)
                found.append(rms_norm(found[-1], weight, EPS, torch.empty_like(y), config))
                found.append(add_norm(total, found[-1], weight, EPS, torch.empty_like(y), config))
            return [*found, total]

        assert_overlap_changes_no_bit(chain, width)

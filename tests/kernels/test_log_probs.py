"""Log probs: the formula, the order of the sum, ranks and ties, bits in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.log_probs import BLOCK, log_softmax_reference, ranks_reference, top_ids_reference


@pytest.mark.parametrize("vocab_size", [1, 7, BLOCK, BLOCK + 1, 5000])
def test_log_softmax_follows_its_formula(vocab_size: int) -> None:
    logits = 6 * torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    expected = logits.double().log_softmax(1)
    torch.testing.assert_close(log_softmax_reference(logits).double(), expected, rtol=1e-6, atol=1e-5)


def test_the_sum_runs_by_halves_and_in_order_of_blocks() -> None:
    logits = 3 * torch.randn(1, 2 * BLOCK + 100, generator=torch.Generator().manual_seed(1))
    shifted = (logits - logits.max())[0]
    total = np.float32(0)
    for block in shifted.split(BLOCK):
        part = np.zeros(BLOCK, np.float32)
        part[: len(block)] = torch.exp(block).numpy()
        while len(part) > 1:
            part = part[: len(part) // 2] + part[len(part) // 2 :]
        total = total + part[0]
    assert torch.equal(log_softmax_reference(logits)[0], shifted - torch.log(torch.tensor(total)))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_every_batch(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(2)
        logits = 4 * torch.randn(33, 4093, generator=generator)
        alone = torch.cat([log_softmax_reference(row[None].clone()) for row in logits])
        for size in (*range(1, 12), 33):
            index = torch.randperm(33, generator=generator)[:size]
            assert torch.equal(log_softmax_reference(logits[index]), alone[index])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("k", [0, 1, 2, 5, 20])
def test_ranks_and_top_ids_break_ties_at_the_lower_id(k: int) -> None:
    logits = torch.randint(0, 5, (40, 301), generator=torch.Generator().manual_seed(3)).float()
    top = top_ids_reference(logits, k)
    assert top.shape == (40, k)
    for row, x in enumerate(logits.tolist()):
        order = sorted(range(301), key=lambda i, x=x: (-x[i], i))
        assert top[row].tolist() == order[:k]
        ids = torch.tensor(order[::60])
        ranks = ranks_reference(logits[row].expand(len(ids), -1), ids)
        assert ranks.tolist() == list(range(1, 302, 60))

"""Log probs, ranks and likeliest ids on the device against the definition; the batch changes no bit."""

from __future__ import annotations

import torch

from kernels.cuda.log_probs import score_rows
from kernels.log_probs import log_softmax_reference, ranks_reference, top_ids_reference


def test_scores_are_the_reference_s_and_the_batch_changes_no_bit(device):
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(5, 4500, generator=generator) * 4).round() / 2  # many equal values
    tokens = torch.tensor([0, 4499, 17, int(logits[3].argmax()), 2000], dtype=torch.int32)
    got = score_rows(logits.to(device), tokens.to(device), 4)
    log_probs, top = log_softmax_reference(logits), top_ids_reference(logits, 4)
    assert torch.equal(got[:, 1].cpu().long(), ranks_reference(logits, tokens.long()))
    assert torch.equal(got[:, 2:6].cpu().long(), top)
    expected = torch.cat((log_probs.gather(1, tokens.long()[:, None]), log_probs.gather(1, top)), 1)
    values = torch.cat((got[:, :1], got[:, 6:]), 1).contiguous().view(torch.float32).cpu()
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=2e-6)
    for row in (0, 3):
        alone = score_rows(logits[row : row + 1].to(device), tokens[row : row + 1].to(device), 4)
        assert torch.equal(alone, got[row : row + 1])
    assert torch.equal(score_rows(logits.to(device), tokens.to(device), 0), got[:, :2])

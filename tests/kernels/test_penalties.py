"""Shaping of logits: each setting and each pair against its definition, the draws' distribution, bits in any batch."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
import torch
from torch import Tensor

from kernels.penalties import (
    NO_ID,
    PenaltyRows,
    ban_reference,
    bias_reference,
    completions_reference,
    output_counts_reference,
    penalize_reference,
)
from kernels.sampling import sample
from tests.kernels.test_sampling import chi_square_p_value, filtered_softmax, make_rows

VOCAB = 16
NUM_DRAWS = 100_000  # of each history
PROMPT = [1, 4, 4, 9]
OUTPUTS = (
    [2, 5, 5],
    [9, 2, 2, 2, 7],
)  # histories of the even and of the odd rows: committed ids, then drafts
COMMITTED = (1, 2)
SETTINGS: dict[str, dict] = {
    "repetition": {"repetition": 1.7},
    "repetition below 1": {"repetition": 0.6},
    "presence": {"presence": 0.9},
    "frequency": {"frequency": 0.5},
    "frequency below 0": {"frequency": -0.7},
    "bias": {"bias": {0: 1.5, 5: -2.0, 9: 0.75}},
    "bad words": {"bad_words": ((8,), (5, 3), (2, 7, 6), (2, 2, 7, 1), (4, 11))},
    "min_tokens": {"banned": (3, 12)},
    "temperature": {"temperature": 1.6},
    "temperature below 1": {"temperature": 0.6},
    "min_p": {"min_p": 0.08},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.85},
}
FILTERS = ("temperature", "min_p", "top_k", "top_p")
COMBINED = SETTINGS | {
    f"{a} and {b}": SETTINGS[a] | SETTINGS[b]
    for a, b in combinations(SETTINGS, 2)
    if not SETTINGS[a].keys() & SETTINGS[b].keys()
}
COMBINED["all"] = {key: value for setting in reversed(SETTINGS.values()) for key, value in setting.items()}


def logits_of(seed: int) -> Tensor:
    return 1.2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def shape(logits: Tensor, source: Tensor, setting: dict) -> Tensor:
    """The op's steps over rows [R, V'] whose history is ``OUTPUTS[source]``."""
    num_rows = len(source)
    base = torch.stack([
        torch.bincount(torch.tensor(ids[:n]), minlength=VOCAB) for ids, n in zip(OUTPUTS, COMMITTED, strict=True)
    ]).int()  # fmt: skip
    drafts = torch.full((2, 3), NO_ID)
    for i, (ids, n) in enumerate(zip(OUTPUTS, COMMITTED, strict=True)):
        drafts[i, : len(ids) - n] = torch.tensor(ids[n:])
    in_prompt = torch.zeros(num_rows, VOCAB, dtype=torch.bool)
    in_prompt[:, PROMPT] = True
    values = (
        setting.get(name, off) for name, off in (("repetition", 1.0), ("presence", 0.0), ("frequency", 0.0))
    )
    counts = output_counts_reference(base, source, drafts[source])
    rows = PenaltyRows(*(torch.full((num_rows,), value) for value in values), in_prompt, counts)
    shaped = penalize_reference(logits, rows)
    every = torch.arange(num_rows)
    for token, value in setting.get("bias", {}).items():
        bias_reference(shaped, every, torch.full_like(every, token), torch.full((num_rows,), value))
    if words := setting.get("bad_words"):
        table, recent = torch.full((len(words), 4), NO_ID), torch.full((2, 3), NO_ID)
        for i, word in enumerate(words):
            table[i, 4 - len(word) :] = torch.tensor(word)
        for i, ids in enumerate(OUTPUTS):
            recent[i] = torch.tensor(ids[-3:])
        ban_reference(shaped, *completions_reference(recent[source], table))
    for token in setting.get("banned", ()):
        ban_reference(shaped, every, torch.full_like(every, token))
    return shaped


def shaped_by_definition(logits: Tensor, output: list[int], setting: dict) -> Tensor:
    x, r = logits.double().tolist(), setting.get("repetition", 1.0)
    for token in {*PROMPT, *output}:
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token, count in Counter(output).items():
        x[token] -= setting.get("presence", 0.0) + setting.get("frequency", 0.0) * count
    for token, value in setting.get("bias", {}).items():
        x[token] += value
    for *prefix, last in setting.get("bad_words", ()):
        if output[len(output) - len(prefix) :] == prefix:
            x[last] = -torch.inf
    for token in setting.get("banned", ()):
        x[token] = -torch.inf
    return torch.tensor(x, dtype=torch.float64)


@pytest.mark.parametrize("name", COMBINED)
def test_shaped_logits_follow_their_definitions(name: str) -> None:
    for seed in range(5):
        logits = logits_of(seed)
        shaped = shape(logits.expand(2, -1), torch.tensor([0, 1]), COMBINED[name])
        for row, output in zip(shaped, OUTPUTS, strict=True):
            torch.testing.assert_close(row.double(), shaped_by_definition(logits, output, COMBINED[name]),
                                       rtol=1e-5, atol=1e-5)  # fmt: skip


@pytest.mark.parametrize("name", COMBINED)
def test_draws_follow_the_shaped_and_filtered_softmax(name: str) -> None:
    setting, logits = COMBINED[name], logits_of(8)
    source = torch.arange(2 * NUM_DRAWS) % 2
    filters = {key: setting[key] for key in FILTERS if key in setting}
    rows = make_rows(len(source), **filters, seed=42, position=torch.arange(len(source)))
    tokens = sample(shape(logits.expand(2, -1), torch.tensor([0, 1]), setting)[source], rows)
    for i, output in enumerate(OUTPUTS):
        counts = torch.bincount(tokens[source == i], minlength=VOCAB)
        prob = filtered_softmax(shaped_by_definition(logits, output, setting), **filters)
        assert counts[prob == 0].sum() == 0
        assert chi_square_p_value(*pooled(counts, prob)) > 1e-4


def pooled(counts: Tensor, prob: Tensor) -> tuple[Tensor, Tensor]:
    """Cells of an expected count below 5 as one; with the smallest of the others where that is not enough."""
    expected = prob * counts.sum()
    small = (prob > 0) & (expected < 5)
    if not small.any():
        return counts, prob
    if expected[small].sum() < 5:
        small |= expected == expected[expected >= 5].min()
    rest = ~small
    return (
        torch.cat((counts[rest], counts[small].sum()[None])),
        torch.cat((prob[rest], prob[small].sum()[None])),
    )


def test_neutral_values_leave_the_bits() -> None:
    logits = torch.cat((logits_of(1), torch.tensor([-0.0, 0.0, -torch.inf]))).repeat(2, 1)
    counts = torch.arange(logits.shape[1]).repeat(2, 1).int()
    rows = PenaltyRows(torch.ones(2), torch.zeros(2), torch.zeros(2), counts > 4, counts)
    assert torch.equal(penalize_reference(logits, rows).view(torch.int32), logits.view(torch.int32))


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    generator = torch.Generator().manual_seed(2)
    num_rows, vocab = 23, 1003
    logits = 5 * torch.randn(num_rows, vocab, generator=generator)
    counts = torch.randint(0, 3, (num_rows, vocab), generator=generator).int()
    in_prompt = torch.rand(num_rows, vocab, generator=generator) < 0.2
    penalties = (
        0.5 + torch.rand(num_rows, generator=generator),
        *torch.randn(2, num_rows, generator=generator),
    )
    every = [*penalties, in_prompt, counts]
    alone = [
        penalize_reference(logits[i : i + 1], PenaltyRows(*(x[i : i + 1] for x in every))) for i in range(23)
    ]
    for size in (1, 2, 3, 8, 23):
        index = torch.randperm(num_rows, generator=generator)[:size]
        batch = penalize_reference(logits[index], PenaltyRows(*(x[index] for x in every)))
        assert torch.equal(batch, torch.cat([alone[i] for i in index.tolist()]))


def test_a_word_needs_its_whole_beginning() -> None:
    words = torch.tensor([[NO_ID, NO_ID, 7], [NO_ID, 3, 8], [5, 3, 9]])
    recent = torch.tensor([[NO_ID, NO_ID], [NO_ID, 3], [5, 3], [3, 5]])
    rows, ids = completions_reference(recent, words)
    assert sorted(zip(rows.tolist(), ids.tolist(), strict=True)) == [
        (0, 7), (1, 7), (1, 8), (2, 7), (2, 8), (2, 9), (3, 7),
    ]  # fmt: skip

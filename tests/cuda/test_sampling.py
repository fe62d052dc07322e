"""The device's draw against the reference: the same tokens, whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cuda.rank_cut import cut_rows
from kernels.cuda.sampling import TILE, sample
from kernels.sampling import SamplingRows, filter_logits_reference, sample_reference

# temperature, top_k, top_p, min_p
GREEDY, PLAIN, MIN_P = (0.0, 5, 0.5, 0.1), (1.3, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.05)
TOP_K, TOP_P, BOTH = (1.0, 17, 1.0, 0.0), (1.5, 0, 0.9, 0.0), (0.9, 40, 0.8, 0.02)


def rows_of(filters: list[tuple[float, int, float, float]], device: str, first: int = 0) -> SamplingRows:
    temperature, top_k, top_p, min_p = zip(*filters, strict=True)
    index = torch.arange(first, first + len(filters))
    seed, position = index * 0x9E3779B97F4A7C15 % 2**62 - 2**61, index * 3 + (index % 2) * 2**33
    tensors = (
        torch.tensor(temperature), torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p), torch.tensor(min_p),
        seed, position,
    )  # fmt: skip
    return SamplingRows(*(t.to(device) for t in tensors))


def logits_of(num_rows: int, vocab: int, scale: float, device: str, ties: bool = False) -> Tensor:
    x = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab)) * scale
    return ((x * 2).round() / 2 if ties else x).to(device)


def draw(logits: Tensor, rows: SamplingRows | None, ranked: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    count, device = logits.shape[0], logits.device
    tokens = torch.full((count,), -7, dtype=torch.int64, device=device)
    row_max, log_sum = torch.full((2, count), float("nan"), device=device)
    sample(logits, rows, tokens, row_max, log_sum, ranked=ranked)
    return tokens, row_max, log_sum


def assert_as_reference(logits: Tensor, filters: list, ranked: bool = True) -> None:
    rows = rows_of(filters, str(logits.device))
    on_cpu = SamplingRows(**{name: value.cpu() for name, value in vars(rows).items()})
    tokens, row_max, log_sum = draw(logits, rows, ranked)
    assert tokens.tolist() == sample_reference(logits.cpu(), on_cpu).tolist()
    assert torch.equal(row_max, logits.amax(1))
    exact = torch.logsumexp(logits.double(), 1)
    assert ((row_max.double() + log_sum.double() - exact).abs() < 4e-6).all()


def test_unranked_rows_draw_the_reference_s_tokens(device):
    assert_as_reference(logits_of(4, 5000, 3.0, device), [GREEDY, PLAIN, MIN_P, PLAIN], ranked=False)


def assert_cut_as_reference(logits: Tensor, filters: tuple) -> None:
    """Exactly the ids that the reference's top_k and top_p leave; min_p is off."""
    rows = rows_of([filters] * len(logits), str(logits.device))
    padded = torch.nn.functional.pad(logits, (0, -logits.shape[1] % TILE), value=-torch.inf)
    part_max = padded.unflatten(1, (-1, TILE)).amax(2)
    values, ids = torch.empty(len(logits), device=logits.device), torch.empty_like(rows.top_k)
    cut_rows(logits, rows, part_max, TILE, values, ids)
    scaled = logits / rows.temperature[:, None]
    at_cut = (scaled == values[:, None]) & (
        torch.arange(logits.shape[1], device=logits.device) <= ids[:, None]
    )
    on_cpu = SamplingRows(**{name: value.cpu() for name, value in vars(rows).items()})
    expected = filter_logits_reference(logits.cpu().clone(), on_cpu) > -torch.inf
    assert torch.equal(((scaled > values[:, None]) | at_cut).cpu(), expected)


@pytest.mark.parametrize("filters", [TOP_K, TOP_P, (0.9, 40, 0.8, 0.0)])
@pytest.mark.parametrize("ties", [False, True])
def test_top_k_and_top_p_leave_the_reference_s_ids(filters, ties, device):
    assert_cut_as_reference(logits_of(1, 300, 2.0, device, ties), filters)


def test_many_equal_values_lose_their_highest_ids(device):
    assert_cut_as_reference(logits_of(1, 700, 0.5, device, ties=True), (1.0, 650, 0.99, 0.0))
    equal = torch.full((1, 9000), -1.25, device=device)  # over three tiles
    for filters in ((1.0, 5000, 1.0, 0.0), (1.0, 0, 0.7, 0.0), (1.0, 5000, 0.9, 0.0)):
        assert_cut_as_reference(equal, filters)


def test_values_of_all_magnitudes_are_counted_by_top_k(device):
    """One, two or three values in each first digit, positive and negative, over two tiles."""
    logits = torch.full((1, 5000), -1e30, device=device)
    sizes = 4.0 ** torch.arange(-20, 20, device=device)
    logits[0, 4050:4130] = torch.cat((sizes, -1.5 * sizes))
    logits[0, 100:120] = 1.25 * sizes[::2]
    for top_k in (1, 4, 30, 61, 75, 99):
        assert_cut_as_reference(logits, (1.0, top_k, 1.0, 0.0))


def test_top_p_ends_among_the_equals_that_top_k_left(device):
    logits = torch.full((1, 5000), -40.0, device=device)
    logits[0, 4090:4110] = (
        2.0  # 20 equals over a border of tiles; top_k leaves 10, half of their mass needs 5
    )
    logits[0, 3] = 1.0
    assert_cut_as_reference(logits, (1.0, 10, 0.5, 0.0))


def test_a_long_tail_still_counts(device):
    logits = torch.zeros(1, 4000, device=device)
    logits[0, 7] = 13.0  # 99.1 % of the mass
    assert_cut_as_reference(logits, (1.0, 0, 0.995, 0.0))


def test_a_top_k_beyond_the_finite_values_leaves_them_all(device):
    logits = torch.full((1, 600), -torch.inf, device=device)
    logits[0, 100:120] = torch.linspace(-3, 2, 20, device=device)
    assert_as_reference(logits, [(1.0, 50, 1.0, 0.0)])
    assert_as_reference(logits, [(1.0, 50, 0.8, 0.0)])


def test_min_p_leaves_the_reference_s_ids(device):
    assert_as_reference(logits_of(6, 300, 2.0, device), [(9.0, 0, 1.0, 0.8)] * 6, ranked=False)


def test_ranked_rows_draw_the_reference_s_tokens(device):
    assert_as_reference(logits_of(1, 300, 2.0, device), [BOTH])


def test_greedy_takes_the_lowest_of_equal_ids_across_tiles(device):
    logits = torch.zeros(3, 9000, device=device)
    logits[0, [8999, 4096, 4100]] = 5.0
    logits[1] = -torch.inf
    logits[1, [4095, 5000]] = -3.0
    assert draw(logits, None)[0].tolist() == [4096, 4095, 0]


def test_the_batch_changes_no_token_and_no_log_sum(device):
    logits = logits_of(3, 4200, 9.0, device)
    filters = [PLAIN, MIN_P, BOTH]
    whole = draw(logits, rows_of(filters, device))
    for i in (0, 2) if device == "cpu" else range(3):
        alone = draw(logits[i : i + 1], rows_of(filters[i : i + 1], device, i))
        assert all(torch.equal(a, w[i : i + 1]) for a, w in zip(alone, whole, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [4096, 32768, 200_058])
def test_real_vocabularies_draw_the_reference_s_tokens(vocab, device):
    filters = [GREEDY, PLAIN, MIN_P, TOP_K, TOP_P, BOTH] * 8
    for scale, ties in ((1.0, False), (4.0, False), (4.0, True)):
        logits = logits_of(len(filters), vocab, scale, device, ties)
        assert_as_reference(logits, filters)
        whole = draw(logits, rows_of(filters, device))
        for first in range(0, len(filters), 7):
            part = draw(logits[first : first + 7], rows_of(filters[first : first + 7], device, first))
            assert all(torch.equal(p, w[first : first + 7]) for p, w in zip(part, whole, strict=True))

"""Sampling: the generator, the noise, each filter, the distribution of the draws, row-invariance."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from kernels.sampling import (
    MIN_TEMPERATURE,
    SamplingRows,
    _gumbel_from_words,
    filter_logits_reference,
    gumbel_noise,
    philox4x32_10,
    sample,
    sample_reference,
)

# Counter, key, words: the lines "philox4x32 10" of
# https://github.com/DEShawResearch/random123/blob/v1.14.0/tests/kat_vectors
KNOWN_ANSWERS = {
    "zeros": (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    "ones": (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    "pi": ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
}

FILTERS = {
    "none": {},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "top_k_top_p": {"top_k": 6, "top_p": 0.7},
    "min_p_top_k": {"min_p": 0.05, "top_k": 4},
    "all": {"temperature": 1.3, "min_p": 0.03, "top_k": 9, "top_p": 0.85},
}


def make_rows(
    num_rows: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: Tensor | int = 0,
    position: Tensor | int = 0,
) -> SamplingRows:
    def fill(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype)

    def per_row(value: Tensor | int) -> Tensor:
        return value if isinstance(value, Tensor) else fill(value, torch.int64)

    return SamplingRows(
        temperature=fill(temperature, torch.float32),
        top_k=fill(top_k, torch.int32),
        top_p=fill(top_p, torch.float32),
        min_p=fill(min_p, torch.float32),
        seed=per_row(seed),
        position=per_row(position),
    )


def mixed_rows(num_rows: int, generator: torch.Generator) -> SamplingRows:
    """Greedy, plain and filtered rows side by side, with seeds and positions over the whole 64-bit range."""

    def pick(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (num_rows,), generator=generator)]

    return SamplingRows(
        temperature=pick([0.0, 0.005, 0.7, 1.0, 2.5], torch.float32),
        top_k=pick([0, 0, 1, 7, 50, 200], torch.int32),
        top_p=pick([1.0, 1.0, 0.3, 0.95], torch.float32),
        min_p=pick([0.0, 0.0, 0.02, 0.5], torch.float32),
        seed=torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator),
        position=torch.randint(0, 2**40, (num_rows,), generator=generator),
    )


def filtered_softmax(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Probabilities [V'] after the filters, straight from their definitions, in float64; 0: filtered out."""
    prob = (logits.double() / max(temperature, MIN_TEMPERATURE)).softmax(0).tolist()
    alive = [i for i in range(len(prob)) if prob[i] >= min_p * max(prob)]
    alive.sort(key=lambda i: (-prob[i], i))
    if top_k > 0:
        alive = alive[:top_k]
    if top_p < 1:
        total, cumulative, nucleus = sum(prob[i] for i in alive), 0.0, []
        for i in alive:
            nucleus.append(i)
            cumulative += prob[i] / total
            if cumulative >= top_p:
                break
        alive = nucleus
    total = sum(prob[i] for i in alive)
    kept = [prob[i] / total if i in alive else 0.0 for i in range(len(prob))]
    return torch.tensor(kept, dtype=torch.float64)


def chi_square_p_value(counts: Tensor, prob: Tensor) -> float:
    """Upper tail of Pearson's statistic; categories of probability 0 must be empty."""
    assert counts[prob == 0].sum() == 0, "a filtered token was drawn"
    counts, expected = counts[prob > 0].double(), prob[prob > 0] * counts.sum()
    assert expected.min() >= 5, "too few draws for the chi-square approximation"
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor(len(counts) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


# --- generator and noise ----------------------------------------------------------------


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(name: str) -> None:
    counter, key, words = (torch.tensor([int(w, 16) for w in text.split()]) for text in KNOWN_ANSWERS[name])
    assert philox4x32_10(counter, key).tolist() == words.tolist()


def test_philox_broadcasts_counters_over_keys() -> None:
    counter = torch.randint(2**32, (5, 1, 4), generator=torch.Generator().manual_seed(0))
    key = torch.randint(2**32, (3, 2), generator=torch.Generator().manual_seed(1))
    words = philox4x32_10(counter, key)
    assert words.shape == (5, 3, 4)
    for i in range(5):
        for j in range(3):
            assert words[i, j].tolist() == philox4x32_10(counter[i, 0], key[j]).tolist()


def test_noise_takes_its_words_from_the_stated_counter_and_key() -> None:
    seed, position, vocab_size = -0x123456789ABCDEF, (7 << 32) + 11, 13
    key = torch.tensor([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF])
    words = [philox4x32_10(torch.tensor([i // 4, 11, 7, 0]), key)[i % 4] for i in range(vocab_size)]
    expected = _gumbel_from_words(torch.stack(words).float())
    assert torch.equal(gumbel_noise(torch.tensor([seed]), torch.tensor([position]), vocab_size)[0], expected)


def test_noise_is_finite_at_the_extreme_words_and_fine_where_it_is_large() -> None:
    words = torch.tensor([0, 1, 2**32 - 257, 2**32 - 1])
    noise = _gumbel_from_words(words.float())
    assert noise.isfinite().all()
    assert noise[0].item() == pytest.approx(33 * math.log(2), rel=1e-6)  # v = 2^-33
    assert noise[1].item() == pytest.approx(noise[0].item() - math.log(3), rel=1e-6)
    assert noise[3].item() == pytest.approx(-2.8115307, rel=1e-5)  # v = 1 - 2^-24


def test_noise_follows_its_formula_in_float64() -> None:
    words = torch.randint(2**32, (100_000,), generator=torch.Generator().manual_seed(2))
    v = (words.double() + 0.5) * 2.0**-32
    expected = -torch.log(-torch.log1p(-v))
    inside = v < 0.999  # near 1 the rounding of v to fp32 is magnified
    error = (_gumbel_from_words(words.float()).double() - expected).abs()
    assert error[inside].max() < 1e-5


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel_noise(torch.full((1000,), 5), torch.arange(1000), 257).double().flatten()
    uniform = torch.exp(-torch.exp(-noise)).sort().values  # Gumbel CDF
    n = len(uniform)
    distance = (uniform - (torch.arange(n, dtype=torch.float64) + 0.5) / n).abs().max()
    assert distance < 1.95 / n**0.5  # Kolmogorov-Smirnov, p = 0.001


@pytest.mark.parametrize(
    "other",
    [{"position": 1}, {"position": 2**32}, {"seed": 1}, {"seed": 2**32}, {"seed": -(2**63)}],
    ids=["next position", "high word of position", "next seed", "high word of seed", "top bit of seed"],
)
def test_noise_of_other_positions_and_seeds_is_uncorrelated(other: dict[str, int]) -> None:
    n = 100_000
    base = gumbel_noise(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), n)[0]
    seed, position = torch.tensor([other.get("seed", 0)]), torch.tensor([other.get("position", 0)])
    correlation = torch.corrcoef(torch.stack([base, gumbel_noise(seed, position, n)[0]]))[0, 1]
    assert abs(correlation) < 4 / n**0.5


def test_noise_of_neighbouring_ids_and_positions_is_uncorrelated() -> None:
    noise = gumbel_noise(torch.full((20_000,), 9), torch.arange(20_000), 8)
    num_rows = len(noise)
    by_id = torch.corrcoef(noise.T) - torch.eye(8)
    by_position = torch.corrcoef(torch.stack([noise[:-1].flatten(), noise[1:].flatten()]))[0, 1]
    assert by_id.abs().max() < 4.5 / num_rows**0.5
    assert abs(by_position) < 4 / (8 * num_rows) ** 0.5


# --- filters ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab_size", [2, 17, 251])
def test_filters_keep_what_their_definitions_keep(name: str, vocab_size: int) -> None:
    logits = 2.5 * torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    filtered = filter_logits_reference(logits, make_rows(40, **FILTERS[name]))
    for row, kept in zip(logits, filtered, strict=True):
        expected = filtered_softmax(row, **FILTERS[name])
        assert torch.equal(kept > -torch.inf, expected > 0)
        torch.testing.assert_close(kept.double().softmax(0), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("top_k", [1, 2, 3, 9, 128, 129, 200])
def test_top_k_keeps_exactly_k_with_ties_to_the_lower_id(top_k: int) -> None:
    logits = torch.randint(0, 4, (30, 211), generator=torch.Generator().manual_seed(3)).float()
    filtered = filter_logits_reference(logits, make_rows(30, top_k=top_k))
    for row, kept in zip(logits.tolist(), filtered, strict=True):
        expected = sorted(sorted(range(211), key=lambda i: (-row[i], i))[:top_k])
        assert (kept > -torch.inf).nonzero()[:, 0].tolist() == expected


def test_top_p_cuts_ties_at_the_lower_id() -> None:
    logits = torch.zeros(1, 8)  # eight equal tokens of 1/8; 0.4 is reached by four of them
    filtered = filter_logits_reference(logits, make_rows(1, top_p=0.4))
    assert (filtered[0] > -torch.inf).tolist() == [True] * 4 + [False] * 4


def test_top_p_counts_the_mass_that_the_filters_before_it_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()

    def num_kept(**filters: float) -> int:
        return int((filter_logits_reference(logits, make_rows(1, top_p=0.75, **filters)) > -torch.inf).sum())

    assert num_kept() == 3  # 0.4 + 0.3 < 0.75
    assert num_kept(top_k=3) == 2  # 0.7 of the 0.9 left is 0.78
    assert num_kept(min_p=0.4) == 2


@pytest.mark.parametrize(
    "extreme",
    [{"top_k": 1}, {"top_p": 1e-30}, {"min_p": 1.0}, {"top_k": 1, "top_p": 1e-30, "min_p": 1.0}],
    ids=["top_k 1", "top_p tiny", "min_p 1", "all"],
)
def test_extreme_filters_keep_the_most_likely_token(extreme: dict[str, float]) -> None:
    logits = 10 * torch.randn(50, 251, generator=torch.Generator().manual_seed(4))
    rows = make_rows(50, **extreme, position=torch.arange(50))
    assert ((filter_logits_reference(logits, rows) > -torch.inf).sum(dim=1) == 1).all()
    assert torch.equal(sample(logits, rows), logits.argmax(dim=1))


def test_filters_that_are_off_or_wider_than_the_vocabulary_keep_every_token() -> None:
    logits = 30 * torch.randn(9, 251, generator=torch.Generator().manual_seed(5))  # many weights underflow
    for top_k in (0, 251, 4000):
        assert torch.equal(filter_logits_reference(logits, make_rows(9, top_k=top_k)), logits)


def test_temperatures_below_the_minimum_are_raised_to_it() -> None:
    logits = torch.tensor([[0.01, 0.0, -0.01]])
    assert torch.equal(
        filter_logits_reference(logits, make_rows(1, temperature=0.001)),
        filter_logits_reference(logits, make_rows(1, temperature=0.01)),
    )
    torch.testing.assert_close(filter_logits_reference(logits, make_rows(1, temperature=0.001)), logits * 100)


# --- draws ------------------------------------------------------------------------------


def test_temperature_zero_is_argmax_with_ties_to_the_lowest_id() -> None:
    logits = torch.randint(0, 3, (64, 4093), generator=torch.Generator().manual_seed(6)).float()
    rows = make_rows(64, temperature=0.0, top_k=3, top_p=0.5, min_p=0.5, position=torch.arange(64))
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert sample(logits, rows).tolist() == expected


def test_a_draw_is_the_argmax_of_filtered_logits_plus_noise() -> None:
    logits = torch.randn(20, 100, generator=torch.Generator().manual_seed(7))
    rows = make_rows(20, top_k=10, seed=3, position=torch.arange(20))
    total = filter_logits_reference(logits, rows) + gumbel_noise(rows.seed, rows.position, 100)
    assert sample(logits, rows).tolist() == [row.index(max(row)) for row in total.tolist()]


@pytest.mark.parametrize("varied", ["position", "seed"])
@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_filtered_softmax(name: str, varied: str) -> None:
    num_draws, vocab_size = 100_000, 16
    logits = 1.2 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(8))
    numbers = torch.arange(num_draws)
    where = {"seed": 42, "position": 17} | {varied: numbers if varied == "position" else numbers * 0x9E3779B9}
    rows = make_rows(num_draws, **FILTERS[name], **where)
    counts = torch.bincount(sample(logits.expand(num_draws, -1), rows), minlength=vocab_size)
    assert chi_square_p_value(counts, filtered_softmax(logits, **FILTERS[name])) > 1e-4


def test_consecutive_positions_draw_independently() -> None:
    num_draws = 100_000
    tokens = sample(torch.zeros(num_draws, 4), make_rows(num_draws, seed=6, position=torch.arange(num_draws)))
    pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    assert chi_square_p_value(pairs, torch.full((16,), 1 / 16, dtype=torch.float64)) > 1e-4


def test_two_distributions_with_shared_noise_agree_as_often_as_promised() -> None:
    num_draws = 50_000
    target, draft = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.35, 0.4, 0.05, 0.2])
    rows = make_rows(num_draws, position=torch.arange(num_draws))
    drawn, proposed = (sample(prob.log().expand(num_draws, -1), rows) for prob in (target, draft))
    agree = drawn == proposed
    distance = 0.5 * (target - draft).abs().sum().item()
    assert agree.float().mean() >= (1 - distance) / (1 + distance)


# --- row-invariance ---------------------------------------------------------------------


@pytest.fixture
def num_threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("vocab_size", "num_threads"), [(251, 1), (1000, 1), (4093, 1), (4001, 2)], indirect=["num_threads"]
)
@pytest.mark.usefixtures("num_threads")
def test_a_row_draws_the_same_bits_in_every_batch(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 4 * torch.randn(40, vocab_size, generator=generator)
    rows = mixed_rows(40, generator)
    alone = [rows.select(torch.tensor([i])) for i in range(40)]
    tokens = torch.cat([sample(logits[i : i + 1].clone(), alone[i]) for i in range(40)])
    noise = torch.cat([gumbel_noise(alone[i].seed, alone[i].position, vocab_size) for i in range(40)])
    filtered = torch.cat([filter_logits_reference(logits[i : i + 1].clone(), alone[i]) for i in range(40)])
    assert len(tokens.unique()) > 20
    for num_rows in [*range(1, 18), 40]:
        index = torch.randperm(40, generator=generator)[:num_rows]
        batch = rows.select(index)
        assert torch.equal(sample(logits[index], batch), tokens[index])
        assert torch.equal(gumbel_noise(batch.seed, batch.position, vocab_size), noise[index])
        assert torch.equal(filter_logits_reference(logits[index], batch), filtered[index])


def test_logits_inside_a_padded_vocabulary_draw_the_same_tokens() -> None:
    generator = torch.Generator().manual_seed(9)
    padded = 4 * torch.randn(40, 1024, generator=generator)
    rows = mixed_rows(40, generator)
    assert torch.equal(sample(padded[:, :1001], rows), sample(padded[:, :1001].contiguous(), rows))


@pytest.mark.parametrize("name", ["none", "all", "mixed"])
def test_sampling_leaves_its_inputs_as_they_were(name: str) -> None:
    generator = torch.Generator().manual_seed(10)
    logits = torch.randn(12, 100, generator=generator)
    rows = mixed_rows(12, generator) if name == "mixed" else make_rows(12, **FILTERS[name])
    logits_before = logits.clone()
    rows_before = rows.select(torch.arange(12))
    sample(logits, rows)
    assert torch.equal(logits, logits_before)
    for field in dataclasses.fields(rows):
        assert torch.equal(getattr(rows, field.name), getattr(rows_before, field.name)), field.name


def test_no_rows_draw_no_tokens() -> None:
    tokens = sample(torch.empty(0, 100), make_rows(0))
    assert tokens.shape == (0,) and tokens.dtype == torch.int64


def test_sample_on_the_cpu_is_the_reference_and_elsewhere_says_what_is_missing() -> None:
    generator = torch.Generator().manual_seed(11)
    logits, rows = torch.randn(12, 100, generator=generator), mixed_rows(12, generator)
    assert torch.equal(sample(logits, rows), sample_reference(logits, rows))
    with pytest.raises(NotImplementedError, match="only its CPU path"):
        sample(logits.to("meta"), rows)

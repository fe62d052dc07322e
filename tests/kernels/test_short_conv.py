"""The causal 4-tap convolution over a pass and its cached history."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kernels.rows import padded_rows
from kernels.short_conv import ConvRows, short_conv_reference
from tests.kernels.rounding import UNIT, assert_within, padded, random

LENGTH = 40
CHANNELS = (1, 7, 32, 33)


def exact_conv(u: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """The formula over a whole sequence, and the sum of magnitudes: both fp64 [T, C]."""
    u, taps = u.double(), taps.double()
    y, size = u.clone(), u.abs()
    for j in range(4):
        delay = 3 - j
        y[delay:] += taps[j] * u[: len(u) - delay]
        size[delay:] += (taps[j] * u[: len(u) - delay]).abs()
    return y, size


def addresses(segments: list[tuple[int, int, int]]) -> ConvRows:
    """Segments (sequence, first position, rows). Position p of sequence s has slot 1 + s * LENGTH + p."""
    num_rows = sum(rows for _, _, rows in segments)
    size = padded_rows(num_rows)
    history, slots, taps = [], [], [list(range(size)) for _ in range(4)]
    row = 0
    for index, (sequence, first, rows) in enumerate(segments):
        base = 1 + sequence * LENGTH
        history += [base + p if p >= 0 else 0 for p in range(first - 3, first)]
        for i in range(rows):
            for back in (1, 2, 3):
                in_history = size + 3 * index + 3 + i - back
                taps[3 - back][row] = row - back if i >= back else in_history
            slots.append(base + first + i)
            row += 1
    return ConvRows(
        torch.tensor(history),
        torch.tensor(taps).flatten(),
        torch.arange(num_rows),
        torch.tensor(slots),
    )


def run(u: Tensor, taps: Tensor, cache: Tensor, segments: list[tuple[int, int, int]]) -> Tensor:
    """The rows of ``segments``; ``u`` [sequences, LENGTH, C]."""
    rows = torch.cat([u[s, first : first + n] for s, first, n in segments])
    return short_conv_reference(padded(rows), taps, cache, addresses(segments))[: len(rows)]


def inputs(channels: int) -> tuple[Tensor, Tensor, Tensor]:
    u = random(2, LENGTH, channels, seed=channels)
    return u, random(4, channels, seed=channels + 1, scale=0.5), torch.zeros(1 + 2 * LENGTH, channels)


@pytest.mark.parametrize("channels", CHANNELS)
def test_convolution_is_within_the_bound(channels: int) -> None:
    u, taps, cache = inputs(channels)
    exact, size = exact_conv(u[0], taps)
    assert_within(run(u, taps, cache, [(0, 0, LENGTH)]), exact, 6 * UNIT * size)  # 4 products, 4 sums


@pytest.mark.parametrize("channels", CHANNELS)
def test_chunk_borders_change_no_bit(channels: int) -> None:
    u, taps, cache = inputs(channels)
    whole = run(u, taps, cache, [(0, 0, LENGTH)])
    for sizes in ([1], [2], [3], [4], [5], [1, 2, 3, 7, 1, 1, 26]):
        cache = torch.zeros_like(cache)
        first, parts = 0, []
        for size in itertools.cycle(sizes):
            size = min(size, LENGTH - first)
            parts.append(run(u, taps, cache, [(0, first, size)]))
            first += size
            if first == LENGTH:
                break
        assert torch.equal(torch.cat(parts), whole), sizes
        assert torch.equal(cache[1 : 1 + LENGTH], u[0]) and not cache[0].any()


@pytest.mark.parametrize("channels", CHANNELS)
def test_segments_of_other_sequences_change_no_bit(channels: int) -> None:
    u, taps, cache = inputs(channels)
    whole = [run(u, taps, cache, [(s, 0, LENGTH)]) for s in (0, 1)]
    for first in range(1, 30):  # the cache holds the inputs of both sequences by now
        for rows in (1, 4, 9):
            both = run(u, taps, cache, [(1, first, rows), (0, first + 1, 1)])
            assert torch.equal(both[:rows], whole[1][first : first + rows])
            assert torch.equal(both[rows:], whole[0][first + 1 : first + 2])


def test_a_position_written_again_replaces_the_rejected_input() -> None:
    u, taps, cache = inputs(5)
    whole = run(u, taps, cache, [(0, 0, LENGTH)])
    cache.zero_()
    run(u, taps, cache, [(0, 0, 10)])
    wrong = u.clone()
    wrong[0, 11:14] += 1
    run(wrong, taps, cache, [(0, 10, 4)])  # row 10 stands, 11 to 13 fall
    assert torch.equal(run(u, taps, cache, [(0, 11, 6)]), whole[11:17])


def test_only_the_rows_named_are_written() -> None:
    u, taps, _ = inputs(5)
    cache = torch.full((1 + 2 * LENGTH, 5), 9.0)
    cache[0] = 0
    rows = addresses([(0, 0, 10)])
    rows.write_rows, rows.write_slots = rows.write_rows[6:], rows.write_slots[6:]
    short_conv_reference(padded(u[0, :10]), taps, cache, rows)
    assert torch.equal(cache[7:11], u[0, 6:10])
    assert (cache[1:7] == 9).all() and (cache[11:] == 9).all() and not cache[0].any()

"""Convolution, residual and norm over pages: the reference's bits, at every chunk border, in every batch."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from kernels.cuda.short_conv import ConvConfig, conv_config, short_conv_add_norm
from tests.cuda.step_rows import Segment, chunked, make_step

EPS, KEEP_AFTER, PAGE, LENGTH, SLOTS = 1e-6, 2, 8, 64, 4
SENTINEL = 77.0
GARBAGE = 2.0**127  # of padding rows: whatever is computed from it overflows


def sizes(device: str) -> tuple[tuple[int, int], ...]:
    """(width, positions)"""
    return ((4096, LENGTH), (6144, LENGTH), (1024, LENGTH)) if device == "cuda" else ((48, 21),)


@cache
def sequences(width: int, device: str) -> tuple[Tensor, ...]:
    """u, x [slots, LENGTH, H], taps, norm weight."""
    generator = torch.Generator().manual_seed(width)
    u, x = torch.randn(2, SLOTS, LENGTH, width, generator=generator).bfloat16().to(device)
    taps, weight = (
        torch.randn(shape, generator=generator).bfloat16().to(device) for shape in ((4, width), (width,))
    )
    return u, x, taps, weight


def empty_cache(width: int, device: str) -> Tensor:
    step = make_step([(0, 0, 1)], PAGE, device, SLOTS, LENGTH)
    cache = torch.full((step.num_pages * PAGE, width), SENTINEL, dtype=torch.bfloat16, device=device)
    cache[:PAGE] = 0
    return cache


def step_of(
    segments: list[Segment],
    cache: Tensor,
    width: int,
    device: str,
    *,
    norm: bool = True,
    padded: int = 0,
    config: ConvConfig | None = None,
) -> dict[Segment, tuple[Tensor, Tensor]]:
    """x and its norm by segment; writes ``cache``."""
    u, x, taps, weight = sequences(width, device)
    step = make_step(segments, PAGE, device, SLOTS, LENGTH, padded)
    padding = torch.full((padded, width), GARBAGE, dtype=torch.bfloat16, device=device)
    u, x = (
        torch.cat([*(s[slot, first : first + n] for slot, first, n in segments), padding]) for s in (u, x)
    )
    out = torch.full_like(x, float("nan"))
    arguments = (weight, EPS, out) if norm else ()
    short_conv_add_norm(u, x, taps, cache, step.rows, step.pages, PAGE, KEEP_AFTER, *arguments, config=config)
    if padded:
        assert (x[-padded:] == GARBAGE).all() and out[-padded:].isnan().all(), "a padding row wrote"
    counts = [n for *_, n in segments] + [padded]
    return dict(zip(segments, zip(x.split(counts), out.split(counts), strict=True), strict=False))


def expected(slot: int, width: int, device: str) -> tuple[Tensor, Tensor]:
    """The formula over a whole sequence with torch, each rounding where the kernel has it."""
    u, x, taps, weight = (t.float() for t in sequences(width, device))
    u, x = u[slot], x[slot]
    old = torch.cat((torch.zeros(3, width, device=device), u))
    total = old[:-3] * taps[0]
    for j in (1, 2):
        total = total + old[j : len(u) + j] * taps[j]
    y = (total + u * taps[3] + u).bfloat16().float()
    x = (x + y).bfloat16()
    exact = x.double() / torch.sqrt(x.double().square().mean(-1, keepdim=True) + EPS) * weight.double()
    return x, exact


def check_chunks_agree(device: str) -> None:
    for width, length in sizes(device):
        cache = empty_cache(width, device)
        ((x, out),) = step_of([(1, 0, length)], cache, width, device).values()
        true_x, exact = expected(1, width, device)
        assert torch.equal(x, true_x[:length])
        assert (
            (out.double() - exact[:length]).abs() <= exact[:length].abs() * (2**-8 + 2**-19) + 1e-30
        ).all()
        all_borders = range(1, length) if device == "cuda" else (1, 2, 4, 8, 19)
        for borders in [*([b] for b in all_borders), list(range(1, length)), [1, 2, 5, 9]]:
            chunks_cache = empty_cache(width, device)
            parts = []
            for first, n in chunked(length, [b for b in borders if b < length]):
                parts += step_of([(1, first, n)], chunks_cache, width, device, padded=n % 2).values()
            assert torch.equal(torch.cat([p[0] for p in parts]), x), borders
            assert torch.equal(torch.cat([p[1] for p in parts]), out), borders


def several_rows(width: int) -> list[ConvConfig]:
    """Launches of several rows a program, and several on their way."""
    warps = conv_config(width, 1).num_warps
    return [ConvConfig(warps, rows, stages=stages) for rows, stages in ((2, 1), (4, 2), (8, 4))]


def check_runs_agree(device: str) -> None:
    """Long segments: most older inputs are those that a program holds."""
    segments = [(1, 0, 21), (2, 3, 18), (0, 0, 2), (3, 0, 13)]
    for width, _ in sizes(device):
        before = empty_cache(width, device)
        step_of([(2, 0, 3)], before, width, device)
        whole = before.clone()
        wanted = step_of(segments, whole, width, device, padded=1)
        for config in several_rows(width):
            cache = before.clone()
            found = step_of(segments, cache, width, device, padded=1, config=config)
            assert torch.equal(cache, whole), config
            for segment, (x, out) in found.items():
                assert torch.equal(x, wanted[segment][0]) and torch.equal(out, wanted[segment][1]), config


def check_batches_agree(device: str) -> None:
    """A ragged batch, shuffled, padded and with other numbers of rows a program, against each segment alone."""
    segments = [(0, 0, 1), (1, 5, 9), (2, 1, 2), (3, 11, 6)]
    for width, _ in sizes(device):
        before = empty_cache(width, device)
        for slot, first, _ in segments[1:]:
            step_of([(slot, 0, first)], before, width, device)
        alone, single = {}, before.clone()
        for segment in segments:
            alone |= step_of([segment], single, width, device)
        for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
            for config in (None, *several_rows(width)):
                cache = before.clone()
                found = step_of([segments[i] for i in order], cache, width, device, padded=3, config=config)
                assert torch.equal(cache, single)
                for segment, (x, out) in found.items():
                    assert torch.equal(x, alone[segment][0]) and torch.equal(out, alone[segment][1])


def test_chunk_borders_change_no_bit(device):
    check_chunks_agree(device)


def test_the_rows_of_a_program_change_no_bit(device):
    check_runs_agree(device)


def test_the_batch_changes_no_bit(device):
    check_batches_agree(device)


def test_only_inputs_that_a_later_pass_reads_are_written(device):
    width = 48
    cache = empty_cache(width, device)
    step_of([(2, 3, 12)], cache, width, device)
    step = make_step([(2, 3, 12)], PAGE, device, SLOTS, LENGTH)
    kept = range(3 + 12 - 3 - KEEP_AFTER, 3 + 12)
    slots = [int(step.pages[2, p // PAGE]) * PAGE + p % PAGE for p in kept]
    u = sequences(width, device)[0]
    assert torch.equal(cache[slots], u[2, kept.start : kept.stop])
    others = torch.ones(len(cache), dtype=torch.bool)
    others[slots] = False
    others[:PAGE] = False
    assert (cache[others.to(device)] == SENTINEL).all()


def test_without_a_norm_the_stream_is_the_same(device):
    width = 48
    with_norm = step_of([(0, 0, 5)], empty_cache(width, device), width, device)
    without = step_of([(0, 0, 5)], empty_cache(width, device), width, device, norm=False)
    assert torch.equal(with_norm[0, 0, 5][0], without[0, 0, 5][0]) and without[0, 0, 5][1].isnan().all()


@pytest.mark.gpu
def test_graph_replay_gives_the_same_bits(device):
    width = 4096
    u, x, taps, weight = sequences(width, device)
    step = make_step([(0, 0, 40), (1, 0, 24)], PAGE, device, SLOTS, LENGTH)
    u, start = u[:2, :32].flatten(0, 1).contiguous(), x[:2, :32].flatten(0, 1).contiguous()
    x, out, cache = start.clone(), torch.empty_like(start), empty_cache(width, device)

    def run() -> None:
        short_conv_add_norm(u, x, taps, cache, step.rows, step.pages, PAGE, KEEP_AFTER, weight, EPS, out)

    run()
    expected_out = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        x.copy_(start)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected_out)


@pytest.mark.gpu
def test_a_cache_beyond_two_to_the_31_elements_is_addressed(device):
    width, page = 4096, 70_000
    u, x, taps, _ = sequences(width, device)
    step = make_step([(0, 3, 1)], PAGE, device, SLOTS, LENGTH)
    step.pages[0, 0] = page
    cache = torch.zeros((page + 1) * PAGE, width, dtype=torch.bfloat16, device=device)
    cache[page * PAGE : page * PAGE + 3] = u[0, :3]
    row = x[0, 3:4].clone()
    short_conv_add_norm(u[0, 3:4].clone(), row, taps, cache, step.rows, step.pages, PAGE, KEEP_AFTER)
    assert torch.equal(row, expected(0, width, device)[0][3:4])
    assert torch.equal(cache[page * PAGE + 3], u[0, 3])

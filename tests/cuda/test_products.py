"""Row-exact products. The bodies are plain functions of a device; a GPU proves bits, the interpreter indices.

In the interpreter the operands are small integers, whose sums are exact in fp32 in any order.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cuda.configs import (
    CONFIGS,
    SEGMENTS,
    ProductConfig,
    default_config,
    num_segments,
    product_config,
    segment_unit,
)
from kernels.cuda.products import _counters, linear
from tests.cuda.early_chains import assert_overlap_changes_no_bit

SMALL = [(48, 16), (64, 48), (258, 512), (192, 1024), (96, 768)]  # (N, K): the demo's and the tests' widths
SERVED = sorted(SEGMENTS)
# On a GPU, where each launch is compiled: one served shape for every path through the table and the kernels.
PATHS = [
    (6656, 4096),  # one segment
    (3328, 2048),  # one segment, row tiles of 32, some launched early
    (4096, 4096),  # two, spread
    (4096, 16384),  # four, tall tiles of 8 warps; spread up to 128 rows
    (258, 4096),  # a ragged last weight tile
    (2048, 3072),  # defaults at every row count
]


def integers(rows: int, n: int, k: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-4, 5, (rows, k), generator=generator).bfloat16().to(device)
    return x, torch.randint(-4, 5, (n, k), generator=generator).bfloat16().to(device)


def reals(rows: int, n: int, k: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, k, generator=generator, device=device).bfloat16()
    return x, (torch.randn(n, k, generator=generator, device=device) / k**0.5).bfloat16()


def poisoned(rows: int, n: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((rows, n), float("nan"), dtype=dtype, device=device)


def launches(n: int, k: int) -> list[ProductConfig]:
    """Different launches of one shape: their bits have to agree."""
    block_k = min(segment_unit(k), 64)
    found = [default_config(n, k, rows, num_segments(n, k)) for rows in (1, 17, 64, 65, 300, 5000)]
    found += [ProductConfig(128, 128, block_k, 8, 3, True), ProductConfig(64, 64, block_k, 8, 3, True)]
    found += [ProductConfig(64, block_n, min(block_k, 32), 4, 3, False) for block_n in (16, 64)]
    found += [ProductConfig(64, 256, min(block_k, 32), 8, 3, False)]
    found += [ProductConfig(128, 256, block_k, 16, 3, False, is_bulk=True)]
    found += [replace(found[i], is_bulk=True) for i in (1, 4, 6, 8)]
    found += [
        ProductConfig(128, 32, block_k, 8, 2, True),
        ProductConfig(128, 64, block_k, 4, 2, False, group=3),
    ]
    return list(dict.fromkeys(found))


def check_against_float64(n: int, k: int, rows: int, device: str) -> None:
    """fp32 output within 1e-5 of the sum of magnitudes, bf16 output within half a unit in the last place more."""
    x, w = reals(rows, n, k, device)
    wanted, magnitude = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
    for dtype, relative in ((torch.float32, 0.0), (torch.bfloat16, 2.0**-8)):
        out = linear(x, w, poisoned(rows, n, device, dtype)).double()
        assert ((out - wanted).abs() <= relative * wanted.abs() + 1e-5 * magnitude).all(), (n, k, rows, dtype)


def check_rows_exact(n: int, k: int, counts: list[int], device: str) -> int:
    """Every row count, ragged, padded with NaN rows, shuffled: the bits of each row alone. Returns rows compared."""
    x, w = reals(max(counts), n, k, device)
    alone = torch.cat([linear(x[i : i + 1], w, poisoned(1, n, device)) for i in range(min(len(x), 64))])
    everything = linear(x, w, poisoned(len(x), n, device))
    assert torch.equal(everything[: len(alone)], alone), (n, k, "one row alone")
    compared = len(alone)
    for count in counts:
        start = (count * 37) % (len(x) - count + 1)
        out = linear(x[start : start + count].clone(), w, poisoned(count, n, device))
        assert torch.equal(out, everything[start : start + count]), (n, k, count)
        compared += count
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.equal(linear(x[order], w), everything[order].bfloat16()), (n, k, "shuffled, bf16")
    for count in (3, 17, 64, 130):
        padded = x[: 2 * count].clone()
        padded[1::2] = float("nan")
        out = linear(padded, w, poisoned(len(padded), n, device))
        assert torch.equal(out[::2], everything[: len(padded) : 2]), (n, k, count, "among NaN rows")
        compared += count
    return compared + len(x)


def check_graph_replay(n: int, k: int, device: str, rows: tuple[int, ...] = (1, 48, 130, 600)) -> None:
    """Replays over new values in the same buffers equal eager launches."""
    for count in rows:
        x, w = reals(count, n, k, device)
        out = linear(x, w, poisoned(count, n, device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            linear(x, w, out)
        for seed in (1, 2, 3):
            x.copy_(reals(count, n, k, device, seed)[0])
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, linear(x, w, poisoned(count, n, device))), (n, k, count, seed)
    assert not _counters(x.device).any(), "counters return to zero"


def check_early_launches(n: int, k: int, device: str, length: int = 8) -> None:
    """A chain of products, each reading what the last one wrote, gives the same bits when launches overlap."""
    for rows in (1, 64, 300):
        x, w = reals(rows, n, k, device)
        back = reals(k, 1, n, device, 2)[0]  # [K, N]: to the width of the input
        steps = [(w, n, k), (back, k, n)] * length

        def chain(is_early: bool, x=x, steps=steps, rows=rows) -> list[Tensor]:
            found = [x]
            for weight, width, depth in steps:
                config = replace(product_config(width, depth, rows), is_early=is_early, ahead=256 * is_early)
                found.append(linear(found[-1], weight, config=config))
            return found

        assert_overlap_changes_no_bit(chain, (n, k, rows))


@pytest.mark.parametrize(("n", "k"), SMALL)
@pytest.mark.parametrize("rows", [1, 5, 16, 33])
def test_results_are_within_their_bound_of_float64(n, k, rows, device):
    check_against_float64(n, k, rows, device)


@pytest.mark.parametrize(("n", "k"), SMALL)
def test_every_launch_writes_every_element_and_nothing_else(n, k, device):
    rows = 37
    x, w = integers(rows, n, k, device)
    wanted = (x.double() @ w.double().T).float()
    for config in launches(n, k):
        room = poisoned(rows + 2, n, device)
        linear(x, w, room[1:-1], config=config)
        assert torch.equal(room[1:-1], wanted), config
        assert room[0].isnan().all() and room[-1].isnan().all(), config
    assert not _counters(x.device).any(), "counters return to zero"


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 63, 64, 65, 130])
def test_a_row_does_not_depend_on_the_row_count(rows, device):
    x, w = integers(130, 258, 512, device)
    wanted = (x.double() @ w.double().T).float()
    assert torch.equal(linear(x[:rows], w, poisoned(rows, 258, device)), wanted[:rows])


def test_rows_beside_nan_rows_stay_clean(device):
    x, w = integers(9, 192, 1024, device)
    wanted = linear(x, w)
    x[1::2] = float("nan")
    assert torch.equal(linear(x, w)[::2], wanted[::2])


def test_no_rows_is_no_launch(device):
    x, w = integers(4, 64, 48, device)
    assert linear(x[:0], w).shape == (0, 64)


def test_another_segment_count_is_another_order_of_the_same_sum(device):
    x, w = integers(5, 192, 1024, device)
    assert torch.equal(linear(x, w, segments=2), linear(x, w, segments=8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w: (x[:, :32], w), "K has to be equal"),
        (lambda x, w: (x[:, :40].contiguous(), w[:, :40].contiguous()), "a multiple of 16"),
        (lambda x, w: (x[:, 1:17], w[:, 1:17]), "contiguous"),
        (lambda x, w: (x, w, torch.empty(3, 64)), "out"),
    ],
)
def test_what_it_does_not_take_is_refused(change, message, device):
    x, w = integers(4, 64, 48, device)
    with pytest.raises(ValueError, match=message):
        linear(*change(x, w))


@pytest.mark.parametrize(
    ("n", "k"), [*SERVED, *SMALL, (12288, 6144), (6144, 24576), (1536, 1024), (512, 256)]
)
def test_segments_and_blocks_of_every_configuration_cut_k_evenly(n, k):
    segments = num_segments(n, k)
    assert 1 <= segments <= k // segment_unit(k)
    configs = [product_config(n, k, rows) for rows in (1, 16, 17, 64, 65, 128, 129, 512, 513, 4096)]
    for config in [*configs, *(config for _, config in CONFIGS.get((n, k), ()))]:
        assert segment_unit(k) % config.block_k == 0 and config.block_k >= 16
        assert config.block_m % 64 == 0 and config.num_warps in (4, 8, 16)
        assert config.num_stages * (config.block_m + config.block_n) * config.block_k * 2 <= 227 << 10


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), PATHS)
def test_served_shapes_are_bit_equal_at_every_row_count(n, k, device):
    check_rows_exact(n, k, [*range(1, 257), 512, 2048], device)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(258, 4096), (6144, 2048)])
def test_served_shapes_are_bit_equal_in_every_launch(n, k, device):
    x, w = reals(200, n, k, device)
    wanted = linear(x, w, poisoned(200, n, device))
    for config in launches(n, k):
        assert torch.equal(linear(x, w, poisoned(200, n, device), config=config), wanted), config


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (258, 4096)])
def test_served_shapes_are_within_their_bound_and_replay(n, k, device):
    for rows in (1, 64, 300):
        check_against_float64(n, k, rows, device)
    check_graph_replay(n, k, device)


@pytest.mark.gpu
def test_early_launches_wait_for_what_the_last_one_wrote(device):
    check_early_launches(3328, 2048, device)


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31(device):
    n, k, rows = 540_672, 4096, 4096  # 2.2e9 elements of weight and of output
    x, w = reals(rows, n, k, device)
    out = linear(x, w)
    assert torch.equal(out[-300:, -256:], linear(x[-300:], w[-256:].clone(), segments=num_segments(n, k)))
    assert torch.equal(linear(x[:3], w)[:, -256:], out[:3, -256:])

"""Gate selection and grouping against what a loop over rows and pairs gives. Every check also runs without pytest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cuda.router import allocate_groups, choose_experts, group_pairs, tile_rows
from tests.kernels.rounding import UNIT, assert_within

SHARED = 2
# Of numpy, about how the interpreter reads a scalar.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def random_logits(num_rows: int, num_experts: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits fp32 [T, E+S] and biases fp32 [E] of a spread that real gates have."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(num_rows, num_experts + SHARED, generator=generator)
    return logits.to(device), (0.3 * torch.randn(num_experts, generator=generator)).to(device)


def choose(
    logits: Tensor, bias: Tensor, top_k: int, scale: float = 2.5, padding: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Poisoned outputs, filled by the kernel."""
    rows, num_shared = logits.shape[0], logits.shape[1] - bias.shape[0]
    row_slot = torch.arange(rows, dtype=torch.int32, device=logits.device)
    row_slot[list(padding)] = -1
    chosen = torch.full((rows, top_k), -7, dtype=torch.int32, device=logits.device)
    gamma = torch.full((rows, top_k + num_shared), float("nan"), device=logits.device)
    choose_experts(logits, bias, row_slot, scale, chosen, gamma)
    return chosen, gamma


def check_choice(num_rows: int, num_experts: int, top_k: int, device: str) -> None:
    logits, bias = random_logits(num_rows, num_experts, device)
    chosen, gamma = (x.cpu() for x in choose(logits, bias, top_k))
    exact = logits.double().cpu()
    score = torch.sigmoid(exact[:, :num_experts]) + bias.double().cpu()
    expected = torch.argsort(score, dim=-1, descending=True)[:, :top_k]
    # the exponential errs by a few units, sigmoid + bias by one more rounding: closer scores may change places
    gap = score.gather(1, expected) - score.gather(1, chosen.long())
    assert_within(gap, torch.zeros_like(gap), 32 * UNIT)
    assert all(len(set(row)) == top_k for row in chosen.tolist())
    active = torch.sigmoid(torch.cat((exact.gather(1, chosen.long()), exact[:, num_experts:]), 1))
    weights = 2.5 * active / active.sum(-1, keepdim=True)
    assert_within(gamma, weights, 64 * UNIT * weights)


def check_choice_is_row_exact(num_rows: int, num_experts: int, top_k: int, device: str) -> None:
    logits, bias = random_logits(num_rows, num_experts, device, seed=1)
    whole = choose(logits, bias, top_k)
    for count in (1, 2, 3, num_rows // 2 + 1):
        places = torch.randperm(num_rows, generator=torch.Generator().manual_seed(count))[:count].to(device)
        for part, alone in zip(whole, choose(logits[places].contiguous(), bias, top_k), strict=True):
            assert torch.equal(part[places], alone), count


@pytest.mark.parametrize("num_experts, top_k", [(8, 2), (37, 6)])
def test_choice_is_the_largest_biased_scores_with_unbiased_weights(num_experts, top_k, device):
    check_choice(9, num_experts, top_k, device)


def test_rows_of_a_choice_do_not_depend_on_the_others(device):
    check_choice_is_row_exact(7, 37, 6, device)


@pytest.mark.gpu
def test_choice_at_serving_shapes(device):
    for num_experts in (128, 256):
        check_choice(300, num_experts, 6, device)
        check_choice_is_row_exact(256, num_experts, 6, device)


def test_equal_scores_choose_the_lowest_experts_in_order(device):
    logits, bias = torch.zeros(2, 70 + 1, device=device), torch.zeros(70, device=device)
    assert choose(logits, bias, 3)[0].tolist() == [[0, 1, 2]] * 2
    bias[[69, 4, 33]] = 1.0
    bias[50] = 2.0
    assert choose(logits, bias, 3)[0].tolist() == [[50, 4, 33]] * 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
def test_extreme_and_invalid_logits_choose_experts_that_exist(device):
    logits = torch.tensor(
        [[200.0, -200.0, -90.0, 0.0, 88.0], [-300.0] * 5, [float("nan")] * 5], device=device
    )
    chosen, gamma = choose(logits, torch.zeros(4, device=device), 2, scale=1.0)
    assert chosen[0].tolist() == [0, 3] and torch.isfinite(gamma[:2]).all()
    assert torch.allclose(gamma[1], torch.full_like(gamma[1], 1 / 3))
    assert (chosen >= 0).all() and (chosen < 4).all()


def test_padding_rows_choose_no_expert_and_get_no_weights(device):
    logits, bias = random_logits(5, 8, device)
    logits[3] = float("nan")
    chosen, gamma = choose(logits, bias, 2, padding=(0, 3))
    assert (chosen[[0, 3]] == -1).all() and gamma[[0, 3]].isnan().all()
    whole = choose(logits[[1, 2, 4]].contiguous(), bias, 2)
    assert torch.equal(chosen[[1, 2, 4]], whole[0]) and torch.equal(gamma[[1, 2, 4]], whole[1])


def check_groups(chosen: Tensor, num_experts: int, rows: int) -> None:
    """The tiles hold every pair of a real row once, by ascending expert and pair; the rest is marked unused."""
    groups = allocate_groups(*chosen.shape, num_experts, chosen.device, rows)
    groups.order.fill_(-7)
    groups.tiles.fill_(-7)
    group_pairs(chosen, num_experts, groups)
    flat = chosen.flatten().tolist()
    members = {e: [p for p, expert in enumerate(flat) if expert == e] for e in sorted(set(flat) - {-1})}
    order = [pair for pairs in members.values() for pair in pairs]
    tiles, first = [], 0
    for expert, pairs in members.items():
        for begin in range(0, len(pairs), rows):
            tiles.append([expert, first + begin, min(rows, len(pairs) - begin)])
        first += len(pairs)
    assert groups.order.tolist()[: len(order)] == order
    assert groups.tiles.tolist()[: len(tiles)] == tiles
    assert (groups.tiles[len(tiles) :, 0] == -1).all()


def routings(num_rows: int, top_k: int, num_experts: int) -> dict[str, Tensor]:
    """Expert ids int32 [T, k]: even, all the same, all different as far as they go, with padding, all padding."""
    generator = torch.Generator().manual_seed(num_rows)
    scores = torch.rand(num_rows, num_experts, generator=generator)
    even = scores.argsort(1)[:, :top_k].int()
    padded = even.clone()
    padded[torch.rand(num_rows, generator=generator) < 0.4] = -1
    return {
        "even": even,
        "one": torch.arange(num_experts - top_k, num_experts, dtype=torch.int32).repeat(num_rows, 1),
        "distinct": (torch.arange(num_rows * top_k) % num_experts).int().view(num_rows, top_k),
        "padded": padded,
        "nothing": torch.full((num_rows, top_k), -1, dtype=torch.int32),
    }


@pytest.mark.parametrize("num_rows", [1, 9, 300])
@pytest.mark.parametrize("rows", [1, 16])
def test_groups_hold_every_pair_once_in_order(num_rows, rows, device):
    for chosen in routings(num_rows, 2, 5).values():
        check_groups(chosen.to(device), 5, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 3, 20, 64, 86, 256, 8192])
def test_groups_at_serving_shapes(num_rows, device):
    for num_experts in (32, 128, 256):
        for chosen in routings(num_rows, 6, num_experts).values():
            check_groups(chosen.to(device), num_experts, tile_rows(chosen.numel(), num_experts))


def test_room_for_tiles_is_enough_for_every_routing():
    for pairs_per_expert in ([1] * 6, [17, 1, 1], [16, 16, 16], [33, 31], [48], [1, 47]):
        num_pairs, used = sum(pairs_per_expert), sum(-(-n // 16) for n in pairs_per_expert)
        assert allocate_groups(num_pairs, 1, len(pairs_per_expert), "cpu", 16).num_tiles >= used

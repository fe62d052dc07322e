"""Grouped expert products: right, row-exact under every routing, and nothing but held rows written.

Every check also runs without pytest. On a GPU the same bodies run at serving shapes.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from kernels.cuda.experts import SharedExperts, combine_slots, down, gate_up
from kernels.cuda.products import linear
from kernels.cuda.router import allocate_groups, choose_experts, group_pairs
from kernels.cuda.swiglu import swiglu
from kernels.cuda.weight_tiles import TileConfig
from tests.cuda.test_router import random_logits, routings
from tests.kernels.rounding import UNIT, assert_within

BF16_UNIT = 2.0**-8  # of one rounding to bf16, relative
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def random(*shape: int, device: str, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) * scale).bfloat16()


def weights(num_experts: int, hidden: int, width: int, device: str) -> tuple[Tensor, Tensor]:
    """w13 [E, 2f, H] and w2 [E, H, f] whose products stay near 1."""
    w13 = random(num_experts, 2 * width, hidden, device=device, seed=1, scale=hidden**-0.5)
    return w13, random(num_experts, hidden, width, device=device, seed=2, scale=width**-0.5)


def routed(
    x: Tensor, chosen: Tensor, w13: Tensor, w2: Tensor, rows: int | None = None, poison: float = float("nan"),
    config: TileConfig | None = None,
) -> Tensor:  # fmt: skip
    """Outputs bf16 [T, k, H] of every (row, slot), from poisoned buffers; ``rows`` of a tile."""
    num_rows, top_k = chosen.shape
    groups = allocate_groups(num_rows, top_k, w13.shape[0], x.device, rows)
    groups.order.fill_(2**30)  # a place that is read without being written leads out of everything
    groups.tiles.fill_(2**30)
    act = torch.full((num_rows * top_k, w2.shape[2]), float("nan"), dtype=torch.bfloat16, device=x.device)
    slots = torch.full((num_rows, top_k, w2.shape[1]), poison, dtype=torch.bfloat16, device=x.device)
    group_pairs(chosen, w13.shape[0], groups)
    gate_up(x, w13, chosen, groups, act, config)
    down(act, w2, chosen, groups, slots, config)
    return slots


def exact_expert(x: Tensor, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """fp64 [n, H] of one expert, and how far two roundings to bf16 and fp32 sums may lead from it."""
    x, w13, w2 = x.double(), w13.double(), w2.double()
    width, hidden = w2.shape[1], w2.shape[0]
    gate, up = (x @ w13.T).chunk(2, -1)
    silu = gate * torch.sigmoid(gate)
    sums = (x.abs() @ w13.abs().T) * hidden * UNIT
    gate_error, up_error = (
        (gate.abs() * BF16_UNIT + sums[:, :width]),
        (up.abs() * BF16_UNIT + sums[:, width:]),
    )
    act, out = silu * up, (silu * up) @ w2.T
    # |silu'| <= 1.1; the second-order term stays below a tenth
    act_error = 1.1 * (1.1 * gate_error * up.abs() + silu.abs() * up_error + act.abs() * BF16_UNIT)
    error = act_error @ w2.abs().T + act.abs() @ w2.abs().T * width * UNIT
    return out, error + (out.abs() + error) * BF16_UNIT + 1e-30


def check_outputs(x: Tensor, chosen: Tensor, w13: Tensor, w2: Tensor, slots: Tensor) -> None:
    """Each (row, slot) lies within the bound of its expert."""
    for expert in sorted(set(chosen.flatten().tolist()) - {-1}):
        row, slot = torch.nonzero(chosen == expert, as_tuple=True)
        exact, bound = exact_expert(x[row], w13[expert], w2[expert])
        assert_within(slots[row, slot], exact, bound)


def check_all_routings(
    num_rows: int, top_k: int, num_experts: int, hidden: int, width: int, device: str
) -> None:
    w13, w2 = weights(num_experts, hidden, width, device)
    x = random(num_rows, hidden, device=device, seed=3)
    for chosen in routings(num_rows, top_k, num_experts).values():
        chosen = chosen.to(device)
        slots = routed(x, chosen, w13, w2, poison=-7.0)
        check_outputs(x, chosen, w13, w2, slots)
        assert (slots[chosen[:, 0] < 0] == -7.0).all()


def check_row_exact(
    x: Tensor, chosen: Tensor, w13: Tensor, w2: Tensor, counts: Iterable[int], tiles: Iterable[int | None]
) -> int:
    """Rows among others, in other orders and beside padding keep their bits; returns how many were compared."""
    whole, compared = routed(x, chosen, w13, w2), 0
    for rows in tiles:
        for count in counts:
            generator = torch.Generator().manual_seed(count)
            places = torch.randperm(len(x), generator=generator)[:count].to(x.device)
            padded = chosen[places].contiguous()
            padded[torch.rand(count, generator=generator) < 0.2] = -1
            for index, experts in (
                (slice(count), chosen[:count]),
                (places, chosen[places]),
                (places, padded),
            ):
                alone = routed(x[index].contiguous(), experts.contiguous(), w13, w2, rows)
                held = experts[:, 0] >= 0
                different = (alone[held].view(torch.int16) != whole[index][held].view(torch.int16)).sum()
                assert different == 0, f"{different} elements differ at {count} rows in tiles of {rows}"
                compared += int(held.sum())
    return compared


def check_row_exact_under_every_routing(
    num_rows: int, top_k: int, num_experts: int, hidden: int, width: int, device: str,
    counts: Iterable[int], tiles: Iterable[int | None],
) -> None:  # fmt: skip
    w13, w2 = weights(num_experts, hidden, width, device)
    x = random(num_rows, hidden, device=device, seed=4)
    for name, chosen in routings(num_rows, top_k, num_experts).items():
        if name in ("even", "one", "distinct"):
            assert check_row_exact(x, chosen.to(device), w13, w2, counts, tiles) > 0


@pytest.mark.parametrize("num_rows, hidden, width", [(1, 64, 64), (5, 80, 48), (20, 64, 80)])
def test_every_routing_gives_each_pair_its_expert_and_padding_nothing(num_rows, hidden, width, device):
    check_all_routings(num_rows, 2, 5, hidden, width, device)


def test_rows_do_not_depend_on_the_others(device):
    check_row_exact_under_every_routing(17, 2, 3, 64, 48, device, (3,), (None,))


def check_descriptors(
    num_rows: int, top_k: int, num_experts: int, hidden: int, width: int, device: str
) -> None:
    w13, w2 = weights(num_experts, hidden, width, device)
    x = random(num_rows, hidden, device=device, seed=3)
    chosen = routings(num_rows, top_k, num_experts)["even"].to(device)
    by_pointer, by_descriptor = (
        routed(x, chosen, w13, w2, config=TileConfig(64, 64, 4, 3, tma=tma)) for tma in (False, True)
    )
    assert torch.equal(by_pointer, by_descriptor)


def test_weights_through_a_descriptor_give_the_bits_of_pointers(device):
    check_descriptors(3, 2, 4, 80, 48, device)
    check_descriptors(18, 2, 4, 64, 80, device)


@pytest.mark.gpu
def test_weights_through_a_descriptor_give_the_bits_of_pointers_at_serving_shapes(device):
    for num_rows in (1, 64, 300):
        check_descriptors(num_rows, 6, 128, 2048, 1536, device)


def test_an_expert_of_another_row_would_be_seen(device):
    w13, w2 = weights(5, 64, 48, device)
    x, chosen = random(4, 64, device=device, seed=5), routings(4, 2, 5)["even"].to(device)
    slots = routed(x, chosen, w13, w2)
    with pytest.raises(AssertionError, match="off by"):
        check_outputs(x, chosen.roll(1, 0), w13, w2, slots)


def check_sum(num_rows: int, top_k: int, hidden: int, device: str) -> None:
    """The bits of the reference's order: slot by slot, each product rounded, the shared experts last."""
    slots = random(num_rows, top_k, hidden, device=device, seed=6)
    shared = random(num_rows, hidden, device=device, seed=7)
    gamma = torch.rand(num_rows, top_k + 2, device=device)
    slots[:, 0] *= (
        2.0**14
    )  # cancelled by the next slot: in another order the small slots would lose their last bits
    slots[:, 1], gamma[:, 1] = -slots[:, 0], gamma[:, 0]
    chosen = torch.zeros(num_rows, top_k, dtype=torch.int32, device=device)
    chosen[num_rows // 2] = -1
    slots[num_rows // 2] = float("nan")
    out = torch.full_like(shared, -7.0)
    combine_slots(slots, chosen, gamma, shared, out)
    total = slots[:, 0].float() * gamma[:, :1]
    for slot in range(1, top_k):
        total += slots[:, slot].float() * gamma[:, slot : slot + 1]
    expected = (shared.float() + total).bfloat16()
    expected[num_rows // 2] = -7.0
    assert torch.equal(out, expected)


def test_slots_are_added_in_order_and_padding_rows_left_alone(device):
    check_sum(5, 3, 80, device)


def check_shared_beside_routed(
    num_rows: int, top_k: int, num_experts: int, hidden: int, width: int, device: str
) -> None:
    """Shared experts have the bits of a product of one K segment and its activation; the routed ones keep theirs."""
    w13, w2 = weights(num_experts, hidden, width, device)
    x = random(num_rows, hidden, device=device, seed=11)
    shared_w13 = random(2 * 2 * width, hidden, device=device, seed=12, scale=hidden**-0.5)
    gamma = torch.rand(num_rows, top_k + 2, device=device)
    chosen = routings(num_rows, top_k, num_experts)["even"].to(device)
    chosen[num_rows // 2 :: 7] = -1
    groups = allocate_groups(num_rows, top_k, num_experts, x.device)
    group_pairs(chosen, num_experts, groups)
    nan = torch.full((num_rows, 2 * width), float("nan"), dtype=torch.bfloat16, device=device)
    acts = [torch.full((num_rows * top_k, width), -7.0, dtype=torch.bfloat16, device=device) for _ in range(2)]
    shared = SharedExperts(shared_w13, gamma, nan.clone())
    gate_up(x, w13, chosen, groups, acts[0])
    gate_up(x, w13, chosen, groups, acts[1], shared=shared)
    assert torch.equal(acts[0], acts[1])
    assert torch.equal(shared.act, swiglu(linear(x, shared_w13, segments=1), nan, gamma, 2))


@pytest.mark.parametrize("num_rows", [1, 5, 19])
def test_shared_experts_beside_the_routed_have_the_bits_of_their_own_product(num_rows, device):
    check_shared_beside_routed(num_rows, 2, 5, 64, 48, device)


SMALL, MINI = (6, 256, 4096, 2048), (6, 128, 2048, 1536)  # k, E, H, f of Inkling-Small and of its mini


@pytest.mark.gpu
@pytest.mark.parametrize("top_k, num_experts, hidden, width", [SMALL, MINI])
def test_serving_shapes_are_right(top_k, num_experts, hidden, width, device):
    """The last experts of the larger shape lie beyond 2^31 elements."""
    check_all_routings(64, top_k, num_experts, hidden, width, device)
    check_sum(300, top_k, hidden, device)


@pytest.mark.gpu
@pytest.mark.parametrize("top_k, num_experts, hidden, width", [SMALL, MINI])
@pytest.mark.parametrize("num_rows", [1, 8, 17, 32])
def test_shared_experts_have_their_bits_at_serving_shapes(num_rows, top_k, num_experts, hidden, width, device):
    check_shared_beside_routed(num_rows, top_k, num_experts, hidden, width, device)


@pytest.mark.gpu
def test_every_row_count_up_to_256_is_row_exact(device):
    check_row_exact_under_every_routing(256, 6, 32, 1024, 512, device, range(1, 257), (None,))


@pytest.mark.gpu
@pytest.mark.parametrize("top_k, num_experts, hidden, width", [SMALL, MINI])
def test_serving_shapes_are_row_exact_in_every_tile(top_k, num_experts, hidden, width, device):
    counts = (1, 2, 3, 8, 33, 64, 200, 256)
    check_row_exact_under_every_routing(
        256, top_k, num_experts, hidden, width, device, counts, (None, 16, 32, 64, 128)
    )


@pytest.mark.gpu
def test_a_long_prompt_and_a_single_row_have_the_same_bits(device):
    w13, w2 = weights(32, 2048, 1536, device)
    x, chosen = random(4096, 2048, device=device, seed=8), routings(4096, 6, 32)["even"].to(device)
    assert check_row_exact(x, chosen, w13, w2, (1, 5, 64, 1000), (None,)) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("num_rows", [6, 24])
def test_a_replayed_graph_gives_the_bits_of_a_launch(num_rows, early, device):
    top_k, num_experts, hidden, width = 6, 128, 2048, 1536
    w13, w2 = weights(num_experts, hidden, width, device)
    x, out = random(num_rows, hidden, device=device, seed=9), random(num_rows, hidden, device=device, seed=9)
    logits, bias = random_logits(num_rows, num_experts, device)
    others = torch.empty_like(logits)
    row_slot = torch.zeros(num_rows, dtype=torch.int32, device=device)
    chosen = torch.empty(num_rows, top_k, dtype=torch.int32, device=device)
    gamma = torch.empty(num_rows, top_k + 2, device=device)
    shared = random(num_rows, hidden, device=device, seed=10)
    groups = allocate_groups(num_rows, top_k, num_experts, device)
    act = torch.empty(num_rows * top_k, width, dtype=torch.bfloat16, device=device)
    slots = torch.empty(num_rows, top_k, hidden, dtype=torch.bfloat16, device=device)
    shared_w13 = random(2 * 2 * width, hidden, device=device, seed=13, scale=hidden**-0.5)
    shared_w2 = random(hidden, 2 * width, device=device, seed=14, scale=width**-0.5)
    beside = SharedExperts(shared_w13, gamma, random(num_rows, 2 * width, device=device, seed=15))

    def step(early: bool) -> None:
        for round_logits in (logits, others, logits):  # layer after layer: each reads what the last one wrote
            choose_experts(round_logits, bias, row_slot, 2.0, chosen, gamma, early)
            group_pairs(chosen, num_experts, groups, early)
            gate_up(x, w13, chosen, groups, act, early=early, shared=beside, ahead=2048)
            down(act, w2, chosen, groups, slots, early=early, ahead=512)
            linear(beside.act, shared_w2, shared, ahead=512 if early else None)
            combine_slots(slots, chosen, gamma, shared, out, early)
            combine_slots(slots, chosen, gamma, out, x, early)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(early)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(early)
    for seed in range(20):
        logits.copy_(random_logits(num_rows, num_experts, device, seed=seed)[0])
        others.copy_(random_logits(num_rows, num_experts, device, seed=50 + seed)[0])
        row_slot[:] = torch.where(torch.rand(num_rows, device=device) < 0.3, -1, 5)
        found = []
        for run in (graph.replay, lambda: step(False)):
            x.copy_(random(num_rows, hidden, device=device, seed=100 + seed))
            out.fill_(-7.0)
            run()
            found.append((out.clone(), x.clone()))
        assert all(map(torch.equal, *found)) and not found[0][0].isnan().any()

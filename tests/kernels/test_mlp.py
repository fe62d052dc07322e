"""Gated MLP, router and experts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.mlp import dense_mlp_reference, experts_reference, router_reference, silu_mul_reference
from kernels.rows import linear_reference, pad_rows
from tests.kernels.rounding import UNIT, assert_within, padded, random, rows_alike

HIDDEN = 37


def exact_silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def exact_mlp(m: Tensor, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """The formula, and what a relative error of one unit anywhere amounts to, at most: both fp64 [T, H]."""
    m, w13, w2 = m.double(), w13.double(), w2.double()
    gate_up = m @ w13.T
    act = exact_silu_mul(gate_up)
    gate_size, up_size = (m.abs() @ w13.abs().T).chunk(2, dim=-1)
    gate, up = gate_up.chunk(2, dim=-1)
    # |silu'| <= 1.1; the products of gate and up err relative to their sums of magnitudes
    act_size = 1.1 * gate_size * up.abs() + (gate * torch.sigmoid(gate)).abs() * up_size
    return act @ w2.T, act_size @ w2.abs().T + act.abs() @ w2.abs().T


def test_silu_mul_is_within_eight_units() -> None:
    gate_up = random(50, 2 * 61, seed=1, scale=4.0)
    gate_up[0, :8] = torch.tensor([-200.0, -90.0, -1e-30, 0.0, 1e-30, 90.0, 200.0, -30.0])
    exact = exact_silu_mul(gate_up)
    gate = gate_up.double().chunk(2, -1)[0]
    # exp(-x) errs by one unit in its result and by a rounding of its argument; e^88 overflows to a true zero
    assert_within(silu_mul_reference(gate_up), exact, (8 + gate.abs()) * UNIT * exact.abs() + 1e-36)


@pytest.mark.parametrize("ffn", [1, 19, 96])
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_dense_mlp_is_within_the_bound(ffn: int, scale: float) -> None:
    m = random(11, HIDDEN, seed=2)
    w13, w2 = random(2 * ffn, HIDDEN, seed=3, scale=0.3), random(HIDDEN, ffn, seed=4, scale=0.3)
    exact, size = exact_mlp(m, w13, w2)
    out = dense_mlp_reference(pad_rows(m), w13, w2, scale)[:11]
    assert_within(out, exact * scale, (HIDDEN + ffn + 20) * UNIT * size * scale)


def test_rows_of_a_dense_mlp_do_not_depend_on_the_others() -> None:
    w13, w2 = random(2 * 19, HIDDEN, seed=5, scale=0.3), random(HIDDEN, 19, seed=6, scale=0.3)
    assert rows_alike(lambda x: dense_mlp_reference(padded(x), w13, w2, 1.3), random(45, HIDDEN, seed=7))


def test_router_chooses_by_biased_score_and_weighs_without_the_bias() -> None:
    num_experts, num_chosen, num_shared, scale = 11, 3, 2, 2.5
    m, gate = random(16, HIDDEN, seed=8), random(num_experts + num_shared, HIDDEN, seed=9, scale=0.3)
    bias = random(num_experts, seed=10, scale=0.5)
    chosen, gamma = router_reference(m, gate, bias, num_chosen, scale)
    assert gamma.dtype == torch.float32
    sigmoid = torch.sigmoid(m.double() @ gate.double().T)
    score = sigmoid[:, :num_experts] + bias.double()
    assert torch.equal(chosen, torch.argsort(score, dim=-1, descending=True)[:, :num_chosen])
    assert not torch.equal(chosen, torch.argsort(sigmoid[:, :num_experts], descending=True)[:, :num_chosen])
    active = torch.cat((sigmoid[:, :num_experts].gather(1, chosen), sigmoid[:, num_experts:]), 1)
    # logits err by (H + 1) units of their magnitudes (below 20 here); log sigmoid has slope at most 1
    exact = scale * active / active.sum(-1, keepdim=True)
    assert_within(gamma, exact, 2 * (HIDDEN + 10) * 20 * UNIT * exact)
    assert_within(gamma.sum(-1), torch.full((16,), scale, dtype=torch.float64), 8 * UNIT * scale)


def test_equal_scores_choose_the_lowest_experts_in_order() -> None:
    m = padded(random(8, HIDDEN, seed=11))
    gate, bias = torch.zeros(70 + 1, HIDDEN), torch.zeros(70)
    assert router_reference(m, gate, bias, 3, 1.0)[0].tolist() == [[0, 1, 2]] * len(m)
    bias[[69, 4, 33]] = 1.0
    bias[50] = 2.0
    assert router_reference(m, gate, bias, 3, 1.0)[0].tolist() == [[50, 4, 33]] * len(m)


def test_extreme_gate_logits_stay_finite() -> None:
    m = padded(torch.ones(4, 1))
    gate = torch.tensor([[200.0], [-200.0], [-90.0], [0.0], [88.0]])
    chosen, gamma = router_reference(m, gate, torch.zeros(4), 2, 1.0)
    assert chosen[0].tolist() == [0, 3] and torch.isfinite(gamma).all()
    chosen, gamma = router_reference(m, -300 * torch.ones(5, 1), torch.zeros(4), 2, 1.0)
    assert torch.allclose(gamma, torch.full_like(gamma, 1 / 3))


def test_rows_of_router_and_activation_do_not_depend_on_the_others() -> None:
    gate, bias = random(11 + 2, HIDDEN, seed=12, scale=0.3), random(11, seed=13, scale=0.5)
    m = random(45, HIDDEN, seed=14)
    for part in (0, 1):  # the experts, their weights
        assert rows_alike(lambda x, part=part: router_reference(padded(x), gate, bias, 3, 2.5)[part], m)
    assert rows_alike(silu_mul_reference, random(45, 2 * 61, seed=15, scale=4.0))


@dataclass
class Experts:
    w13: Tensor  # [E, 2f, H]
    w2: Tensor  # [E, H, f]
    shared_w13: Tensor  # [S, 2f, H]
    shared_w2: Tensor  # [S, H, f]

    @classmethod
    def random(cls, experts: int, shared: int, ffn: int) -> Experts:
        return cls(
            random(experts, 2 * ffn, HIDDEN, seed=20, scale=0.3),
            random(experts, HIDDEN, ffn, seed=21, scale=0.3),
            random(shared, 2 * ffn, HIDDEN, seed=22, scale=0.3),
            random(shared, HIDDEN, ffn, seed=23, scale=0.3),
        )

    def __call__(self, m: Tensor, chosen: Tensor, gamma: Tensor, num_rows: int | None = None) -> Tensor:
        """Pads the rows and returns those of ``m``; padding is chosen for expert 0 with gamma 0."""
        out = experts_reference(
            padded(m),
            len(m) if num_rows is None else num_rows,
            padded(chosen),
            padded(gamma),
            self.w13,
            self.w2,
            self.shared_w13.flatten(0, 1),
            self.shared_w2.transpose(0, 1).flatten(1).contiguous(),
        )
        return out[: len(m)]


def routing(num_rows: int, experts: int, k: int, shared: int) -> tuple[Tensor, Tensor]:
    scores = random(num_rows, experts, seed=30)
    return scores.argsort(dim=-1)[:, :k].contiguous(), random(num_rows, k + shared, seed=31).abs()


@pytest.mark.parametrize(("experts", "k", "shared", "ffn"), [(8, 2, 2, 24), (5, 3, 1, 19), (1, 1, 3, 7)])
def test_experts_are_within_the_bound(experts: int, k: int, shared: int, ffn: int) -> None:
    layer = Experts.random(experts, shared, ffn)
    m = random(23, HIDDEN, seed=24)
    chosen, gamma = routing(23, experts, k, shared)
    exact, bound = torch.zeros(23, HIDDEN).double(), torch.zeros(23, HIDDEN).double()
    for t in range(23):
        pairs = [(layer.w13[e], layer.w2[e]) for e in chosen[t]]
        pairs += list(zip(layer.shared_w13, layer.shared_w2, strict=True))
        for share, (w13, w2) in zip(gamma[t].double(), pairs, strict=True):
            out, size = exact_mlp(m[t : t + 1], w13, w2)
            exact[t] += share * out[0]
            bound[t] += share * size[0]
    assert_within(layer(m, chosen, gamma), exact, (HIDDEN + shared * ffn + k + 24) * UNIT * bound)


def test_rows_of_experts_do_not_depend_on_the_others() -> None:
    layer = Experts.random(6, 2, 19)
    assert rows_alike(layer, random(45, HIDDEN, seed=25), *routing(45, 6, 3, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_are_summed_in_slot_order_and_rounded_once(dtype: torch.dtype) -> None:
    layer = Experts(*(w.to(dtype) for w in vars(Experts.random(6, 1, 19)).values()))
    m = padded(random(16, HIDDEN, seed=26)).to(dtype)
    chosen, gamma = routing(len(m), 6, 3, 1)

    def alone(t: int, expert: int) -> Tensor:
        gate_up = linear_reference(padded(m[t : t + 1]), layer.w13[expert])
        return linear_reference(silu_mul_reference(gate_up).to(dtype), layer.w2[expert])[0].float()

    slots = [
        torch.stack([alone(t, chosen[t, slot]) for t in range(len(m))]) * gamma[:, slot : slot + 1]
        for slot in range(3)
    ]
    act = silu_mul_reference(linear_reference(m, layer.shared_w13[0])) * gamma[:, 3:]
    shared = linear_reference(act.to(dtype), layer.shared_w2[0]).float()
    out = layer(m, chosen, gamma)
    assert out.dtype == dtype
    assert torch.equal(out, (shared + ((slots[0] + slots[1]) + slots[2])).to(dtype))
    if dtype == torch.float32:
        assert not torch.equal(out, shared + ((slots[2] + slots[1]) + slots[0]))


def test_padding_rows_reach_no_expert() -> None:
    layer = Experts.random(6, 1, 19)
    m = padded(random(16, HIDDEN, seed=27))
    chosen, gamma = routing(len(m), 5, 2, 1)
    expected = layer(m, chosen, gamma)
    chosen[13:], gamma[13:] = 5, torch.nan
    layer.w13[5] = layer.w2[5] = torch.nan
    assert torch.equal(layer(m, chosen, gamma, num_rows=13)[:13], expected[:13])
    assert layer(m, chosen, gamma).isnan().any(), "a row that is no padding would show"

"""Gated MLP, router and experts.

    mlp(m)    = W2( silu(G m) * (U m) ),  silu(x) = x / (1 + exp(-x))          silu * up in fp32, rounded once
    router:     l = Wg m (fp32), choose the k largest sigmoid(l_e) + b_e, ties to the lowest id
                gamma_a = scale * sigmoid(l_a) / sum over the chosen and the shared experts of sigmoid(l)
    experts:    sum over slots, in slot order, of gamma_e W2_e(act_e(m)), then the shared ones with gamma applied
                before their down projection

Fused weights stack all gate rows above all up rows. ``torch.sigmoid`` and ``silu`` are not used: their vector body
and tail differ in bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

from kernels.rows import linear_reference, padded_rows


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """``[..., 2f]`` -> ``[..., f]`` fp32; the caller rounds."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gate / (1.0 + torch.exp(-gate)) * up


def dense_mlp_reference(m: Tensor, w13: Tensor, w2: Tensor, global_scale: float) -> Tensor:
    """``m [Tp, H]``, ``w13 [2F, H]``, ``w2 [H, F]`` -> ``[Tp, H]``."""
    out = linear_reference(silu_mul_reference(linear_reference(m, w13)).to(m.dtype), w2)
    return out if global_scale == 1.0 else (out.float() * global_scale).to(m.dtype)


def router_reference(
    m: Tensor, gate: Tensor, bias: Tensor, num_chosen: int, scale: float
) -> tuple[Tensor, Tensor]:
    """``m [Tp, H]``, ``gate [E+S, H]``, ``bias [E]`` -> expert ids [Tp, k] int64, gamma [Tp, k+S] fp32."""
    num_experts = bias.shape[0]
    logits = linear_reference(m.float(), gate.float())  # [Tp, E+S], leaves the product in fp32
    score = 1.0 / (1.0 + torch.exp(-logits[:, :num_experts])) + bias
    chosen = torch.sort(score, dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    active = torch.cat((logits.gather(1, chosen), logits[:, num_experts:]), 1)
    log_sigmoid = active.clamp(max=0.0) - torch.log(1.0 + torch.exp(-active.abs()))
    return chosen, torch.softmax(log_sigmoid, -1) * scale


def experts_reference(
    m: Tensor,  # [Tp, H]
    num_rows: int,  # T: rows beyond it are padding and reach no expert
    chosen: Tensor,  # [Tp, k]
    gamma: Tensor,  # [Tp, k+S] fp32
    w13: Tensor,  # [E, 2f, H]
    w2: Tensor,  # [E, H, f]
    shared_w13: Tensor,  # [S*2f, H], experts one after another
    shared_w2: Tensor,  # [H, S*f]
) -> Tensor:
    """-> [Tp, H] in ``m.dtype``; the sum over slots is fp32."""
    num_chosen = chosen.shape[1]
    num_shared = gamma.shape[1] - num_chosen
    routed = _routed(m, chosen[:num_rows].tolist(), w13, w2)  # [T, k, H]
    total = routed[:, 0].float() * gamma[:num_rows, :1]
    for slot in range(1, num_chosen):
        total += routed[:, slot].float() * gamma[:num_rows, slot : slot + 1]
    act = silu_mul_reference(linear_reference(m, shared_w13).view(m.shape[0], num_shared, -1))
    act = (act * gamma[:, num_chosen:, None]).to(m.dtype).flatten(1)
    out = linear_reference(act, shared_w2).float()
    out[:num_rows] += total
    return out.to(m.dtype)


def _routed(m: Tensor, chosen: list[list[int]], w13: Tensor, w2: Tensor) -> Tensor:
    """Expert outputs of every (row, slot), ``[T, k, H]``. Each expert's rows are padded to the row quantum."""
    members: dict[int, list[int]] = {}  # expert -> its pairs, pair = row * k + slot
    for pair, expert in enumerate(chain.from_iterable(chosen)):
        members.setdefault(expert, []).append(pair)
    num_slots = len(chosen[0])
    places: list[int] = []  # row of m for every padded place; padding repeats row 0
    where = [0] * (len(chosen) * num_slots)  # place of every pair
    sizes: list[int] = []  # padded rows of every expert
    for pairs in members.values():
        for place, pair in enumerate(pairs, len(places)):
            where[pair] = place
        sizes.append(padded_rows(len(pairs)))
        places += [pair // num_slots for pair in pairs] + [0] * (sizes[-1] - len(pairs))
    gate_up = _grouped_linear(m.index_select(0, torch.tensor(places)), w13, members, sizes)
    out = _grouped_linear(silu_mul_reference(gate_up).to(m.dtype), w2, members, sizes)
    return out.index_select(0, torch.tensor(where)).view(len(chosen), num_slots, -1)


def _grouped_linear(x: Tensor, w: Tensor, experts: Iterable[int], sizes: list[int]) -> Tensor:
    """``x [sum of sizes, K]``, ``sizes`` rows for each of ``experts`` of ``w [E, N, K]`` -> ``[sum of sizes, N]``."""
    parts = x.split(sizes)
    return torch.cat([linear_reference(part, w[e]) for part, e in zip(parts, experts, strict=True)])

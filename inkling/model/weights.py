"""Fused weights of the target and of the MTP depths, as the model code wants them.

All matrices are ``[out, in]``. Rows that are multiplied together are stacked: q, k, v, r of an attention; all
gate rows, then all up rows of an MLP. Loading streams one tensor (one expert) at a time from memory-mapped
files.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class AttentionWeights:
    qkvr: Tensor  # [n_q*d + 2*n_kv*d + n_q*16, H]
    o: Tensor  # [H, n_q*d]
    q_norm: Tensor  # [d]
    k_norm: Tensor  # [d]
    rel_proj: Tensor  # [16, R]
    k_conv: Tensor  # [n_kv*d, 4]; tap 3 multiplies the current input
    v_conv: Tensor  # [n_kv*d, 4]


@dataclass
class DenseWeights:
    w13: Tensor  # [2F, H], gate rows then up rows
    w2: Tensor  # [H, F]
    global_scale: float


@dataclass
class MoEWeights:
    gate: Tensor  # [E+S, H], shared rows last
    gate_bias: Tensor  # [E] fp32
    global_scale: float
    w13: Tensor  # [E, 2f, H], gate rows then up rows
    w2: Tensor  # [E, H, f]
    shared_w13: Tensor  # [S, 2f, H]
    shared_w2: Tensor  # [S, H, f]


@dataclass
class LayerWeights:
    attn_norm: Tensor  # [H]
    attn: AttentionWeights
    attn_conv: Tensor  # [H, 4]
    mlp_norm: Tensor  # [H]
    mlp: DenseWeights | MoEWeights
    mlp_conv: Tensor  # [H, 4]


@dataclass
class TargetWeights:
    embed: Tensor  # [V, H]
    embed_norm: Tensor | None  # [H]
    layers: list[LayerWeights]
    norm: Tensor  # [H]
    head: Tensor  # [V', H]


@dataclass
class DepthWeights:
    hidden_norm: Tensor  # [H]
    embed_norm: Tensor  # [H]
    input_proj: Tensor  # [H, 2H], hidden half first
    block: LayerWeights


@dataclass
class DraftWeights:
    """The depths; embedding and head are the target's own."""

    depths: list[DepthWeights]
    chain_norm: Tensor | None  # [H]
    backbone_embed_norm: Tensor | None  # [H], the target's embed_norm

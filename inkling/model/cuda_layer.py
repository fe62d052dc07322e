"""One decoder layer on CUDA: the composition of ``inkling.model.layer``, on the kernels of ``kernels.cuda``.

A residual add and the norm after it are one kernel, so a layer takes the normed input beside the residual stream and
leaves the normed input of whatever follows. Every operation is row-exact, so the layer is.

In a pass of few rows most of the time is latency: there every kernel is launched early (``kernels.cuda.early_launch``),
and products ask for their weights while those before them leave the memory idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inkling.config import AttentionGeometry, ModelConfig
from inkling.model.cache import LayerCache
from inkling.model.weights import DenseWeights, LayerWeights
from kernels.cuda.attention_inputs import LayerGeometry, attention_inputs
from kernels.cuda.bank_order import bank_width
from kernels.cuda.configs import FEW_ROWS, SHARED_ROWS
from kernels.cuda.early_launch import WHOLE
from kernels.cuda.experts import SharedExperts, combine_slots, down, gate_up
from kernels.cuda.products import linear
from kernels.cuda.relative_attention import Heads, SegmentParts, decode_attention
from kernels.cuda.relative_attention_prompt import prompt_attention
from kernels.cuda.router import allocate_groups, choose_experts, group_pairs
from kernels.cuda.rows_meta import Rows
from kernels.cuda.short_conv import short_conv_add_norm
from kernels.cuda.swiglu import swiglu

DOWN_AHEAD = 512  # elements of K, of 1536 or more, that the routed experts' second product asks for


@dataclass
class AttentionPlan:
    """How a pass attends in the layers of one kind: short segments by ``parts``, long ones by ``tiles``."""

    pages: Tensor  # int32 [slots, pages of one sequence]
    max_rows: int  # of a short segment
    parts: SegmentParts | None = None
    tiles: Tensor | None = None  # int32 [tiles, 2] of ``prompt_tiles``
    short_segments: Tensor | None = None  # the pass's, slot -1 for those in ``tiles``; None: all are short


@dataclass
class CudaPass:
    """One pass over a ragged batch, on the device."""

    rows: Rows
    conv_pages: Tensor  # int32 [slots, pages of one sequence]
    conv_page_size: int
    plan: AttentionPlan  # of the layer's kind


@dataclass
class CudaLayer:
    weights: LayerWeights  # bf16, on the device
    geometry: LayerGeometry
    heads: Heads
    num_chosen: int
    router_scale: float  # route_scale * the gate's global scale
    kv_taps: Tensor  # [4, 2*n_kv*d]
    attn_taps: Tensor  # [4, H]
    mlp_taps: Tensor  # [4, H]
    rel_proj: Tensor  # [R, 16]
    shared_w13: Tensor | None  # [S*2f, H]
    shared_w2: Tensor | None  # [H, S*f]
    ahead: int | None = WHOLE  # what early products ask for (``linear``); None: nothing is launched early
    shared_rows: int = SHARED_ROWS  # up to so many rows; more have a product of their own, with the same bits

    @classmethod
    def build(
        cls, weights: LayerWeights, geometry: AttentionGeometry, config: ModelConfig, keep_after: int
    ) -> CudaLayer:
        """``keep_after``: positions before the end of a pass that the next pass may start at, N + 1."""
        attn, mlp, g = weights.attn, weights.mlp, geometry
        is_dense = isinstance(mlp, DenseWeights)
        return cls(
            weights,
            LayerGeometry(
                g.num_heads, g.num_kv_heads, g.head_dim, g.rel_extent, g.window, config.rms_norm_eps,
                config.log_scaling_floor, config.log_scaling_alpha, keep_after,
            ),
            Heads(g.num_heads, g.num_kv_heads, g.head_dim, g.rel_extent, g.window or 0),
            config.num_experts_per_token,
            0.0 if is_dense else config.route_scale * mlp.global_scale,
            torch.cat((attn.k_conv, attn.v_conv)).t().contiguous(),
            weights.attn_conv.t().contiguous(),
            weights.mlp_conv.t().contiguous(),
            attn.rel_proj.t().contiguous(),
            *((None, None) if is_dense else mlp.shared_as_one()),
        )  # fmt: skip

    def product_shapes(self) -> list[tuple[int, int]]:
        """(N, K) of the weights that whole passes are multiplied with."""
        attn, mlp = self.weights.attn, self.weights.mlp
        others = (
            (mlp.w13, mlp.w2)
            if isinstance(mlp, DenseWeights)
            else (mlp.gate, self.shared_w13, self.shared_w2)
        )
        return [tuple(weight.shape) for weight in (attn.qkvr, attn.o, *others)]

    def forward(
        self, x: Tensor, normed: Tensor, cache: LayerCache, batch: CudaPass, next_norm: Tensor | None = None
    ) -> None:
        """``x`` bf16 [T, H] is updated in place; ``normed`` [T, H] comes in as norm(x) by this layer's first norm.

        ``next_norm``: weight of the norm that follows, whose result then stands in ``normed``.
        """
        w, eps = self.weights, self.geometry.eps
        keep = self.geometry.keep_after
        conv = (batch.rows, batch.conv_pages, batch.conv_page_size, keep)
        ahead = self.ahead if x.is_cuda and len(x) <= FEW_ROWS else None
        early = ahead is not None
        out = self._attention(normed, cache, batch, ahead)
        short_conv_add_norm(
            out, x, self.attn_taps, cache.attn_conv, *conv, w.mlp_norm, eps, normed, early=early
        )
        is_dense = isinstance(w.mlp, DenseWeights)
        out = self._dense(normed, ahead) if is_dense else self._experts(normed, batch.rows, ahead)
        norm = () if next_norm is None else (next_norm, eps, normed)
        short_conv_add_norm(out, x, self.mlp_taps, cache.mlp_conv, *conv, *norm, early=early)

    def _attention(self, a: Tensor, cache: LayerCache, batch: CudaPass, ahead: int | None) -> Tensor:
        attn, g, plan, num_rows = self.weights.attn, self.geometry, batch.plan, a.shape[0]
        q = a.new_empty(num_rows, g.num_heads, g.head_dim)
        bank = a.new_empty(num_rows, g.num_heads, bank_width(g.extent))
        new = None
        if plan.tiles is not None and g.window is not None:  # the cache keeps the end of a long chunk only
            new = tuple(a.new_empty(num_rows, g.num_kv, g.head_dim) for _ in range(2))
        attention_inputs(
            linear(a, attn.qkvr, ahead=ahead), attn.q_norm, attn.k_norm, self.kv_taps, self.rel_proj, cache.kv_conv,
            cache.keys, cache.values, q, bank, batch.rows, batch.conv_pages, batch.conv_page_size, plan.pages, g,
            pass_keys=new, early=ahead is not None,
        )  # fmt: skip
        out = a.new_empty(num_rows, g.num_heads * g.head_dim)  # rows of padding hold anything, here and below
        segments = batch.rows.segments
        operands = (self.heads, q, bank, cache.keys, cache.values)
        if plan.parts is not None:
            short = segments if plan.short_segments is None else plan.short_segments
            decode_attention(*operands, plan.pages, short, plan.parts, out, plan.max_rows)
        if plan.tiles is not None:
            prompt_attention(*operands, new, plan.pages, segments, plan.tiles, out)
        return linear(out, attn.o, ahead=ahead)

    def _dense(self, m: Tensor, ahead: int | None) -> Tensor:
        mlp = self.weights.mlp
        act = m.new_empty(len(m), mlp.w2.shape[1])
        act = swiglu(linear(m, mlp.w13, ahead=ahead), act, early=ahead is not None)
        out = linear(act, mlp.w2, ahead=ahead)
        return out if mlp.global_scale == 1.0 else out.mul_(mlp.global_scale)

    def _experts(self, m: Tensor, rows: Rows, ahead: int | None) -> Tensor:
        mlp, num_rows, early = self.weights.mlp, m.shape[0], ahead is not None
        num_experts, num_shared = mlp.gate_bias.shape[0], mlp.shared_w2.shape[0]
        chosen = torch.empty(num_rows, self.num_chosen, dtype=torch.int32, device=m.device)
        gamma = m.new_empty(num_rows, self.num_chosen + num_shared, dtype=torch.float32)
        logits = linear(m, mlp.gate, out_dtype=torch.float32, ahead=ahead)
        choose_experts(logits, mlp.gate_bias, rows.slot, self.router_scale, chosen, gamma, early)
        groups = allocate_groups(num_rows, self.num_chosen, num_experts, m.device)
        group_pairs(chosen, num_experts, groups, early)
        act = m.new_empty(num_rows * self.num_chosen, mlp.w2.shape[2])
        slots = m.new_empty(num_rows, self.num_chosen, m.shape[1])
        shared = SharedExperts(self.shared_w13, gamma, m.new_empty(num_rows, self.shared_w2.shape[1]))
        beside = shared if num_rows <= self.shared_rows else None
        if beside is None:
            swiglu(linear(m, shared.w13, segments=1, ahead=ahead), shared.act, gamma, num_shared, early)
        gate_up(m, mlp.w13, chosen, groups, act, early=early, shared=beside, ahead=ahead or 0)
        down(act, mlp.w2, chosen, groups, slots, early=early, ahead=min(ahead or 0, DOWN_AHEAD))
        shared = linear(shared.act, self.shared_w2, ahead=ahead)
        out = torch.empty_like(m)
        combine_slots(slots, chosen, gamma, shared, out, early)
        return out

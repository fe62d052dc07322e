"""One decoder layer. The target's layers and the blocks of the MTP depths are the same code.

a = norm(x);  x = x + conv_A(W_o attention(a));  m = norm(x);  x = x + conv_M(mlp(m))
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inkling.config import AttentionGeometry, ModelConfig
from inkling.model.batch import Pass
from inkling.model.cache import LayerCache
from inkling.model.weights import DenseWeights, LayerWeights
from inkling.protocol import Kind
from kernels.attention_inputs import attention_inputs_reference
from kernels.mlp import dense_mlp_reference, experts_reference, router_reference
from kernels.norm import rms_norm_reference
from kernels.relative_attention import relative_attention_reference
from kernels.rows import linear_reference
from kernels.short_conv import short_conv_reference


def _taps(weight: Tensor) -> Tensor:
    """[C, 4] as stored -> [4, C] fp32."""
    return weight.float().t().contiguous()


def _widened(weights: LayerWeights) -> LayerWeights:
    """Norms and the router's gate in fp32, as they are used; other matrices stay as they are stored."""
    attn = replace(weights.attn, q_norm=weights.attn.q_norm.float(), k_norm=weights.attn.k_norm.float())
    mlp = weights.mlp
    if not isinstance(mlp, DenseWeights):
        mlp = replace(mlp, gate=mlp.gate.float())
    norms = {"attn_norm": weights.attn_norm.float(), "mlp_norm": weights.mlp_norm.float()}
    return replace(weights, attn=attn, mlp=mlp, **norms)


@dataclass
class DecoderLayer:
    weights: LayerWeights
    kind: Kind
    num_chosen: int
    router_scale: float  # route_scale * the gate's global scale
    eps: float
    kv_taps: Tensor  # [4, 2*n_kv*d] fp32
    attn_taps: Tensor  # [4, H] fp32
    mlp_taps: Tensor  # [4, H] fp32
    rel_proj: Tensor  # [R + 2, 16]; rows R and R + 1 are "no bias" and "not visible"
    shared_w13: Tensor | None  # [S*2f, H]
    shared_w2: Tensor | None  # [H, S*f]

    @classmethod
    def build(cls, weights: LayerWeights, geometry: AttentionGeometry, config: ModelConfig) -> DecoderLayer:
        weights = _widened(weights)
        attn, mlp = weights.attn, weights.mlp
        dense = isinstance(mlp, DenseWeights)
        rel = attn.rel_proj.t()
        return cls(
            weights,
            Kind.FULL if geometry.window is None else Kind.LOCAL,
            config.num_experts_per_token,
            0.0 if dense else config.route_scale * mlp.global_scale,
            config.rms_norm_eps,
            _taps(torch.cat((attn.k_conv, attn.v_conv))),
            _taps(weights.attn_conv),
            _taps(weights.mlp_conv),
            torch.cat((rel, rel.new_zeros(2, rel.shape[1]))).float().contiguous(),
            *((None, None) if dense else mlp.shared_as_one()),
        )

    def forward(self, x: Tensor, cache: LayerCache, batch: Pass) -> Tensor:
        """``x [Tp, H]`` -> ``[Tp, H]``; reads and writes ``cache``."""
        attended = self._attention(rms_norm_reference(x, self.weights.attn_norm, self.eps), cache, batch)
        x = x + short_conv_reference(attended, self.attn_taps, cache.attn_conv, batch.conv)
        mixed = self._mlp(rms_norm_reference(x, self.weights.mlp_norm, self.eps), batch.num_rows)
        return x + short_conv_reference(mixed, self.mlp_taps, cache.mlp_conv, batch.conv)

    def _attention(self, a: Tensor, cache: LayerCache, batch: Pass) -> Tensor:
        attn = self.weights.attn
        q, k, v, bank = attention_inputs_reference(
            linear_reference(a, attn.qkvr),
            batch.tau if self.kind is Kind.FULL else None,
            attn.q_norm,
            attn.k_norm,
            self.kv_taps,
            self.rel_proj,
            cache.kv_conv,
            cache.keys,
            cache.values,
            batch.conv,
            batch.keys[self.kind],
            self.eps,
        )
        o = relative_attention_reference(q, k, v, bank, cache.keys, cache.values, batch.attention[self.kind])
        return linear_reference(o, attn.o)

    def _mlp(self, m: Tensor, num_rows: int) -> Tensor:
        mlp = self.weights.mlp
        if isinstance(mlp, DenseWeights):
            return dense_mlp_reference(m, mlp.w13, mlp.w2, mlp.global_scale)
        chosen, gamma = router_reference(m, mlp.gate, mlp.gate_bias, self.num_chosen, self.router_scale)
        return experts_reference(m, num_rows, chosen, gamma, mlp.w13, mlp.w2, self.shared_w13, self.shared_w2)

    def product_shapes(self) -> list[tuple[int, int]]:
        """(K, N) of every product, for the row-invariance check."""
        mlp, attn = self.weights.mlp, self.weights.attn
        weights = [attn.qkvr, attn.o, self.rel_proj]
        weights += [mlp.w13, mlp.w2] if self.shared_w13 is None else [
            mlp.gate, mlp.w13[0], mlp.w2[0], self.shared_w13, self.shared_w2
        ]  # fmt: skip
        return [(w.shape[1], w.shape[0]) for w in weights]

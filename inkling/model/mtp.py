"""The MTP depths: small decoder blocks that each look one token further ahead.

For entry p (the position of a target state) and depth k:

    u        = W_in [ norm(h_{k-1, p}) ; norm(embed_norm(E[id_{p+k+1}])) ]       h_{-1}: the target's final states
    h_{k, p} = Block_k(u), then the shared chain norm where the checkpoint has one
    drafts id_{p+k+2} by argmax over the target's own head; no final norm

The embedding passes the target's embedding norm first: skipping it costs acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inkling.config import ModelConfig
from inkling.model.batch import Pass
from inkling.model.cache import LayerCache
from inkling.model.layer import DecoderLayer
from inkling.model.weights import DraftWeights
from kernels.head import head_logits_reference
from kernels.norm import dual_norm_cat_reference, embed_norm_reference, rms_norm_reference
from kernels.rows import linear_reference


def _wide_norms(weights: DraftWeights) -> DraftWeights:
    """Norm weights in fp32, as they are used; matrices stay as they are stored."""
    depths = [
        replace(d, hidden_norm=d.hidden_norm.float(), embed_norm=d.embed_norm.float()) for d in weights.depths
    ]
    chain, backbone = weights.chain_norm, weights.backbone_embed_norm
    return DraftWeights(
        depths,
        chain.float() if chain is not None else None,
        backbone.float() if backbone is not None else None,
    )


@dataclass
class MtpModel:
    config: ModelConfig
    weights: DraftWeights
    blocks: list[DecoderLayer]
    dtype: torch.dtype  # of activations and caches
    embed: Tensor  # [V, H], the target's
    head: Tensor  # [V', H], the target's

    @classmethod
    def build(
        cls, config: ModelConfig, weights: DraftWeights, embed: Tensor, head: Tensor, dtype: torch.dtype
    ) -> MtpModel:
        blocks = [
            DecoderLayer.build(d.block, config.depth_geometry(k), config)
            for k, d in enumerate(weights.depths)
        ]
        return cls(config, _wide_norms(weights), blocks, dtype, embed, head)

    def depth(self, k: int, hidden: Tensor, ids: Tensor, cache: LayerCache, batch: Pass) -> Tensor:
        """``hidden [Tp, H]`` of depth k-1 and ``ids [Tp]`` (id p+k+1 for entry p) -> ``[Tp, H]``."""
        depth, eps = self.weights.depths[k], self.config.rms_norm_eps
        embedding = embed_norm_reference(ids, self.embed, self.weights.backbone_embed_norm, eps, self.dtype)
        both = dual_norm_cat_reference(hidden, depth.hidden_norm, embedding, depth.embed_norm, eps)
        out = self.blocks[k].forward(linear_reference(both, depth.input_proj), cache, batch)
        return (
            out if self.weights.chain_norm is None else rms_norm_reference(out, self.weights.chain_norm, eps)
        )

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """fp32 ``[n, V']`` of the given rows."""
        return head_logits_reference(hidden, rows, self.head, self.config.mup_multiplier, row_exact=False)

"""The Inkling decoder: ids to post-final-norm hidden states, and from those to logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inkling.config import ModelConfig
from inkling.model.batch import Pass
from inkling.model.cache import PagedCache
from inkling.model.layer import DecoderLayer
from inkling.model.weights import TargetWeights
from kernels.head import head_logits_reference
from kernels.norm import embed_norm_reference, rms_norm_reference


@dataclass
class TargetModel:
    config: ModelConfig
    weights: TargetWeights
    dtype: torch.dtype  # of activations and caches
    layers: list[DecoderLayer]

    @classmethod
    def build(cls, config: ModelConfig, weights: TargetWeights, dtype: torch.dtype) -> TargetModel:
        layers = [
            DecoderLayer.build(layer, config.layer_geometry(i), config)
            for i, layer in enumerate(weights.layers)
        ]
        embed_norm = weights.embed_norm.float() if weights.embed_norm is not None else None
        return cls(config, replace(weights, embed_norm=embed_norm, norm=weights.norm.float()), dtype, layers)

    def hidden(self, ids: Tensor, cache: PagedCache, batch: Pass) -> Tensor:
        """``ids [Tp]`` int64 -> states after the final norm ``[Tp, H]``."""
        eps = self.config.rms_norm_eps
        x = embed_norm_reference(ids, self.weights.embed, self.weights.embed_norm, eps, self.dtype)
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            x = layer.forward(x, layer_cache, batch)
        return rms_norm_reference(x, self.weights.norm, eps)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """fp32 ``[n, V']`` of the given rows."""
        return head_logits_reference(hidden, rows, self.weights.head, self.config.mup_multiplier)

    def product_shapes(self, page_sizes: Iterable[int]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        """(K, N) of the products with weights, and of the batched ones of attention over pages of these sizes."""
        linears = {shape for layer in self.layers for shape in layer.product_shapes()}
        linears.add((self.weights.head.shape[1], self.weights.head.shape[0]))
        widths = {self.config.full.head_dim, self.config.local.head_dim}
        sides = [(d, size) for d in widths for size in page_sizes]
        return linears, {*sides, *((size, d) for d, size in sides)}

"""Paged caches of a stack of layers. State is addressed by position, so a rejected draft needs no undo.

Three kinds: keys and values of full layers, keys and values of local layers, inputs of the short convolutions of
every layer. A page id means the same page in every layer of its kind. Page 0 of each kind is never handed out: it
holds zeros and stands for whatever lies outside a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inkling.config import AttentionGeometry
from inkling.protocol import Kind


@dataclass
class LayerCache:
    keys: Tensor  # [pages, n_kv, page_size, d]; after convolution and norm
    values: Tensor  # [pages, n_kv, page_size, d]; after convolution
    kv_conv: Tensor  # [slots, 2*n_kv*d] inputs; slot = page * page_size + offset
    attn_conv: Tensor  # [slots, H]
    mlp_conv: Tensor  # [slots, H]


class PagedCache:
    def __init__(
        self,
        geometries: Sequence[AttentionGeometry],
        hidden_size: int,
        page_size: Mapping[Kind, int],
        num_pages: Mapping[Kind, int],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        """Allocates zeroed caches for one layer per geometry; sizes in positions and pages per kind."""
        self.page_size = page_size
        self.kinds = tuple(Kind.FULL if g.window is None else Kind.LOCAL for g in geometries)
        slots = num_pages[Kind.CONV] * page_size[Kind.CONV]

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.layers = []
        for geometry, kind in zip(geometries, self.kinds, strict=True):
            block = (num_pages[kind], geometry.num_kv_heads, page_size[kind], geometry.head_dim)
            kv_width = 2 * geometry.num_kv_heads * geometry.head_dim
            self.layers.append(
                LayerCache(
                    zeros(*block),
                    zeros(*block),
                    zeros(slots, kv_width),
                    zeros(slots, hidden_size),
                    zeros(slots, hidden_size),
                )
            )

    def zero(self, fresh: Mapping[Kind, np.ndarray]) -> None:
        """Clears recycled pages: a tail that was never written must not hold another sequence's numbers."""
        for kind, pages in fresh.items():
            if len(pages):
                self._zero(kind, torch.from_numpy(pages))

    def _zero(self, kind: Kind, pages: Tensor) -> None:
        if kind is Kind.CONV:
            size = self.page_size[kind]
            slots = (pages[:, None] * size + torch.arange(size)).flatten()
            for layer in self.layers:
                for cache in (layer.kv_conv, layer.attn_conv, layer.mlp_conv):
                    cache.index_fill_(0, slots, 0.0)
            return
        for layer, layer_kind in zip(self.layers, self.kinds, strict=True):
            if layer_kind is kind:
                layer.keys.index_fill_(0, pages, 0.0)
                layer.values.index_fill_(0, pages, 0.0)

"""What target and draft have in common: embedding table and LM head, once per machine, and the ring of hidden states.

All of it lies in one flat block (``inkling.device_memory``): the target exports it, the draft maps it, and both find
the same tensors at the same offsets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from inkling.config import ModelConfig
from inkling.errors import ModelError
from inkling.model.hidden_ring import RING_SLOTS, HiddenRing

_ALIGN = 256  # bytes; what an allocation of its own has. Code paths of BLAS may depend on it


@dataclass(frozen=True)
class SharedWeights:
    embed: Tensor  # [V, H]
    head: Tensor  # [V', H]


@dataclass(frozen=True)
class SharedLayout:
    """Shapes of the shared tensors, in their order in the block."""

    embed: tuple[int, int]  # [V, H]
    head: tuple[int, int]  # [V', H]
    ring: tuple[int, int, int]  # [RING_SLOTS, R, H]; R = 0: hidden states travel otherwise
    weight_dtype: torch.dtype
    dtype: torch.dtype  # of the hidden states

    @classmethod
    def of(
        cls, config: ModelConfig, weight_dtype: torch.dtype, dtype: torch.dtype, ring_rows: int
    ) -> SharedLayout:
        """``ring_rows``: R, rows of the longest step; 0: no ring."""
        width = config.hidden_size
        embed, head = (config.padded_vocab_size, width), (config.vocab_size, width)
        return cls(embed, head, (RING_SLOTS, ring_rows, width), weight_dtype, dtype)

    @property
    def ring_bytes(self) -> int:
        return _aligned(math.prod(self.ring) * self.dtype.itemsize)

    @property
    def num_bytes(self) -> int:
        return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in self._parts())

    def of_block(self, block: Tensor) -> tuple[SharedWeights, HiddenRing | None]:
        """The tensors in ``block``, uint8 [num_bytes]. Raises ModelError when it has another size."""
        if block.numel() != self.num_bytes:
            raise ModelError(
                f"the memory shared with the target has {block.numel()} bytes, these settings need {self.num_bytes}; "
                "start both models with the same settings"
            )
        views, start = [], 0
        for shape, dtype in self._parts():
            size = math.prod(shape) * dtype.itemsize
            views.append(block[start : start + size].view(dtype).view(shape))
            start += _aligned(size)
        embed, head, ring = views
        return SharedWeights(embed, head), HiddenRing(ring) if ring.numel() else None

    def _parts(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(self.embed, self.weight_dtype), (self.head, self.weight_dtype), (self.ring, self.dtype)]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN

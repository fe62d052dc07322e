"""Shapes of relative attention on CUDA and what is launched for them: decodes and prompts share a row's definition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.cuda.bank_order import bank_width

LEAST_M = 64  # rows of the matrix instruction's M side; with fewer another instruction is chosen


@dataclass(frozen=True)
class Launch:
    """Speed alone: no bit depends on it."""

    keys_on_m: bool
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.num_stages < 2:
            raise ValueError(f"num_stages is {self.num_stages}; below 2 these kernels fault on sm_90 (triton 3.6)")


@dataclass(frozen=True)
class AttentionConfig:
    """``segment`` and ``block_keys`` order a row's sums and are part of its definition."""

    segment: int = 256  # keys
    block_keys: int = 64
    narrow: Launch = Launch(True, 4, 3)  # decodes of up to 16 columns
    wide: Launch = Launch(False, 4, 2)  # and of more
    prompt: Launch = Launch(False, 8, 3)
    prompt_columns: int = 128

    def __post_init__(self) -> None:
        if self.segment % self.block_keys or self.block_keys % LEAST_M:
            raise ValueError(
                f"block_keys is {self.block_keys}; it must be a multiple of {LEAST_M} that divides {self.segment}"
            )


FULL_CONFIG = AttentionConfig()
LOCAL_CONFIG = AttentionConfig()
CONFIGS: dict[tuple[int, bool], AttentionConfig] = {  # (head_dim, has a window)
    (d, local): LOCAL_CONFIG if local else FULL_CONFIG for d in (16, 32, 64, 128) for local in (False, True)
}


@dataclass(frozen=True)
class Heads:
    """Shape of one attention kind. ``window`` counts visible keys, the row's own included; 0: full."""

    num_heads: int
    num_kv: int
    head_dim: int
    extent: int
    window: int = 0

    def __post_init__(self) -> None:
        if (self.head_dim, False) not in CONFIGS:
            raise ValueError(f"head_dim is {self.head_dim}; there are kernels for {sorted({d for d, _ in CONFIGS})}")
        if self.num_heads % self.num_kv:
            raise ValueError(f"{self.num_heads} heads do not share {self.num_kv} KV heads evenly")

    @property
    def config(self) -> AttentionConfig:
        return CONFIGS[self.head_dim, self.window > 0]

    @property
    def per_kv(self) -> int:
        return self.num_heads // self.num_kv

    def splits(self, max_keys: int, max_rows: int, segment: int) -> int:
        """Most key segments that ``max_rows`` consecutive rows below position ``max_keys`` can see."""
        splits = triton.cdiv(max_keys, segment)
        return splits if not self.window else min(splits, (self.window + max_rows + segment - 3) // segment + 1)


def tile_constants(heads: Heads, config: AttentionConfig, page_size: int) -> dict[str, int]:
    """Compile-time values of the kernels that attend."""
    return {
        "num_heads": heads.num_heads,
        "num_kv": heads.num_kv,
        "d": heads.head_dim,
        "EXTENT": heads.extent,
        "BANK_WIDTH": bank_width(heads.extent),
        "WINDOW": heads.window,
        "PAGE": page_size,
        "SEGMENT": config.segment,
        "BLOCK_KEYS": config.block_keys,
        "DV": max(heads.head_dim, LEAST_M),
    }


def check_operands(heads: Heads, q: Tensor, bank: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
    """Kernels address by shape alone and load 16 bytes at a time."""
    rows, d = q.shape[0], heads.head_dim
    assert q.shape == (rows, heads.num_heads, d), q.shape
    assert bank.shape == (rows, heads.num_heads, bank_width(heads.extent)), (bank.shape, heads)
    assert keys.shape == values.shape and keys.shape[1::2] == (heads.num_kv, d), (keys.shape, heads)
    assert out.shape == (rows, heads.num_heads * d), out.shape
    for x in (q, bank, keys, values, out):
        assert x.is_contiguous() and x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0, (x.shape, x.dtype)


SERVING_HEADS = [
    Heads(32, 8, 128, extent=1024),
    Heads(32, 8, 128, extent=512, window=512),
    Heads(64, 8, 128, extent=1024),
    Heads(64, 16, 128, extent=512, window=512),
    Heads(4, 1, 128, extent=1024),
    Heads(4, 1, 128, extent=512, window=512),
    Heads(32, 8, 64, extent=1024),
]
OPERANDS = {"q": "*bf16", "bank": "*bf16", "key_cache": "*bf16", "value_cache": "*bf16", "page_table": "*i32"}
PAGE_SIZE = 64  # positions, as served

"""The embedding table and LM head, once per machine: the target maps them to a file, the draft maps the same file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from inkling.config import ModelConfig

_ALIGN = 64  # bytes; BLAS code paths may depend on the alignment of their operands


@dataclass(frozen=True)
class SharedWeights:
    embed: Tensor  # [V, H]
    head: Tensor  # [V', H]

    @classmethod
    def open(
        cls, file: Path, config: ModelConfig, dtype: torch.dtype, *, create: bool = False
    ) -> SharedWeights:
        """Maps ``file``; with ``create`` it is made first, mode 0600, filled with zeros."""
        if create:
            file.touch(mode=0o600)
        width, per_row = config.hidden_size, config.hidden_size * dtype.itemsize
        head_start = -(-config.padded_vocab_size * per_row // _ALIGN) * _ALIGN // dtype.itemsize
        size = head_start + config.vocab_size * width
        flat = torch.from_file(str(file), shared=True, size=size, dtype=dtype)
        embed = flat[: config.padded_vocab_size * width].view(-1, width)
        return cls(embed, flat[head_start:].view(-1, width))

"""Settings and checkpoint together: the sizes that all three models must agree on, derived in one place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inkling.config import ModelConfig
from inkling.engine.pages import CacheLayout
from inkling.errors import SettingsError
from inkling.memory import PAGE_SIZES, cache_layout
from inkling.settings import Settings
from inkling.synthetic_weights import open_checkpoint
from inkling.tensors import draft_tensors, target_tensors

_ALWAYS_WIDE = ("gate.bias", "global_scale")  # fp32 whatever the matrices are
_DEFAULT_CONTEXT = 4096  # positions, when the checkpoint allows more


@dataclass(frozen=True)
class Deployment:
    settings: Settings
    config: ModelConfig
    num_draft_tokens: int  # N; also the number of depths built
    max_context: int  # positions of one sequence
    dtype: torch.dtype  # of activations and caches
    weight_dtype: torch.dtype  # of the weights as they are kept
    layout: CacheLayout

    @classmethod
    def of(cls, settings: Settings) -> Deployment:
        """Reads the checkpoint's config. Raises SettingsError or CheckpointError."""
        config = ModelConfig.from_dir(settings.checkpoint)
        drafts = settings.num_draft_tokens
        if drafts > config.mtp_depths:
            raise SettingsError(
                f"num_draft_tokens is {drafts}; the checkpoint has {config.mtp_depths} MTP depths"
            )
        drafts = config.mtp_depths if drafts < 0 else drafts
        context = settings.max_context or min(config.max_position, _DEFAULT_CONTEXT)
        if not 2 <= context <= config.max_position:
            raise SettingsError(
                f"max_context is {context}; it must be in [2, {config.max_position}] for this checkpoint"
            )
        if settings.device == "cuda":
            raise SettingsError("device is 'cuda'; the CUDA kernels do not exist yet, use cpu")
        largest = max(PAGE_SIZES.values())
        if settings.prefix_block % largest:
            raise SettingsError(
                f"prefix_block is {settings.prefix_block}; it must be a multiple of {largest}"
            )
        dtype = getattr(torch, settings.torch_dtype_name)
        layout = cache_layout(
            config,
            cache_bytes=settings.cache_bytes,
            num_drafts=drafts,
            dtype=dtype,
            max_sequences=settings.max_running_sequences,
            max_length=context,
            max_chunk=settings.max_tokens_per_step,
            max_prefixes=2 * settings.max_running_sequences if settings.prefix_cache == "on" else 0,
        )
        return cls(
            settings,
            config,
            drafts,
            context,
            dtype,
            _weight_dtype(settings.checkpoint, config, dtype),
            layout,
        )


def _weight_dtype(checkpoint: str, config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """bf16 where the checkpoint stores nothing wider: widening it per use loses nothing and halves the traffic."""
    files = open_checkpoint(checkpoint)
    specs = [s for s in target_tensors(config) + draft_tensors(config) if not s.key.endswith(_ALWAYS_WIDE)]
    stored = {
        files.tensors[piece.name].dtype
        for s in specs
        for piece in files.pieces(s)
        if piece.name in files.tensors
    }
    return torch.bfloat16 if stored == {"BF16"} else dtype

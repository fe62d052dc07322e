"""Settings and checkpoint together: the sizes that all three models must agree on, derived in one place."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from inkling.config import ModelConfig
from inkling.device_memory import gpu_bytes
from inkling.engine.pages import CacheLayout
from inkling.errors import SettingsError
from inkling.memory import PAGE_SIZES
from inkling.memory_plan import DEFAULT_CACHE_BYTES, UNUSED, MemoryPlan, plan_memory
from inkling.model.hidden_ring import output_rows
from inkling.model.shared_weights import SharedLayout
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
    shared_layout: SharedLayout  # of what target and draft have in common
    plan: MemoryPlan

    @property
    def layout(self) -> CacheLayout:
        return self.plan.layout

    @property
    def device(self) -> torch.device:
        """Of target and draft; naming a GPU does not open it."""
        return (
            torch.device("cuda", self.settings.gpu) if self.settings.device == "cuda" else torch.device("cpu")
        )

    @property
    def sends_hidden(self) -> bool:
        """Whether hidden states travel as tensors through the server; else target and draft share a ring of them."""
        return self.settings.hidden_transport == "dlpack" and self.num_draft_tokens > 0

    @classmethod
    def of(cls, settings: Settings, *, memory_bytes: int = 0) -> Deployment:
        """Reads the checkpoint's config. Raises SettingsError or CheckpointError.

        ``memory_bytes``: of the device, for caches whose size the settings leave open. 0: 1 GiB for the caches on
        the CPU, and on CUDA the GPU is asked.
        """
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
        largest = max(PAGE_SIZES.values())
        if settings.prefix_block % largest:
            raise SettingsError(
                f"prefix_block is {settings.prefix_block}; it must be a multiple of {largest}"
            )
        dtype = getattr(torch, settings.torch_dtype_name)
        weight_dtype = _weight_dtype(settings.checkpoint, config, dtype)
        if not settings.cache_bytes and not memory_bytes:
            if settings.device == "cpu":
                settings = replace(settings, cache_bytes=DEFAULT_CACHE_BYTES)
            else:
                memory_bytes = int((1 - UNUSED) * gpu_bytes(settings.gpu))
        uses_ring = settings.hidden_transport == "ring" and drafts > 0
        rows = output_rows(settings.max_tokens_per_step, settings.max_running_sequences, drafts)
        shared = SharedLayout.of(config, weight_dtype, dtype, ring_rows=rows if uses_ring else 0)
        plan = plan_memory(
            config,
            settings,
            num_drafts=drafts,
            max_context=context,
            dtype=dtype,
            weight_dtype=weight_dtype,
            shared=shared,
            memory_bytes=memory_bytes,
        )
        return cls(settings, config, drafts, context, dtype, weight_dtype, shared, plan)


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

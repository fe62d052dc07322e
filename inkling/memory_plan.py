"""Where the memory of a deployment goes: one function for what the models allocate and what ``inkling plan`` prints.

Sizes are absolute and decided here, from the settings and the size of the device; no process takes a share of what it
finds free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from inkling.config import ModelConfig
from inkling.engine.pages import CacheLayout, Model
from inkling.errors import SettingsError
from inkling.memory import PAGE_SIZES, all_page_bytes, cache_layout, format_bytes, layout_bytes, weight_bytes
from inkling.memory import sequence_bytes as bytes_of_sequence
from inkling.model.cuda_graphs import bucket_sizes
from inkling.model.shared_weights import SharedLayout
from inkling.protocol import Kind, ring_rows
from inkling.settings import Settings

CONTEXT_BYTES = 600_000_000  # of each process that touches a GPU
DEFAULT_CACHE_BYTES = 1 << 30  # on the CPU
GRAPH_NODE_BYTES = 8_000  # of a kernel in a captured graph
KERNELS_PER_LAYER = 16
UNUSED = 0.03  # of a GPU: the driver's own memory, and what allocators round up


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part, and the pools of the caches."""

    num_drafts: int
    dtype: torch.dtype  # of caches and activations
    weights: Mapping[str, int]
    working: Mapping[str, int]  # what a GPU holds beside weights and caches; empty on the CPU
    page_bytes: Mapping[Model, Mapping[Kind, int]]
    max_chunk: int  # rows of the longest prompt chunk
    config: ModelConfig
    cache_bytes: int  # the caches may take as much
    layout: CacheLayout  # and are divided like this

    @property
    def pool_bytes(self) -> int:
        """What the caches take: less than ``cache_bytes`` when every sequence fits at its longest."""
        return layout_bytes(self.layout, self.page_bytes)

    @property
    def total_bytes(self) -> int:
        return sum(self.weights.values()) + sum(self.working.values()) + self.pool_bytes

    def sequence_bytes(self, length: int) -> int:
        """Of a sequence of ``length`` rows. Raises SettingsError when no sequence is that long."""
        if not 1 <= length <= self.config.max_position:
            raise SettingsError(
                f"sequence_length is {length}; it must be from 1 to {self.config.max_position}"
            )
        return bytes_of_sequence(self.config, length, self.num_drafts, self.dtype, max_chunk=self.max_chunk)

    def render(self, sequence_length: int) -> str:
        rows = [(f"weights: {part}", size) for part, size in self.weights.items()]
        rows += [*self.working.items(), ("caches", self.pool_bytes), ("total", self.total_bytes)]
        lines = [f"{name:<34}{format_bytes(size):>12}" for name, size in rows]
        lines += ["", f"{'a page of':<12}{'positions':>10}{'target':>14}{'depths':>14}"]
        for kind in Kind:
            target, draft = (self.page_bytes[model][kind] for model in Model)
            lines.append(f"{kind.name.lower():<12}{PAGE_SIZES[kind]:>10}{target:>12} B{draft:>12} B")
        size = self.sequence_bytes(sequence_length)
        drafts = f"{self.num_drafts} draft tokens, {str(self.dtype).removeprefix('torch.')}"
        lines += ["", f"a sequence of {sequence_length} tokens: {format_bytes(size)} ({drafts})"]
        lines += [f"sequences that fit: {self.cache_bytes // size} in {format_bytes(self.cache_bytes)}"]
        return "\n".join(lines)


def plan_memory(
    config: ModelConfig,
    settings: Settings,
    *,
    num_drafts: int,
    max_context: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    shared: SharedLayout,
    memory_bytes: int,
) -> MemoryPlan:
    """Caches get ``cache_bytes`` of the settings; where that is 0, what everything else leaves of ``memory_bytes``.

    Raises SettingsError when what is left holds no sequence.
    """
    weights = weight_bytes(config, num_drafts, weight_dtype)
    working = _working_bytes(config, settings, num_drafts, dtype, shared) if settings.device == "cuda" else {}
    cache_bytes = settings.cache_bytes
    if not cache_bytes:
        fixed = sum(weights.values()) + sum(working.values())
        cache_bytes = memory_bytes - fixed
        if cache_bytes <= 0:
            raise SettingsError(
                f"memory is {format_bytes(memory_bytes)}, and all but the caches takes {format_bytes(fixed)}; "
                "use a larger GPU or fewer draft tokens"
            )
    layout = cache_layout(
        config,
        cache_bytes=cache_bytes,
        num_drafts=num_drafts,
        dtype=dtype,
        max_sequences=settings.max_running_sequences,
        max_length=max_context,
        max_chunk=settings.max_tokens_per_step,
        max_prefixes=2 * settings.max_running_sequences if settings.prefix_cache == "on" else 0,
    )
    page_bytes = all_page_bytes(config, num_drafts, dtype)
    return MemoryPlan(
        num_drafts,
        dtype,
        weights,
        working,
        page_bytes,
        settings.max_tokens_per_step,
        config,
        cache_bytes,
        layout,
    )


def _working_bytes(
    config: ModelConfig, settings: Settings, num_drafts: int, dtype: torch.dtype, shared: SharedLayout
) -> dict[str, int]:
    """What a GPU holds beside weights and caches, by part."""
    models = 2 if num_drafts else 1
    processes = models + (
        2 if settings.cuda_pool_bytes else 0
    )  # the server has the pool, spec_ensemble maps it
    states = settings.max_running_sequences * ring_rows(num_drafts) if num_drafts else 0
    width = config.hidden_size * dtype.itemsize
    nodes = _graph_nodes(config, settings.max_running_sequences, num_drafts)
    return {
        "contexts of GPU processes": processes * CONTEXT_BYTES,
        "the server's CUDA pool": settings.cuda_pool_bytes,
        "hidden states": shared.ring_bytes + states * width,
        "activations": models * _activation_bytes(config, settings, num_drafts, dtype),
        "CUDA graphs": nodes * GRAPH_NODE_BYTES if settings.cuda_graphs == "on" else 0,
    }


def _graph_nodes(config: ModelConfig, num_slots: int, num_drafts: int) -> int:
    """Kernels in all graphs: the target's by sequences and rows of each, the draft's by sequences, rows and depths,
    with and without filters."""
    sequences, rows = len(bucket_sizes(num_slots)), len(bucket_sizes(num_drafts + 1))
    depths = num_drafts * (num_drafts + 1) // 2
    return KERNELS_PER_LAYER * sequences * (rows * config.num_layers + 4 * depths)


def _activation_bytes(config: ModelConfig, settings: Settings, num_drafts: int, dtype: torch.dtype) -> int:
    """Tensors alive at once in the longest step of one model: those of its widest layer, and the logits, fp32."""
    heads = max((config.layer_geometry(i) for i in range(config.num_layers)), key=lambda g: g.num_heads)
    attention = heads.num_heads * (4 * heads.head_dim + heads.rel_extent)
    experts = config.num_experts_per_token * (config.expert_ffn + config.hidden_size)
    row = (6 * config.hidden_size + max(attention, experts, 3 * config.dense_ffn)) * dtype.itemsize
    draws = min(settings.max_running_sequences * (num_drafts + 1), settings.max_tokens_per_step)
    return settings.max_tokens_per_step * row + draws * config.vocab_size * 4

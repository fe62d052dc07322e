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
from inkling.model.hidden_ring import RING_SLOTS, output_rows
from inkling.model.shared_weights import SharedLayout
from inkling.protocol import Kind, ring_rows
from inkling.settings import Settings

DEFAULT_CACHE_BYTES = 1 << 30  # on the CPU
UNUSED = 0.03  # of a GPU: the driver's own memory, and what allocators round up

# Measured on an H200 as differences between servers by ring and dlpack, with graphs and without.
CONTEXT_BYTES = 565_000_000  # of each process that opens a GPU
KERNEL_BYTES = 160_000_000  # code and workspaces of torch's kernels and ours in a model's process
GRAPH_NODE_BYTES = 4_750  # of a kernel in a captured graph

KERNELS_PER_LAYER = 16
_SEGMENT = 20 << 20  # torch takes memory in blocks of this size
_KEYS_PER_SPLIT = 256  # each part of a row's attention over as many keys is kept, fp32
_HEAD_TILE = 128  # ids of a tile of the vocabulary, which keeps its best entry and its sums
_LOGIT_ROWS = 128  # held at once by the target


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part, and the pools of the caches."""

    num_drafts: int
    dtype: torch.dtype  # of caches and activations
    weights: Mapping[str, int]
    server: Mapping[str, int]  # of the other processes on a GPU; empty on the CPU
    models: Mapping[
        Model, Mapping[str, int]
    ]  # what each process has beside weights and caches; empty on the CPU
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
    def working(self) -> dict[str, int]:
        """What a GPU holds beside weights and caches, by part, all processes together."""
        parts = dict(self.server)
        for of_model in self.models.values():
            for name, size in of_model.items():
                parts[name] = parts.get(name, 0) + size
        return parts

    def of_model(self, model: Model) -> dict[str, int]:
        """By part, what the process of ``model`` allocates; the draft maps embedding, head and ring."""
        is_target = model is Model.TARGET
        weights = sum(
            size for part, size in self.weights.items() if part.startswith("depth") is not is_target
        )
        pools = zip(Kind, self.layout.pools(model), strict=True)
        caches = sum(pool.num_pages * self.page_bytes[model][kind] for kind, pool in pools)
        return {"weights": weights, "caches": caches, **self.models.get(model, {})}

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
    server, models = {}, {}
    if settings.device == "cuda":
        server = _server_bytes(settings)
        models = _model_bytes(config, settings, num_drafts, max_context, dtype, shared)
    cache_bytes = settings.cache_bytes
    if not cache_bytes:
        fixed = sum(weights.values()) + sum(server.values()) + sum(sum(m.values()) for m in models.values())
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
        server,
        models,
        page_bytes,
        settings.max_tokens_per_step,
        config,
        cache_bytes,
        layout,
    )


def _server_bytes(settings: Settings) -> dict[str, int]:
    """The server makes the pool and spec_ensemble maps it; without one neither has a context."""
    pool = settings.cuda_pool_bytes
    return {"contexts": 2 * CONTEXT_BYTES, "the server's CUDA pool": pool} if pool else {}


def _model_bytes(
    config: ModelConfig,
    settings: Settings,
    num_drafts: int,
    max_context: int,
    dtype: torch.dtype,
    shared: SharedLayout,
) -> dict[Model, dict[str, int]]:
    """What each model's process holds beside weights and caches, by part."""
    slots, step_rows = settings.max_running_sequences, settings.max_tokens_per_step
    width = config.hidden_size * dtype.itemsize
    out_rows = output_rows(step_rows, slots, num_drafts)
    hidden = shared.ring_bytes or RING_SLOTS * out_rows * width
    keys = max_context + num_drafts + 1
    sizes = [(Model.TARGET, hidden, num_drafts + 1, out_rows, 2 * _LOGIT_ROWS)]  # as drawn, and shaped
    if num_drafts:
        states = slots * ring_rows(num_drafts) * width
        sizes.append((Model.DRAFT, states, 2 * num_drafts, slots, slots))
    models = {}
    for model, states, short_rows, draws, logit_rows in sizes:
        logits = 4 * logit_rows * config.vocab_size
        row, graph_rows = _row_bytes(config, dtype), slots * short_rows
        nodes = _graph_nodes(config, slots, num_drafts)[model]
        graphed = _in_segments(graph_rows * row + slots * config.vocab_size * 4)
        graphs = nodes * GRAPH_NODE_BYTES + graphed if settings.cuda_graphs == "on" else 0
        models[model] = {
            "contexts": CONTEXT_BYTES,
            "kernels": KERNEL_BYTES,
            "hidden states": states,
            "attention splits": slots * short_rows * _split_bytes(config, keys, short_rows),
            "draws": 20 * draws * -(-config.vocab_size // _HEAD_TILE),
            # without graphs their steps find room among all others, in blocks of their own sizes
            "activations": _in_segments(step_rows * row + logits) + (0 if graphs else graphed),
            "CUDA graphs": graphs,
        }
    return models


def _in_segments(size: int) -> int:
    return -(-size // _SEGMENT) * _SEGMENT


def _graph_nodes(config: ModelConfig, num_slots: int, num_drafts: int) -> dict[Model, int]:
    """Kernels in all graphs: the target's by sequences and rows of each, the draft's by sequences, rows and depths,
    with and without filters."""
    sequences, rows = len(bucket_sizes(num_slots)), len(bucket_sizes(num_drafts + 1))
    depths = num_drafts * (num_drafts + 1) // 2
    return {
        Model.TARGET: KERNELS_PER_LAYER * sequences * rows * config.num_layers,
        Model.DRAFT: KERNELS_PER_LAYER * sequences * 4 * depths,
    }


def _split_bytes(config: ModelConfig, keys: int, rows: int) -> int:
    """Of a row of a decode over ``keys`` positions, among ``rows`` of its sequence: maximum, sum and values, fp32."""
    sizes = []
    for heads in {config.layer_geometry(layer) for layer in range(config.num_layers)}:
        splits = -(-keys // _KEYS_PER_SPLIT)
        if heads.window is not None:
            splits = min(splits, (heads.window + rows + _KEYS_PER_SPLIT - 3) // _KEYS_PER_SPLIT + 1)
        sizes.append(4 * heads.num_heads * splits * (heads.head_dim + 2))
    return max(sizes)


def _row_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Tensors of a row alive at once, those of the widest layer."""
    heads = max((config.layer_geometry(i) for i in range(config.num_layers)), key=lambda g: g.num_heads)
    attention = heads.num_heads * (4 * heads.head_dim + heads.rel_extent)
    experts = config.num_experts_per_token * (config.expert_ffn + config.hidden_size)
    return (6 * config.hidden_size + max(attention, experts, 3 * config.dense_ffn)) * dtype.itemsize

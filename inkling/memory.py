"""Bytes: of a page of each cache kind, of what a sequence reserves, of the pools, of the weights.

The allocator, ``inkling plan`` and the documentation take their figures from here. A page id of a kind stands
for that page in every layer of the kind, so a page is counted over all of them. GB are 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from inkling.config import AttentionGeometry, ModelConfig
from inkling.engine.pages import CONV_TAPS, CacheLayout, Model, PoolLayout, worst_case_pages
from inkling.errors import SettingsError
from inkling.protocol import Kind
from inkling.tensors import MTP, TensorSpec, depth_tensors, draft_tensors, target_tensors

PAGE_SIZES: Mapping[Kind, int] = {Kind.FULL: 64, Kind.LOCAL: 64, Kind.CONV: 8}  # positions


def page_bytes(
    geometries: Sequence[AttentionGeometry],
    hidden_size: int,
    dtype: torch.dtype,
    page_size: Mapping[Kind, int] = PAGE_SIZES,
) -> dict[Kind, int]:
    """Bytes of one page of each kind, summed over the layers of ``geometries`` that have that kind.

    A position takes a key and a value in an attention kind, and in CONV the inputs of the four short
    convolutions of every layer: keys, values, and twice the hidden width. 0 where no layer has the kind.
    """
    values = dict.fromkeys(Kind, 0)
    for geometry in geometries:
        kv = 2 * geometry.num_kv_heads * geometry.head_dim
        values[Kind.FULL if geometry.window is None else Kind.LOCAL] += kv
        values[Kind.CONV] += kv + 2 * hidden_size
    return {kind: page_size[kind] * count * dtype.itemsize for kind, count in values.items()}


def _need(
    config: ModelConfig, num_drafts: int, length: int, max_chunk: int, page_size: Mapping[Kind, int]
) -> dict[Model, dict[Kind, int]]:
    """The most pages that one sequence of ``length`` rows holds, by model and kind; 0 without such layers."""
    window = config.local.window
    assert window is not None
    stacks = _geometries(config, num_drafts)
    empty = {
        model: tuple(PoolLayout(page_size[kind], int(has)) for kind, has in _has_kind(stacks[model]).items())
        for model in Model
    }
    layout = CacheLayout(window, num_drafts, empty[Model.TARGET], empty[Model.DRAFT])
    pages = {model: worst_case_pages(layout, model, length, max_chunk, num_drafts) for model in Model}
    return {model: dict(zip(Kind, pages[model], strict=True)) for model in Model}


def _geometries(config: ModelConfig, num_depths: int) -> dict[Model, list[AttentionGeometry]]:
    target = [config.layer_geometry(layer) for layer in range(config.num_layers)]
    return {Model.TARGET: target, Model.DRAFT: [config.depth_geometry(depth) for depth in range(num_depths)]}


def _has_kind(geometries: Sequence[AttentionGeometry]) -> dict[Kind, bool]:
    is_full = [geometry.window is None for geometry in geometries]
    return {Kind.FULL: any(is_full), Kind.LOCAL: not all(is_full), Kind.CONV: bool(is_full)}


def all_page_bytes(
    config: ModelConfig, num_drafts: int, dtype: torch.dtype, page_size: Mapping[Kind, int] = PAGE_SIZES
) -> dict[Model, dict[Kind, int]]:
    """``page_bytes`` of the target and of the first ``num_drafts`` depths."""
    stacks = _geometries(config, num_drafts)
    return {model: page_bytes(stacks[model], config.hidden_size, dtype, page_size) for model in Model}


def sequence_bytes(
    config: ModelConfig,
    length: int,
    num_drafts: int,
    dtype: torch.dtype,
    *,
    max_chunk: int,
    page_size: Mapping[Kind, int] = PAGE_SIZES,
) -> int:
    """Cache bytes that admission reserves for a sequence of ``length`` rows, target and depths together.

    ``max_chunk``: rows of the longest prompt chunk.
    """
    need = _need(config, num_drafts, length, max_chunk, page_size)
    size = all_page_bytes(config, num_drafts, dtype, page_size)
    return sum(need[model][kind] * size[model][kind] for model in Model for kind in Kind)


def cache_layout(
    config: ModelConfig,
    *,
    cache_bytes: int,
    num_drafts: int,
    dtype: torch.dtype,
    max_sequences: int,
    max_length: int,
    max_chunk: int,
    max_prefixes: int = 0,
    page_size: Mapping[Kind, int] = PAGE_SIZES,
) -> CacheLayout:
    """Divides ``cache_bytes`` among the pools of target and draft.

    Windowed pools serve ``max_sequences`` of ``max_length`` rows, and the rows before the ends of up to
    ``max_prefixes`` cached prefixes, as far as a quarter of what is left pays for them; full attention takes the
    rest, the same number of pages in both models, up to as many sequences. ``SettingsError`` when no full page is
    left.
    """
    window = config.local.window
    assert window is not None
    need = _need(config, num_drafts, max_length, max_chunk, page_size)
    size = all_page_bytes(config, num_drafts, dtype, page_size)
    # page 0 of every pool is the null page
    count = {model: {kind: n and 1 + max_sequences * n for kind, n in need[model].items()} for model in Model}
    windowed = sum(count[m][kind] * size[m][kind] for m in Model for kind in (Kind.LOCAL, Kind.CONV))
    reach = {Kind.LOCAL: window - 1, Kind.CONV: CONV_TAPS - 1}
    rows = {
        kind: -(-positions // page_size[kind]) for kind, positions in reach.items()
    }  # they end with a page
    prefix_bytes = sum(rows[kind] * size[m][kind] for m in Model for kind in rows)
    num_prefixes = min(max_prefixes, max(0, cache_bytes - windowed) // 4 // prefix_bytes)
    for model in Model:
        for kind in rows:
            count[model][kind] += num_prefixes * rows[kind] if count[model][kind] else 0
    windowed += num_prefixes * prefix_bytes
    full_bytes = sum(size[model][Kind.FULL] for model in Model)
    full_pages = (cache_bytes - windowed) // full_bytes if full_bytes else 0
    least = windowed + 2 * full_bytes
    if cache_bytes < least:
        remedy = f"{max_sequences} sequences need at least {least}; raise it or lower max_running_sequences"
        raise SettingsError(f"cache_bytes is {cache_bytes}; {remedy}")
    for model in Model:
        count[model][Kind.FULL] = min(count[model][Kind.FULL], full_pages)
    target, draft = (
        tuple(PoolLayout(page_size[kind], count[model][kind]) for kind in Kind) for model in Model
    )
    return CacheLayout(window, num_drafts, target, draft)


def layout_bytes(layout: CacheLayout, page_bytes: Mapping[Model, Mapping[Kind, int]]) -> int:
    """What the pools of ``layout`` take; ``page_bytes`` as ``all_page_bytes`` gives it."""
    pools = (
        (model, kind, pool) for model in Model for kind, pool in zip(Kind, layout.pools(model), strict=True)
    )
    return sum(pool.num_pages * page_bytes[model][kind] for model, kind, pool in pools)


def weight_bytes(config: ModelConfig, num_drafts: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of the loaded weights by part; no padding rows in the head, ``num_drafts`` depths."""
    specs = target_tensors(config)
    for depth in range(num_drafts):
        specs += depth_tensors(config, depth)
    if num_drafts:
        specs += [spec for spec in draft_tensors(config) if spec.key == MTP + "chain_norm.weight"]
    parts: dict[str, int] = {}
    for spec in specs:
        parts[spec.part] = parts.get(spec.part, 0) + _loaded_bytes(spec, config, dtype)
    return parts


def _loaded_bytes(spec: TensorSpec, config: ModelConfig, dtype: torch.dtype) -> int:
    if spec.key.endswith("global_scale"):
        return 0  # a Python float
    if spec.part == "head":
        return config.vocab_size * config.hidden_size * dtype.itemsize
    return spec.size * (4 if spec.key.endswith("gate.bias") else dtype.itemsize)


def format_bytes(count: int) -> str:
    """A size for people, in decimal units: ``4.46 GB``."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"

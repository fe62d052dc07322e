"""Sizes: the published arithmetic of the releases, what a page and a sequence take, and the plan."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inkling.config import ModelConfig
from inkling.engine.pages import Model, PageAllocator, worst_case_pages
from inkling.errors import SettingsError
from inkling.memory import (
    PAGE_SIZES,
    all_page_bytes,
    cache_layout,
    format_bytes,
    sequence_bytes,
    weight_bytes,
)
from inkling.model.weights import load_draft, load_target
from inkling.protocol import Kind
from inkling.tensors import draft_tensors, target_tensors
from inkling.testing import released_config, tiny_config, write_random_checkpoint

RELEASES = ("Inkling", "Inkling-Small")
BF16 = torch.bfloat16


def tower_parameters(hidden: int) -> int:
    """Vision: folds to 75, 512, 5120 and 9600 inputs; audio: 80 bins of 16 classes."""
    vision = 128 * 75 + 128 + 320 * 512 + 320 + 4800 * 5120 + 4800 + hidden * 9600 + hidden
    return vision + 80 * 16 * hidden + hidden


@pytest.mark.parametrize(
    ("name", "parameters", "num_bytes"),
    [
        ("Inkling", 952_377_623_626, 1_904_755_280_148),
        ("Inkling-Small", 265_956_439_090, 531_912_898_740),  # the published total_size
    ],
)
def test_released_checkpoints_have_the_published_size(name, parameters, num_bytes):
    config = released_config(name)
    specs = [*target_tensors(config), *draft_tensors(config)]
    towers = tower_parameters(config.hidden_size)
    assert sum(spec.size for spec in specs) + towers == parameters
    assert sum(spec.size * spec.itemsize for spec in specs) + 2 * towers == num_bytes


@pytest.mark.parametrize(
    ("name", "parameters", "num_bytes"),
    [("Inkling", 5_260_445_704, 10_520_891_408), ("Inkling-Small", 2_231_912_456, 4_463_824_912)],
)
def test_released_depths_have_the_published_size(name, parameters, num_bytes):
    specs = draft_tensors(released_config(name))
    assert len(specs) == 160
    assert sum(spec.size for spec in specs) == parameters
    assert sum(spec.size * spec.itemsize for spec in specs) == num_bytes


@pytest.mark.parametrize(
    ("name", "target", "depths"),
    [
        ("Inkling", (45_056, 450_560, 6_352_896), (8_192, 49_152, 761_856)),
        ("Inkling-Small", (28_672, 143_360, 2_580_480), (8_192, 24_576, 491_520)),
    ],
)
def test_bytes_of_a_position_are_the_published_ones(name, target, depths):
    """Full and local attention for one position, convolutions for the 3 inputs they look back on."""
    size = all_page_bytes(released_config(name), 8, BF16)
    for model, published in ((Model.TARGET, target), (Model.DRAFT, depths)):
        full, local, conv = (size[model][kind] / PAGE_SIZES[kind] for kind in Kind)
        assert (full, local, 3 * conv) == published


def test_loaded_weights_take_what_was_planned(tmp_path):
    config = write_random_checkpoint(tmp_path, tiny_config(mtp_chain_norm=True))
    target = load_target(tmp_path, config, dtype=torch.float32, device="cpu")
    draft = load_draft(tmp_path, config, 2, dtype=torch.float32, device="cpu")
    draft = dataclasses.replace(draft, backbone_embed_norm=None)  # the target's own
    assert _nbytes(target) + _nbytes(draft) == sum(weight_bytes(config, 2, torch.float32).values())
    assert _nbytes(target) == sum(weight_bytes(config, 0, torch.float32).values())


def _nbytes(weights: object) -> int:
    if isinstance(weights, torch.Tensor):
        return weights.nbytes
    if isinstance(weights, list):
        return sum(_nbytes(item) for item in weights)
    if dataclasses.is_dataclass(weights):
        return sum(_nbytes(getattr(weights, field.name)) for field in dataclasses.fields(weights))
    return 0


def layout(config: ModelConfig, cache_bytes: int, num_drafts: int = 3, max_sequences: int = 4):
    return cache_layout(
        config,
        cache_bytes=cache_bytes,
        num_drafts=num_drafts,
        dtype=torch.float32,
        max_sequences=max_sequences,
        max_length=1000,
        max_chunk=64,
    )


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("cache_bytes", [4_000_000, 5_000_001, 8_000_000, 1 << 30])
def test_pools_never_exceed_the_cache_bytes(cache_bytes, num_drafts):
    config = tiny_config()
    pools = layout(config, cache_bytes, num_drafts)
    size = all_page_bytes(config, num_drafts, torch.float32)
    used = sum(pools.pools(model)[kind].num_pages * size[model][kind] for model in Model for kind in Kind)
    assert used <= cache_bytes
    if pools.target[Kind.FULL].num_pages < 65:  # less than a full page is left over
        assert cache_bytes - used < size[Model.TARGET][Kind.FULL] + size[Model.DRAFT][Kind.FULL]


def test_ample_pools_hold_every_sequence_at_its_longest():
    config = tiny_config()
    allocator = PageAllocator(layout(config, 1 << 30))
    for model in Model:
        pages = worst_case_pages(allocator.layout, model, 1000, 64, num_depths=3)
        assert allocator.shortage(model, tuple(4 * n for n in pages)) == ""
        assert allocator.shortage(model, tuple(5 * n for n in pages)) != ""


def test_a_sequence_takes_the_bytes_that_its_reservation_takes():
    config = tiny_config()
    pools = layout(config, 1 << 30)
    size = all_page_bytes(config, 3, torch.float32)
    pages = {model: worst_case_pages(pools, model, 777, 64, num_depths=3) for model in Model}
    reserved = sum(pages[model][kind] * size[model][kind] for model in Model for kind in Kind)
    assert sequence_bytes(config, 777, 3, torch.float32, max_chunk=64) == reserved


def test_bytes_of_a_long_sequence_grow_by_full_attention_alone():
    config = released_config("Inkling-Small")
    short, long = (sequence_bytes(config, n, 8, BF16, max_chunk=512) for n in (64 * 100, 64 * 101))
    assert long - short == 64 * (28_672 + 8_192)


def test_kinds_without_layers_get_no_pool():
    config = tiny_config(layer_is_local=(False,) * 4, mtp_is_local=(True,) * 3)
    pools = layout(config, 1 << 30)
    assert pools.target[Kind.LOCAL].num_pages == 0 and pools.draft[Kind.FULL].num_pages == 0
    assert pools.draft[Kind.LOCAL].num_pages > 0 and pools.target[Kind.FULL].num_pages > 0
    assert all(pool.num_pages == 0 for pool in layout(config, 1 << 30, num_drafts=0).draft)


def test_caches_too_small_for_the_sequences_are_refused_with_the_least_size():
    config = tiny_config()
    with pytest.raises(SettingsError, match="cache_bytes is 1000; 4 sequences need at least") as raised:
        layout(config, 1000)
    least = int(str(raised.value).split("at least ")[1].split(";")[0])
    assert layout(config, least).target[Kind.FULL].num_pages == 2
    with pytest.raises(SettingsError):
        layout(config, least - 1)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (4_463_824_912, "4.46 GB")]
)
def test_sizes_are_written_in_decimal_units(count, text):
    assert format_bytes(count) == text

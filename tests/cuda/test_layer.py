"""Whole layers on the kernels: a row has the same bits decoded, verified, or in a prompt cut anywhere.

Two layers, local with experts and full with a dense MLP, run over the same inputs along different paths. The caches
start as NaN, so a read beyond what was written shows. ``check_paths`` needs no pytest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from inkling.config import AttentionGeometry, ModelConfig
from inkling.model.batch import PageTables, PassShape, build_pass
from inkling.model.cache import PagedCache
from inkling.model.layer import DecoderLayer
from inkling.model.weights import AttentionWeights, DenseWeights, LayerWeights, MoEWeights
from inkling.protocol import Kind
from inkling.testing import tiny_config
from tests.kernels.rounding import padded

DRAFTS = 3
PAGE_SIZE = {Kind.FULL: 64, Kind.LOCAL: 64, Kind.CONV: 16}
Segment = tuple[int, int, int]  # slot, first position, rows


def config_of(hidden: int, head_dim: int, window: int, extent: int, **overrides: object) -> ModelConfig:
    """A local layer with experts, then a full one with a dense MLP."""
    return tiny_config(
        hidden_size=hidden,
        num_layers=2,
        full=AttentionGeometry(4, 1, head_dim, extent, None),
        local=AttentionGeometry(4, 2, head_dim, window, window),
        layer_is_local=(True, False),
        layer_is_dense=(False, True),
        **overrides,
    )


def random_layer(config: ModelConfig, index: int, seed: int) -> LayerWeights:
    """bf16 weights that keep activations near 1."""
    generator = torch.Generator().manual_seed(seed)
    g, h = config.layer_geometry(index), config.hidden_size

    def matrix(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    def vector(n: int) -> Tensor:
        return (1 + 0.2 * torch.randn(n, generator=generator)).bfloat16()

    d, kv, f = g.head_dim, g.num_kv_heads * g.head_dim, config.expert_ffn
    attn = AttentionWeights(
        matrix(g.num_heads * (d + 16) + 2 * kv, h), matrix(h, g.num_heads * d), vector(d), vector(d),
        matrix(16, g.rel_extent) * g.rel_extent**0.5, matrix(kv, 4), matrix(kv, 4),
    )  # fmt: skip
    if config.layer_is_dense[index]:
        mlp = DenseWeights(matrix(2 * config.dense_ffn, h), matrix(h, config.dense_ffn), 0.75)
    else:
        e, s = config.num_experts, config.num_shared_experts
        bias = 0.1 * torch.randn(e, generator=generator)
        mlp = MoEWeights(
            matrix(e + s, h),
            bias,
            1.25,
            matrix(e, 2 * f, h),
            matrix(e, h, f),
            matrix(s, 2 * f, h),
            matrix(s, h, f),
        )
    return LayerWeights(vector(h), attn, matrix(h, 4), vector(h), mlp, matrix(h, 4))


def moved(weights: object, device: str) -> object:
    """The same dataclass of tensors on ``device``."""
    if isinstance(weights, Tensor):
        return weights.to(device)
    if hasattr(weights, "__dataclass_fields__"):
        return replace(
            weights, **{k: moved(getattr(weights, k), device) for k in weights.__dataclass_fields__}
        )
    return weights


@dataclass
class Stack:
    """Two layers, their caches full of NaN, and page tables of ``slots`` sequences of up to ``length`` positions."""

    config: ModelConfig
    device: str
    slots: int
    length: int
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # (slot, position) -> row

    def __post_init__(self) -> None:
        from inkling.model.cuda_layer import CudaLayer

        config, device = self.config, self.device
        geometries = [config.layer_geometry(i) for i in range(2)]
        per_slot = {kind: -(-(self.length + DRAFTS + 1) // size) + 1 for kind, size in PAGE_SIZE.items()}
        num_pages = {kind: 1 + self.slots * n for kind, n in per_slot.items()}
        self.cache = PagedCache(
            geometries, config.hidden_size, PAGE_SIZE, num_pages, dtype=torch.bfloat16, device=device
        )
        for layer in self.cache.layers:
            for tensor in (layer.keys, layer.values, layer.kv_conv, layer.attn_conv, layer.mlp_conv):
                tensor.fill_(float("nan"))
        self.tables = {
            kind: 1
            + torch.randperm(self.slots * n, generator=torch.Generator().manual_seed(3)).int().view(-1, n)
            for kind, n in per_slot.items()
        }
        self.pages = {kind: table.to(device) for kind, table in self.tables.items()}
        weights = [moved(random_layer(config, i, seed=5 + i), device) for i in range(2)]
        self.layers = [
            CudaLayer.build(w, g, config, DRAFTS + 1) for w, g in zip(weights, geometries, strict=True)
        ]

    def run(self, segments: list[Segment], inputs: Tensor, num_rows: int, is_prompt: bool) -> Tensor:
        """``inputs`` [rows, H] of the segments -> [rows, H]; keeps the rows as ``outputs``."""
        from inkling.model.cuda_layer import AttentionPlan, CudaPass
        from kernels.cuda.norm import rms_norm
        from kernels.cuda.relative_attention import SegmentParts
        from kernels.cuda.relative_attention_prompt import prompt_tiles
        from kernels.cuda.rows_meta import make_rows

        rows = make_rows(segments, self.device, num_rows)
        x = torch.full((num_rows, self.config.hidden_size), 0.5, dtype=torch.bfloat16, device=self.device)
        x[: len(inputs)] = inputs.to(self.device)
        normed = torch.empty_like(x)
        rms_norm(x, self.layers[0].weights.attn_norm, self.config.rms_norm_eps, normed)
        kinds = (Kind.LOCAL, Kind.FULL)
        for i, (layer, kind) in enumerate(zip(self.layers, kinds, strict=True)):
            parts = tiles = None
            if is_prompt:
                tiles = torch.from_numpy(prompt_tiles(layer.heads, rows.segments.cpu().numpy())).to(
                    self.device
                )
            else:
                sizes = (layer.heads, len(segments), self.length + DRAFTS + 1, DRAFTS + 1)
                parts = SegmentParts.allocate(*sizes, self.device)
            plan = AttentionPlan(self.pages[kind], DRAFTS + 1, parts, tiles)
            batch = CudaPass(rows, self.pages[Kind.CONV], PAGE_SIZE[Kind.CONV], plan)
            following = self.layers[i + 1].weights.attn_norm if i + 1 < len(self.layers) else None
            layer.forward(x, normed, self.cache.layers[i], batch, following)
        row = 0
        for slot, first, count in segments:
            for position in range(first, first + count):
                self.outputs[slot, position] = x[row].cpu()
                row += 1
        return x[:row].cpu()

    def kept(self, slot: int, end: int) -> list[Tensor]:
        """What the caches hold of positions that a row from ``end`` on may read."""
        kept = []
        for layer, kind in zip(self.cache.layers, (Kind.LOCAL, Kind.FULL), strict=True):
            first = 0 if kind is Kind.FULL else max(0, end - self.config.local.window + 1)
            where = torch.arange(first, end)
            page, offset = self._places(kind, slot, where)
            kept += [layer.keys[page, :, offset].cpu(), layer.values[page, :, offset].cpu()]
            page, offset = self._places(Kind.CONV, slot, torch.arange(max(0, end - 3), end))
            inputs = page * PAGE_SIZE[Kind.CONV] + offset
            kept += [c[inputs].cpu() for c in (layer.kv_conv, layer.attn_conv, layer.mlp_conv)]
        return kept

    def _places(self, kind: Kind, slot: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        size = PAGE_SIZE[kind]
        return self.tables[kind][slot][positions // size].long().to(self.device), (positions % size).to(
            self.device
        )


@dataclass
class Inputs:
    """Rows that enter the first layer: true ones by slot and position, and wrong ones for drafts that fall."""

    hidden: int

    def row(self, slot: int, position: int, is_wrong: bool = False) -> Tensor:
        generator = torch.Generator().manual_seed(2 * (10_000 * slot + position) + is_wrong)
        return torch.randn(self.hidden, generator=generator).bfloat16()

    def of(self, segments: Iterable[Segment], wrong_from: dict[int, int] | None = None) -> Tensor:
        """``wrong_from``: slot -> first position whose row is a wrong draft's."""
        ends = wrong_from or {}
        return torch.stack([
            self.row(slot, p, p >= ends.get(slot, 1 << 30))
            for slot, first, count in segments for p in range(first, first + count)
        ])  # fmt: skip


def whole(config: ModelConfig, device: str, length: int, slots: int = 1) -> Stack:
    """Each sequence alone, in one chunk."""
    stack, inputs = Stack(config, device, slots, length), Inputs(config.hidden_size)
    for slot in range(slots):
        stack.run([(slot, 0, length)], inputs.of([(slot, 0, length)]), length, is_prompt=True)
    return stack


def in_chunks(config: ModelConfig, device: str, length: int, random: Random) -> Stack:
    stack, inputs, first = Stack(config, device, 1, length), Inputs(config.hidden_size), 0
    while first < length:
        count = min(length - first, random.choice((1, 2, 3, 5, 17, 64, 130)))
        segment = [(0, first, count)]
        stack.run(segment, inputs.of(segment), count + random.choice((0, 3)), is_prompt=True)
        first += count
    return stack


def verified(
    config: ModelConfig, device: str, length: int, prompt: int, num_drafts: int, random: Random
) -> Stack:
    """A prompt, then windows of ``num_drafts`` drafts of which a random part stands; the rest is overwritten."""
    stack, inputs = Stack(config, device, 1, length), Inputs(config.hidden_size)
    stack.run([(0, 0, prompt)], inputs.of([(0, 0, prompt)]), prompt, is_prompt=True)
    known = prompt
    while known < length:
        accepted = random.randint(0, num_drafts)
        segment = [(0, known, num_drafts + 1)]
        stack.run(segment, inputs.of(segment, {0: known + accepted + 1}), num_drafts + 1, is_prompt=False)
        known += accepted + 1
    return stack


def in_company(config: ModelConfig, device: str, length: int, slots: int, random: Random) -> Stack:
    """All sequences at unrelated positions, shuffled in every pass, some waiting, padding rows at the end."""
    stack, inputs = Stack(config, device, slots, length), Inputs(config.hidden_size)
    known = [0] * slots
    while any(k < length for k in known):
        running = [s for s in range(slots) if known[s] < length and random.random() < 0.8]
        random.shuffle(running)
        is_prompt = any(known[s] < 9 for s in running)
        segments, wrong = [], {}
        for slot in running:
            count = random.randint(1, 21) if known[slot] < 9 else random.randint(1, DRAFTS + 1)
            stands = count if known[slot] < 9 else random.randint(1, count)
            count, stands = min(count, length + DRAFTS - known[slot]), min(stands, length - known[slot])
            segments.append((slot, known[slot], count))
            wrong[slot] = known[slot] + stands
            known[slot] += stands
        if segments:
            rows = inputs.of(segments, wrong)
            stack.run(segments, rows, len(rows) + random.choice((0, 1, 7)), is_prompt)
    return stack


def assert_same(got: Stack, expected: Stack, slots: int, length: int) -> None:
    for slot in range(slots):
        for position in range(length):
            row, true = got.outputs[slot, position], expected.outputs[slot, position]
            assert torch.equal(row, true), f"slot {slot}, position {position}: other bits"
            assert not row.isnan().any()
        for a, b in zip(got.kept(slot, length), expected.kept(slot, length), strict=True):
            assert torch.equal(a, b), f"slot {slot}: the caches hold other bits"


def check_paths(
    config: ModelConfig,
    device: str,
    length: int,
    slots: int,
    seed: int = 0,
    drafts: Iterable[int] = range(DRAFTS + 1),
) -> None:
    random = Random(seed)
    expected = whole(config, device, length, slots)
    assert_same(in_chunks(config, device, length, random), expected, 1, length)
    for num_drafts in drafts:
        prompt = random.randint(1, length // 2)
        # the last window may pass the end: what it wrote there is no one's
        assert_same(verified(config, device, length, prompt, num_drafts, random), expected, 1, length)
    assert_same(in_company(config, device, length, slots, random), expected, slots, length)


SMALL = config_of(64, 16, window=11, extent=24)


def test_small_layers_have_the_same_bits_along_every_path(device: str) -> None:
    check_paths(SMALL, device, length=14, slots=2, drafts=(0, DRAFTS))


def test_layers_agree_with_the_reference(device: str) -> None:
    """Within bf16: the reference runs in fp32."""
    length = 20
    stack = whole(SMALL, device, length)
    geometries = [SMALL.layer_geometry(i) for i in range(2)]
    pages = {kind: table.shape[1] for kind, table in stack.tables.items()}
    cache = PagedCache(
        geometries, SMALL.hidden_size, PAGE_SIZE, {k: n + 1 for k, n in pages.items()}, dtype=torch.float32,
        device="cpu",
    )  # fmt: skip
    tables = PageTables(1, length + DRAFTS + 1, PAGE_SIZE)
    for table in tables.pages.values():
        table[0] = np.arange(1, table.shape[1] + 1)
    shape = PassShape.of(SMALL, SMALL.layer_is_local, DRAFTS)
    batch = build_pass(np.array([0]), np.array([0]), np.array([length]), tables, shape)
    x = padded(Inputs(SMALL.hidden_size).of([(0, 0, length)]).float())
    for i, geometry in enumerate(geometries):
        layer = DecoderLayer.build(moved(random_layer(SMALL, i, seed=5 + i), "cpu"), geometry, SMALL)
        x = layer.forward(x, cache.layers[i], batch)
    got = torch.stack([stack.outputs[0, p] for p in range(length)]).float()
    assert (got - x[:length]).norm() < 0.02 * x[:length].norm()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_served_layers_have_the_same_bits_along_every_path(device: str, seed: int) -> None:
    """Heads of 128, windows and key segments crossed, groups of experts of every size."""
    config = config_of(
        1024,
        128,
        window=128,
        extent=256,
        num_experts=32,
        num_experts_per_token=4,
        expert_ffn=256,
        dense_ffn=1024,
    )
    check_paths(config, device, length=700, slots=4, seed=seed)

"""Cells of whole decoder layers of mini, decoding at a context of 2048: what a small step spends its time on.

A run is one layer; LAYERS layers of the same kind run one after another, each on what the last one left, as in a model.
Experts are chosen by random routers: the bytes count those that random choices read on average.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from benchmarks.kernel_cells.ceilings import capture
from benchmarks.kernel_cells.cell import Built, Cell
from inkling.config import AttentionGeometry, ModelConfig
from inkling.model.cache import PagedCache
from inkling.model.cuda_layer import AttentionPlan, CudaLayer, CudaPass
from inkling.model.weights import AttentionWeights, DenseWeights, LayerWeights, MoEWeights
from inkling.protocol import Kind
from kernels.cuda.relative_attention import SegmentParts
from kernels.cuda.rows_meta import make_rows

LAYERS = 4
CONTEXT = 2048
PAGE_SIZE = {Kind.FULL: 64, Kind.LOCAL: 64, Kind.CONV: 16}
KEEP_AFTER = 1  # no drafts
CHANGES = {  # of a layer: how else it could be launched
    "not early": {"ahead": None, "shared_rows": 0},
    "early0": {"ahead": 0},
    "early512": {"ahead": 512},
    "shared apart": {"shared_rows": 0},
}


@cache
def mini() -> ModelConfig:
    return ModelConfig.from_dir("synthetic:mini")


def _normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_().mul_(scale)


def _matrix(*shape: int) -> Tensor:
    return _normal(*shape, scale=shape[-1] ** -0.5)


def _weights(geometry: AttentionGeometry, is_dense: bool) -> LayerWeights:
    c, g = mini(), geometry
    hidden, width, kv = c.hidden_size, c.expert_ffn, g.num_kv_heads * g.head_dim
    ones = partial(torch.ones, dtype=torch.bfloat16, device="cuda")
    attention = AttentionWeights(
        _matrix(g.num_heads * (g.head_dim + 16) + 2 * kv, hidden), _matrix(hidden, g.num_heads * g.head_dim),
        ones(g.head_dim), ones(g.head_dim), _matrix(16, g.rel_extent), _matrix(kv, 4), _matrix(kv, 4),
    )  # fmt: skip
    if is_dense:
        mlp = DenseWeights(_matrix(2 * c.dense_ffn, hidden), _matrix(hidden, c.dense_ffn), 1.0)
    else:
        experts, shared = c.num_experts, c.num_shared_experts
        mlp = MoEWeights(
            _matrix(experts + shared, hidden), torch.zeros(experts, device="cuda"), 1.0,
            _matrix(experts, 2 * width, hidden), _matrix(experts, hidden, width),
            _matrix(shared, 2 * width, hidden), _matrix(shared, hidden, width),
        )  # fmt: skip
    return LayerWeights(ones(hidden), attention, _matrix(hidden, 4), ones(hidden), mlp, _matrix(hidden, 4))


def _moved_bytes(geometry: AttentionGeometry, is_dense: bool, num_rows: int) -> int:
    """Weights and the keys and values that are attended; activations are small beside them."""
    c, g = mini(), geometry
    heads = (2 * g.num_heads + 2 * g.num_kv_heads) * g.head_dim + g.num_heads * 16
    keys = min(CONTEXT, g.window or CONTEXT) * 2 * g.num_kv_heads * g.head_dim
    if is_dense:
        mlp = 3 * c.dense_ffn * c.hidden_size
    else:
        read = c.num_experts * (1 - (1 - c.num_experts_per_token / c.num_experts) ** num_rows)
        mlp = 3 * c.expert_ffn * c.hidden_size * (read + c.num_shared_experts) + c.num_experts * c.hidden_size
    return int(2 * (heads * c.hidden_size + num_rows * keys + mlp))


@dataclass
class Chain:
    """Layers, their caches and the rows that pass through them."""

    layers: list[CudaLayer]
    cache: PagedCache
    batch: CudaPass
    x: Tensor
    normed: Tensor

    @classmethod
    def make(cls, geometry: AttentionGeometry, is_dense: bool, num_rows: int) -> Chain:
        config, kind = mini(), Kind.FULL if geometry.window is None else Kind.LOCAL
        per_slot = {k: CONTEXT // size for k, size in PAGE_SIZE.items()}
        cache = PagedCache(
            [geometry] * LAYERS, config.hidden_size, PAGE_SIZE, {k: num_rows * n + 1 for k, n in per_slot.items()},
            dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values, layer.kv_conv, layer.attn_conv, layer.mlp_conv):
                tensor.normal_()
        pages = {
            k: torch.randperm(num_rows * n, device="cuda").add_(1).int().view(num_rows, n)
            for k, n in per_slot.items()
        }
        layers = [
            CudaLayer.build(_weights(geometry, is_dense), geometry, config, KEEP_AFTER) for _ in range(LAYERS)
        ]
        parts = SegmentParts.allocate(layers[0].heads, num_rows, CONTEXT + 1, 1, "cuda")
        rows = make_rows([(slot, CONTEXT - 1, 1) for slot in range(num_rows)], "cuda")
        batch = CudaPass(rows, pages[Kind.CONV], PAGE_SIZE[Kind.CONV], AttentionPlan(pages[kind], 1, parts))
        x = _normal(num_rows, config.hidden_size)
        return cls(layers, cache, batch, x, torch.empty_like(x))

    def runs(self, **changes: object) -> list[Callable[[], None]]:
        """One a layer; each leaves the next one's input."""
        return [
            partial(
                replace(layer, **changes).forward,
                self.x,
                self.normed,
                cache,
                self.batch,
                layer.weights.attn_norm,
            )
            for layer, cache in zip(self.layers, self.cache.layers, strict=True)
        ]

    def outputs(self, run: Callable[[], None]) -> list[Tensor]:
        """What ``run`` of all layers makes of the same inputs."""
        generator = torch.Generator("cuda").manual_seed(1)
        self.x.normal_(generator=generator)
        self.normed.copy_(self.x)
        run()
        return [self.x.clone(), self.normed.clone()]


def build(geometry: AttentionGeometry, is_dense: bool, num_rows: int, **changes: object) -> Built:
    chain = Chain.make(geometry, is_dense, num_rows)
    runs = chain.runs(**changes)

    def all_of(functions: list[Callable[[], None]]) -> None:
        for function in functions:
            function()

    def check() -> None:
        """The bits of launches that wait for each other, also by a graph, again and again."""
        expected = chain.outputs(partial(all_of, chain.runs(ahead=None, shared_rows=0)))
        assert all(tensor.isfinite().all() for tensor in expected)
        replay = capture(runs).replay
        for run in (partial(all_of, runs), *[replay] * 20):
            found = chain.outputs(run)
            assert all(map(torch.equal, found, expected)), "other bits than one launch after another"

    return Built(runs, check, _moved_bytes(geometry, is_dense, num_rows))


def cells() -> list[Cell]:
    config, found = mini(), []
    for name, geometry, is_dense in (
        ("local experts", config.local, False),
        ("full dense", config.full, True),
    ):
        for rows in (1, 8, 32):
            make = partial(build, geometry, is_dense, rows)
            wanted = ["not early"] if is_dense or rows > 8 else CHANGES
            tried = {label: partial(make, **CHANGES[label]) for label in wanted}
            found.append(Cell("layer", f"mini {name}, {rows} rows", make, tried))
    return found

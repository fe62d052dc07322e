"""Products of Inkling-Small and mini: few rows beside cuBLAS, the products of a layer in a row, and prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from benchmarks.kernel_cells.cell import Built, Cell, rotating
from kernels.cuda.configs import ProductConfig, num_segments, product_config, segment_unit
from kernels.cuda.products import linear

Shape = tuple[int, int]  # N, K of a weight

ATTENTION_SMALL: dict[str, Shape] = {"qkvr": (6656, 4096), "o": (4096, 4096)}
DENSE_SMALL: dict[str, Shape] = {"dense w13": (32768, 4096), "dense w2": (4096, 16384)}
SPARSE_SMALL: dict[str, Shape] = {"router": (258, 4096), "shared w13": (8192, 4096), "shared w2": (4096, 4096)}
ATTENTION_MINI: dict[str, Shape] = {"qkvr": (3328, 2048), "o": (2048, 2048)}
DENSE_MINI: dict[str, Shape] = {"dense w13": (16384, 2048), "dense w2": (2048, 8192)}
SPARSE_MINI: dict[str, Shape] = {"router": (130, 2048), "shared w13": (6144, 2048), "shared w2": (2048, 3072)}
MODELS = {
    "small": (ATTENTION_SMALL, DENSE_SMALL, SPARSE_SMALL),
    "mini": (ATTENTION_MINI, DENSE_MINI, SPARSE_MINI),
}
FEW = (1, 4, 8, 16, 32, 64)
MANY = (128, 256, 512, 1024, 2048, 4096)
FEW_BOUND, LAYER_BOUND, PROMPT_BOUND = ">= 0.9 x cuBLAS", ">= 1.0 x cuBLAS", ">= 395 TFLOP/s"


def output_type(n: int) -> torch.dtype:
    return torch.float32 if n < 1024 else torch.bfloat16  # the router's logits leave in fp32


@lru_cache(maxsize=1)
def _weights(n: int, k: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return rotating(lambda: _random(n, k, k**-0.5, generator), 2 * n * k)


def _random(rows: int, width: int, scale: float, generator: torch.Generator) -> Tensor:
    return (torch.randn(rows, width, generator=generator, device="cuda") * scale).bfloat16()


def build(
    n: int, k: int, rows: int, config: ProductConfig | None = None, segments: int | None = None, bound: str = ""
) -> Built:
    weights = _weights(n, k)
    generator = torch.Generator("cuda").manual_seed(rows)
    sets = [
        (_random(rows, k, 1.0, generator), w, torch.empty(rows, n, dtype=output_type(n), device="cuda"))
        for w in weights
    ]
    plain = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")  # cuBLAS rounds the router's logits

    def check() -> None:
        x, w, out = sets[0]
        out.fill_(float("nan"))
        linear(x, w, out, config=config, segments=segments)
        wanted, magnitude = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
        error = (out.double() - wanted).abs()
        relative = 2.0**-8 if out.dtype is torch.bfloat16 else 0.0
        assert (error <= relative * wanted.abs() + 1e-5 * magnitude).all(), f"off by {error.max():.3e}"
        few = linear(x[-3:].clone(), w, out_dtype=out.dtype, segments=segments)
        assert torch.equal(out[-3:], few), "other bits than the same rows alone"

    out_bytes = sets[0][2].element_size()
    return Built(
        runs=[partial(linear, x, w, out, config=config, segments=segments) for x, w, out in sets],
        check=check,
        bytes=2 * n * k + 2 * rows * k + out_bytes * rows * n,
        flops=2 * rows * n * k,
        baseline=[partial(torch.mm, x, w.t(), out=plain) for x, w, _ in sets],
        bound=bound,
    )


def few_row_candidates(n: int, k: int, rows: int) -> dict[str, tuple[ProductConfig, int]]:
    """Other launches, and other segment counts with the launches that a rule gives them."""
    block_n, unit, segments = max(16, 1 << (rows - 1).bit_length()), segment_unit(k), num_segments(n, k)
    small = min(unit, 64)
    base = ProductConfig(64, block_n, small, 4, 4, segments > 1)
    shared = 224 << 10
    tried = []
    for block_m, block_k, warps, resident in (
        (64, small, 4, 4),
        (64, unit, 4, 2),
        (128, small, 4, 2),
        (128, unit, 8, 1),
        (64, small, 4, 3),
        (64, unit, 4, 1),
        (128, small, 8, 2),
        (256, small, 8, 1),
    ):
        stages = min(8, shared // resident // ((block_m + block_n) * block_k * 2))
        if stages >= 3:
            blocks = {"block_m": block_m, "block_k": block_k, "num_warps": warps, "num_stages": stages}
            tried.append(replace(base, **blocks))
    tried[1:1] = [replace(c, is_early=True) for c in (tried[0], *tried[2:3])]
    found = {f"{c}": (c, segments) for c in tried}
    for other in (1, 2, 3, 4, 5, 6, 8, 16):
        if other != segments and 0.4 <= other / segments <= 2.5 and k // other >= 256:
            found |= {f"{c} S{other}": (replace(c, is_spread=other > 1), other) for c in tried[3:5]}
    return found


def many_row_candidates(n: int, k: int) -> dict[str, tuple[ProductConfig, int]]:
    """Other launches with the same bits; those named "free" have one segment, the best without row-exactness."""
    segments, block_k = num_segments(n, k), min(segment_unit(k), 64)
    blocks = [(128, 128, 8, 4), (128, 128, 8, 3), (64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 8, 3), (128, 64, 4, 4)]
    tried = [ProductConfig(m, n_, block_k, warps, stages, False) for m, n_, warps, stages in blocks]
    tried += [replace(tried[0], group=16), replace(tried[2], group=16)]
    wide = [ProductConfig(128, 256, block_k, 8, stages, False) for stages in (3, 4)]
    wide += [ProductConfig(256, 128, block_k, 8, 3, False), ProductConfig(64, 256, block_k, 4, 3, False)]
    if segments == 1:
        return {f"{c}": (c, 1) for c in [*tried, *wide]}
    free = [tried[0], tried[2], *wide]
    return {f"{c}": (c, segments) for c in tried} | {f"free {c}": (c, 1) for c in free}


def _shape(model: str, name: str, n: int, k: int, rows: int) -> str:
    return f"{model} {name} {rows} x {k} -> {n}"


def _builds(n: int, k: int, rows: int, tried: dict[str, tuple[ProductConfig, int]]) -> dict[str, Callable[[], Built]]:
    return {name: partial(build, n, k, rows, config, segments) for name, (config, segments) in tried.items()}


def _cell(model: str, name: str, n: int, k: int, rows: int) -> Cell:
    if rows <= FEW[-1]:
        tried = few_row_candidates(n, k, rows) if rows in (8, 64) else {}
        op, bound = "product few", FEW_BOUND
    else:
        tried = many_row_candidates(n, k) if rows == 2048 and n >= 1024 else {}
        op, bound = "product many", PROMPT_BOUND if rows == 2048 and n >= 1024 else ""
    shape = _shape(model, name, n, k, rows)
    return Cell(op, shape, partial(build, n, k, rows, bound=bound), _builds(n, k, rows, tried))


def build_layer(shapes: Sequence[Shape], rows: int, is_early: bool | None = None) -> Built:
    """Every product of a layer, one after another, on its own input; ``is_early``: instead of the table's choice."""
    configs = [product_config(n, k, rows) for n, k in shapes]
    if is_early is not None:
        configs = [replace(config, is_early=is_early) for config in configs]
    parts = [build(n, k, rows, config) for (n, k), config in zip(shapes, configs, strict=True)]
    sets = min(len(part.runs) for part in parts)

    def in_turn(functions: Sequence[Callable[[], object]]) -> None:
        for function in functions:
            function()

    return Built(
        runs=[partial(in_turn, [part.runs[i] for part in parts]) for i in range(sets)],
        check=partial(in_turn, [part.check for part in parts]),
        bytes=sum(part.bytes for part in parts),
        flops=sum(part.flops for part in parts),
        baseline=[partial(in_turn, [part.baseline[i] for part in parts]) for i in range(sets)],
        bound=LAYER_BOUND,
    )


def cells() -> list[Cell]:
    found = []
    for model, (attention, dense, sparse) in MODELS.items():
        for name, (n, k) in (attention | dense | sparse).items():
            if (model, name) != ("small", "shared w2"):  # the shape of o
                found += [_cell(model, name, n, k, rows) for rows in FEW]
        for kind, others in (("dense", dense), ("sparse", sparse)):
            shapes = [*attention.values(), *others.values()]
            for rows in FEW:
                tried = {"early": partial(build_layer, shapes, rows, True)}
                shape = f"{model} {kind} {rows} rows"
                found.append(Cell("product layer", shape, partial(build_layer, shapes, rows), tried))
    for model, (attention, dense, sparse) in MODELS.items():
        for name, (n, k) in (attention | dense | sparse).items():
            if (model, name) != ("small", "shared w2"):
                found += [_cell(model, name, n, k, rows) for rows in MANY]
    return found

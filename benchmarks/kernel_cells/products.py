"""Products of Inkling-Small and mini: few rows beside cuBLAS, the products of a layer in a row, and prompts.

"product free" holds other sums of the same shapes, so that the price of row-exactness can be read beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from benchmarks.kernel_cells.cell import Built, Cell, rotating
from kernels.cuda.configs import ProductConfig, default_config, num_segments, product_config
from kernels.cuda.products import linear

Shape = tuple[int, int]  # N, K of a weight

ATTENTION_SMALL: dict[str, Shape] = {"qkvr": (6656, 4096), "o": (4096, 4096)}
DENSE_SMALL: dict[str, Shape] = {"dense w13": (32768, 4096), "dense w2": (4096, 16384)}
SPARSE_SMALL: dict[str, Shape] = {
    "router": (258, 4096),
    "shared w13": (8192, 4096),
    "shared w2": (4096, 4096),
}
ATTENTION_MINI: dict[str, Shape] = {"qkvr": (3328, 2048), "o": (2048, 2048)}
DENSE_MINI: dict[str, Shape] = {"dense w13": (16384, 2048), "dense w2": (2048, 8192)}
SPARSE_MINI: dict[str, Shape] = {"router": (130, 2048), "shared w13": (6144, 2048), "shared w2": (2048, 3072)}
MODELS = {
    "small": (ATTENTION_SMALL, DENSE_SMALL, SPARSE_SMALL),
    "mini": (ATTENTION_MINI, DENSE_MINI, SPARSE_MINI),
}
FEW = (1, 4, 8, 16, 32, 64)
MANY = (128, 256, 512, 1024, 2048, 4096)
_O = ProductConfig(64, 64, 128, 8, 4, True, is_early=True)
_PROMPT = ProductConfig(128, 128, 64, 8, 4, False, is_bulk=True)
_PROMPTS = tuple(
    (config, None)
    for config in (
        replace(_PROMPT, block_n=256, num_warps=16),
        replace(_PROMPT, block_m=64, num_warps=4),
    )
)
# (N, K, rows) near or below their bound: other launches, and other K segments where they are given.
TRIED: dict[tuple[int, int, int], tuple[tuple[ProductConfig, int | None], ...]] = {
    (3328, 2048, 64): (
        (ProductConfig(64, 32, 128, 4, 6, False, is_early=True, ahead=256), None),
        (ProductConfig(64, 64, 128, 4, 6, False, is_early=True, is_bulk=True), None),
        (ProductConfig(64, 32, 128, 4, 6, False, is_bulk=True), None),
    ),
    (2048, 2048, 64): (
        (replace(_O, num_warps=4, is_bulk=True), None),
        (_O, None),
        (replace(_O, block_k=256, num_stages=2, ahead=256), None),
    ),
    (2048, 2048, 2048): _PROMPTS,
    (2048, 3072, 2048): _PROMPTS,
    (2048, 8192, 2048): _PROMPTS,
}
# K segments that a product of one row count could take instead, if it need not have the bits of others.
FREE: dict[Shape, tuple[int, ...]] = {
    (6656, 4096): (2,),
    (4096, 4096): (1, 4),
    (4096, 16384): (2, 8),
    (8192, 4096): (2,),
    (258, 4096): (4, 16),
    (3328, 2048): (2, 4),
    (2048, 2048): (2, 8),
    (2048, 8192): (2, 8),
    (130, 2048): (4,),
    (6144, 2048): (2,),
    (2048, 3072): (2, 8),
}
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
    n: int, k: int, rows: int, config: ProductConfig | None = None, segments: int | None = None, bound: str = "",
    *, beside_table: bool = False,
) -> Built:  # fmt: skip
    """``beside_table``: the committed launch is the baseline, else cuBLAS."""
    weights = _weights(n, k)
    generator = torch.Generator("cuda").manual_seed(rows)
    sets = [
        (_random(rows, k, 1.0, generator), w, torch.empty(rows, n, dtype=output_type(n), device="cuda"))
        for w in weights
    ]
    plain = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")  # cuBLAS rounds the router's logits

    library = [partial(torch.mm, x, w.t(), out=plain) for x, w, _ in sets]
    table = [partial(linear, x, w, out) for x, w, out in sets]

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
        baseline=table if beside_table else library,
        bound=bound,
    )


def _label(config: ProductConfig, segments: int | None) -> str:
    return f"{config}" if segments is None else f"{config} S{segments}"


def free_launches(n: int, k: int, rows: int) -> list[tuple[ProductConfig, int]]:
    """Other sums: what a product that need not be row-exact could launch for this row count, and its K segments."""
    others = FREE.get((n, k), ()) if rows <= FEW[-1] else {1} - {num_segments(n, k)}
    return [(default_config(n, k, rows, segments), segments) for segments in others]


def _shape(model: str, name: str, n: int, k: int, rows: int) -> str:
    return f"{model} {name} {rows} x {k} -> {n}"


def _cell(model: str, name: str, n: int, k: int, rows: int) -> Cell:
    op = "product few" if rows <= FEW[-1] else "product many"
    bound = FEW_BOUND if rows <= FEW[-1] else PROMPT_BOUND if rows == 2048 and n >= 1024 else ""
    tried = {
        _label(config, segments): partial(build, n, k, rows, config, segments)
        for config, segments in TRIED.get((n, k, rows), ())
    }
    return Cell(op, _shape(model, name, n, k, rows), partial(build, n, k, rows, bound=bound), tried)


def _free_cells(model: str, name: str, n: int, k: int) -> list[Cell]:
    """Beside the committed launch: the ratio is what row-exactness costs."""
    found = []
    for rows in (8, 64, 2048):
        bound = "cost <= 1.05" if rows <= FEW[-1] else "cost <= 1.15"
        for config, segments in free_launches(n, k, rows):
            run = partial(build, n, k, rows, config, segments, bound, beside_table=True)
            label = _label(config, segments)
            found.append(Cell("product free", _shape(model, name, n, k, rows), run, configuration=label))
    return found


def build_layer(shapes: Sequence[Shape], rows: int, ahead: int | None = None) -> Built:
    """Every product of a layer, one after another, on its own input; ``ahead``: all launched early, asking for it."""
    configs = [product_config(n, k, rows) for n, k in shapes]
    if ahead is not None:
        configs = [replace(config, is_early=True, ahead=ahead) for config in configs]
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
        products = attention | dense | sparse
        if model == "small":
            del products["shared w2"]  # the shape of o
        for name, (n, k) in products.items():
            found += [_cell(model, name, n, k, rows) for rows in (*FEW, *MANY)]
            found += _free_cells(model, name, n, k)
        for kind, others in (("dense", dense), ("sparse", sparse)):
            shapes = [*attention.values(), *others.values()]
            for rows in FEW:
                early = {f"early{ahead}": partial(build_layer, shapes, rows, ahead) for ahead in (0, 256)}
                shape = f"{model} {kind} {rows} rows"
                tried = early if rows in (8, 64) else {}
                found.append(Cell("product layer", shape, partial(build_layer, shapes, rows), tried))
    return found

"""Cells of the routed experts (choice, grouping, products, sum) and of the head (stored logits, draw).

Up to half of the experts' number, every (row, slot) has an expert of its own and consecutive buffer sets share none;
more rows choose at random. The label states how many distinct experts one run reads on average.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_cells.cell import Built, Cell
from kernels.cuda.experts import combine_slots, down, gate_up
from kernels.cuda.head import Noise, allocate_drawn, head_draw, head_logits
from kernels.cuda.router import Groups, allocate_groups, choose_experts, group_pairs
from kernels.cuda.weight_tiles import TileConfig

VOCAB = 200058
CANDIDATES = [
    TileConfig(64, 64, 4, 4),
    TileConfig(64, 64, 4, 6),
    TileConfig(64, 128, 4, 3),
    TileConfig(64, 128, 4, 4),
    TileConfig(128, 64, 4, 4),
    TileConfig(128, 128, 8, 3),
    TileConfig(64, 64, 4, 6, tma=True),
    TileConfig(64, 128, 4, 4, tma=True),
    TileConfig(128, 64, 4, 4, tma=True),
]
HEAD_CANDIDATES = [
    *CANDIDATES,
    TileConfig(256, 64, 8, 3),
    TileConfig(64, 256, 4, 5),  # these fill a multiprocessor alone
    TileConfig(128, 128, 8, 6),
    TileConfig(128, 128, 8, 6, tma=True),
]


@dataclass(frozen=True)
class Model:
    name: str
    num_experts: int
    hidden: int
    width: int
    top_k: int = 6
    num_shared: int = 2


MODELS = (Model("Small", 256, 4096, 2048), Model("mini", 128, 2048, 1536))


def _name(config: TileConfig) -> str:
    tma = " tma" if config.tma else ""
    return f"{config.block_m}x{config.block_k} w{config.num_warps} s{config.num_stages}{tma}"


def _routings(model: Model, num_rows: int) -> list[Tensor]:
    """Expert ids int32 [T, k] of each buffer set."""
    generator = torch.Generator().manual_seed(num_rows)
    num_pairs, sets = num_rows * model.top_k, 8 if num_rows <= 16 else 2
    if 2 * num_pairs > model.num_experts:
        scores = [torch.rand(num_rows, model.num_experts, generator=generator) for _ in range(sets)]
        return [score.argsort(1)[:, : model.top_k].int() for score in scores]
    order = torch.randperm(model.num_experts, generator=generator).int()
    return [order.roll(-i * num_pairs)[:num_pairs].view(num_rows, model.top_k) for i in range(sets)]


@dataclass
class Set:
    """The buffers of one run."""

    x: Tensor  # [T, H]
    chosen: Tensor  # [T, k]
    gamma: Tensor  # [T, k+S]
    shared: Tensor  # [T, H]
    groups: Groups
    act: Tensor  # [T * k, f]
    slots: Tensor  # [T, k, H]
    out: Tensor  # [T, H]


def _random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(scale)


def _set(model: Model, chosen: Tensor) -> Set:
    rows, hidden = len(chosen), model.hidden
    groups = allocate_groups(rows, model.top_k, model.num_experts, "cuda")
    group_pairs(chosen.cuda(), model.num_experts, groups)
    act = _random(rows * model.top_k, model.width)
    slots, out = _random(rows, model.top_k, hidden), torch.full_like(_random(rows, hidden), float("nan"))
    gamma = torch.rand(rows, model.top_k + model.num_shared, device="cuda")
    return Set(_random(rows, hidden), chosen.cuda(), gamma, _random(rows, hidden), groups, act, slots, out)


def _weights(model: Model) -> tuple[Tensor, Tensor]:
    w13 = _random(model.num_experts, 2 * model.width, model.hidden, scale=model.hidden**-0.5)
    return w13, _random(model.num_experts, model.hidden, model.width, scale=model.width**-0.5)


def _close(actual: Tensor, expected: Tensor) -> None:
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < 1e-2, f"relative error {error:.2e}"  # NaN fails


def _expected_act(s: Set, w13: Tensor, pair: int) -> Tensor:
    row, slot = divmod(pair, s.chosen.shape[1])
    gate, up = (w13[s.chosen[row, slot]].float() @ s.x[row].float()).chunk(2)
    return F.silu(gate) * up


def _sampled_pairs(s: Set) -> range:
    num_pairs = s.chosen.numel()
    return range(0, num_pairs, max(1, num_pairs // 12))


def _product_cell(model: Model, num_rows: int, product: str) -> Cell:
    routings = _routings(model, num_rows)
    distinct = sum(len(c.unique()) for c in routings) / len(routings)
    matrix = (2 if product == "w13" else 1) * model.width * model.hidden
    columns = (
        model.top_k * model.width + (1 if product == "w13" else model.top_k) * model.hidden
    )  # read or written
    moved = int(2 * (distinct * matrix + num_rows * columns))

    def build(config: TileConfig | None = None) -> Built:
        w13, w2 = _weights(model)
        sets = [_set(model, chosen) for chosen in routings]

        def launch(s: Set) -> None:
            if product == "w13":
                gate_up(s.x, w13, s.chosen, s.groups, s.act, config)
            else:
                down(s.act, w2, s.chosen, s.groups, s.slots, config)

        def check() -> None:
            for s in sets[:2]:
                (s.act if product == "w13" else s.slots).fill_(float("nan"))
                launch(s)
                for pair in _sampled_pairs(s):
                    if product == "w13":
                        _close(s.act[pair], _expected_act(s, w13, pair))
                    else:
                        expert = s.chosen.flatten()[pair]
                        _close(s.slots.flatten(0, 1)[pair], w2[expert].float() @ s.act[pair].float())

        runs = [lambda s=s: launch(s) for s in sets]
        return Built(runs, check, moved, 2 * num_rows * model.top_k * matrix, None, _bound(num_rows))

    candidates = {_name(c): lambda c=c: build(c) for c in CANDIDATES} if num_rows in (1, 64) else {}
    shape = f"{model.name} {num_rows} rows, {distinct:.0f} of {model.num_experts} experts"
    return Cell(f"experts.{product}", shape, build, candidates)


def _bound(num_rows: int) -> str:
    if num_rows > 64:
        return ""
    return f">= {65 if num_rows <= 8 else 75} % of the read ceiling" if num_rows in (1, 2, 4, 8, 64) else ""


def _experts_cell(model: Model, num_rows: int) -> Cell:
    """Grouping, both products and the sum: what a layer launches after its choice."""
    routings = _routings(model, num_rows)
    distinct = sum(len(c.unique()) for c in routings) / len(routings)
    matrices = 3 * model.width * model.hidden
    moved = int(
        2 * (distinct * matrices + 3 * num_rows * model.hidden)
    )  # x, shared and out beside the weights

    def build(early: bool = False) -> Built:
        w13, w2 = _weights(model)
        sets = [_set(model, chosen) for chosen in routings]

        def launch(s: Set) -> None:
            group_pairs(s.chosen, model.num_experts, s.groups, early)
            gate_up(s.x, w13, s.chosen, s.groups, s.act, early=early)
            down(s.act, w2, s.chosen, s.groups, s.slots, early=early)
            combine_slots(s.slots, s.chosen, s.gamma, s.shared, s.out, early)

        def check() -> None:
            for s in sets[:2]:
                launch(s)
                for row in range(0, num_rows, max(1, num_rows // 4)):
                    pairs = range(row * model.top_k, (row + 1) * model.top_k)
                    experts = [w2[s.chosen.flatten()[p]].float() @ _expected_act(s, w13, p) for p in pairs]
                    total = sum(g * e for g, e in zip(s.gamma[row], experts, strict=False))
                    _close(s.out[row], total + s.shared[row].float())

        runs = [lambda s=s: launch(s) for s in sets]
        return Built(runs, check, moved, 2 * num_rows * model.top_k * matrices, None, _bound(num_rows))

    shape = f"{model.name} {num_rows} rows, {distinct:.0f} of {model.num_experts} experts"
    return Cell("experts", shape, build, {"early": lambda: build(True)} if num_rows <= 64 else {})


def _router_cell(model: Model, num_rows: int) -> Cell:
    """Choice and grouping: a few microseconds whatever they read."""
    width = model.num_experts + model.num_shared

    def build() -> Built:
        bias = torch.randn(model.num_experts, device="cuda") * 0.3
        slot = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
        logits = [torch.randn(num_rows, width, device="cuda") for _ in range(8)]
        chosen = torch.empty(num_rows, model.top_k, dtype=torch.int32, device="cuda")
        gamma = torch.empty(num_rows, model.top_k + model.num_shared, device="cuda")
        groups = allocate_groups(num_rows, model.top_k, model.num_experts, "cuda")

        def launch(value: Tensor) -> None:
            choose_experts(value, bias, slot, 8.0, chosen, gamma)
            group_pairs(chosen, model.num_experts, groups)

        def check() -> None:
            launch(logits[0])
            score = torch.sigmoid(logits[0][:, : model.num_experts]) + bias
            _close(score.gather(1, chosen.long()), score.topk(model.top_k).values)
            if not groups.is_direct:
                assert sorted(groups.order.tolist()) == list(range(num_rows * model.top_k))

        moved = 4 * num_rows * (width + 3 * model.top_k + model.num_shared)
        return Built([lambda v=v: launch(v) for v in logits], check, moved)

    return Cell("router", f"{model.name} {num_rows} rows", build)


def _head_cell(op: str, hidden: int, num_rows: int) -> Cell:
    """``op``: "head.logits", "head.argmax" or "head.draw" (with noise)."""

    def build(config: TileConfig | None = None) -> Built:
        heads = [_random(VOCAB, hidden, scale=hidden**-0.5) for _ in range(2)]  # each far over ROTATED_BYTES
        x = _random(num_rows, hidden)
        index = torch.arange(num_rows, dtype=torch.int32, device="cuda")
        logits = torch.empty(num_rows, VOCAB, device="cuda")
        drawn = allocate_drawn(num_rows, heads[0], config)
        seeds = torch.arange(num_rows, device="cuda")
        noise = (
            Noise(torch.full((num_rows,), 0.8, device="cuda"), seeds, seeds + 7)
            if op == "head.draw"
            else None
        )

        def launch(head: Tensor) -> None:
            if op == "head.logits":
                head_logits(x, index, head, 16.0, logits, config)
            else:
                head_draw(x, index, head, 16.0, noise, drawn, config)

        def check() -> None:
            for head in heads:
                launch(head)
                expected = (x @ head.T).float() / 16.0
                if op == "head.logits":
                    _close(logits, expected)
                    continue
                head_logits(x, index, head, 16.0, logits, config)
                _close(drawn.scores[:, 1], torch.logsumexp(expected, 1))
                assert torch.equal(drawn.scores[:, 0], logits.gather(1, drawn.tokens.long()[:, None])[:, 0])
                if noise is None:
                    assert torch.equal(drawn.scores[:, 0], logits.amax(1))

        stored = 4 * num_rows * (VOCAB if op == "head.logits" else 3)
        moved = 2 * hidden * (VOCAB + num_rows) + stored
        library = [lambda h=h: torch.argmax(x @ h.T, 1) for h in heads]
        if op == "head.logits":
            library = [lambda h=h: x @ h.T for h in heads]
        bound = ">= 85 % of the read ceiling" if num_rows <= 16 and op != "head.logits" else ""
        runs = [lambda h=h: launch(h) for h in heads]
        return Built(runs, check, moved, 2 * num_rows * VOCAB * hidden, library, bound)

    wanted: dict[str, Callable[[], Built]] = {}
    if op == "head.draw" and num_rows == 16:
        wanted = {_name(c): lambda c=c: build(c) for c in HEAD_CANDIDATES}
    return Cell(op, f"H {hidden}, V {VOCAB}, {num_rows} rows", build, wanted)


def cells() -> list[Cell]:
    """The bounds' shapes first."""
    found: list[Cell] = []
    for model in MODELS:
        found += [_experts_cell(model, rows) for rows in (1, 2, 4, 8, 16, 64, 256, 2048)]
        found += [_product_cell(model, rows, product) for product in ("w13", "w2") for rows in (1, 8, 64)]
        found += [_router_cell(model, rows) for rows in (1, 64, 2048)]
    for hidden in (4096, 2048):
        found += [_head_cell("head.draw", hidden, rows) for rows in (1, 8, 16, 64)]
        found += [_head_cell("head.argmax", hidden, rows) for rows in (1, 16)]
        found += [_head_cell("head.logits", hidden, rows) for rows in (1, 16, 64, 256)]
    return found

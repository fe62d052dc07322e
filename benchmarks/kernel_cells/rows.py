"""Norms, the short convolution, attention inputs and sampling: all bound by memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernel_cells.cell import Built, Cell, rotating
from kernels.cuda.attention_inputs import LayerGeometry, attention_inputs
from kernels.cuda.bank_order import bank_width, in_key_order
from kernels.cuda.norm import NormConfig, add_norm, dual_norm_cat, embed_norm, rms_norm
from kernels.cuda.rows_meta import Rows, make_rows
from kernels.cuda.sampling import sample
from kernels.cuda.short_conv import ConvConfig, short_conv_add_norm
from kernels.sampling import SamplingRows, sample_reference

EPS, CONV_PAGE, PAGE, KEEP_AFTER, VOCAB = 1e-6, 16, 64, 9, 200_058
NORM_BOUND = ">= 75 % of the read ceiling"
GEOMETRIES = {
    "full 32/8": LayerGeometry(32, 8, 128, 1024, None, EPS, 128e3, 0.1, KEEP_AFTER),
    "local 32/8": LayerGeometry(32, 8, 128, 512, 512, EPS, keep_after=KEEP_AFTER),
    "local 64/16": LayerGeometry(64, 16, 128, 512, 512, EPS, keep_after=KEEP_AFTER),
}


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def _exact(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS) * weight.double()


def _assert_close(found: Tensor, expected: Tensor) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < 4e-3, f"relative error {error:.2e}"


def _norm(op: str, t: int, width: int, config: NormConfig | None = None) -> Built:
    weight, other, table = _random(width), _random(width), _random(32768, width)
    reads, writes = {"rms_norm": (1, 1), "add_norm": (2, 2), "embed_norm": (1, 2), "dual_norm_cat": (2, 2)}[
        op
    ]
    moved = t * width * 2 * (reads + writes)

    def buffers() -> tuple[Tensor, ...]:
        ids = torch.randint(32768, (t,), dtype=torch.int32, device="cuda")
        return _random(t, width), _random(t, width), _random(t, width), _random(t, 2 * width), ids

    def run(x: Tensor, y: Tensor, out: Tensor, both: Tensor, ids: Tensor) -> None:
        if op == "rms_norm":
            rms_norm(x, weight, EPS, out, config)
        elif op == "add_norm":
            add_norm(x, y, weight, EPS, out, config)
        elif op == "embed_norm":
            embed_norm(ids, table, weight, EPS, x, other, out, config)
        else:
            dual_norm_cat(x, other, ids, table, weight, other, EPS, both, config)

    sets = rotating(buffers, moved)

    def check() -> None:
        x, _, out, both, ids = sets[0]
        run(*sets[0])
        if op == "dual_norm_cat":
            embedded = _exact(table[ids.long()], weight).bfloat16()
            _assert_close(both, torch.cat((_exact(x, other), _exact(embedded, other)), 1))
        else:
            _assert_close(out, _exact(x, other if op == "embed_norm" else weight))

    baseline = None
    if op == "rms_norm":
        baseline = [partial(torch.nn.functional.rms_norm, s[0], (width,), weight, EPS) for s in sets]
    return Built(
        [partial(run, *s) for s in sets], check, moved, baseline=baseline, bound=NORM_BOUND * (t == 4096)
    )


def _segments(t: int) -> tuple[list[tuple[int, int, int]], int]:
    """One prompt of more than 256 rows, otherwise single decodes at unrelated positions; and positions a slot."""
    if t > 256:
        return [(0, 512, t)], 512 + t
    return [(i, 600 + 37 * i % 400, 1) for i in range(t)], 1024


def _paged(t: int, page_size: int) -> tuple[Rows, Tensor, int]:
    """Rows, a page table int32 and the number of pages."""
    segments, positions = _segments(t)
    per_slot = -(-positions // page_size)
    order = torch.randperm(len(segments) * per_slot, device="cuda") + 1
    return make_rows(segments, "cuda"), order.view(len(segments), per_slot).int(), len(order) + 1


def _conv(t: int, width: int, has_norm: bool, config: ConvConfig | None = None) -> Built:
    rows, pages, num_pages = _paged(t, CONV_PAGE)
    taps, weight = _random(4, width), _random(width)
    decodes = t <= 256
    moved = (
        t * width * 2 * (3 + has_norm + 4 * decodes)
    )  # u, x, x, the norm; three older inputs and one written

    def buffers() -> tuple[Tensor, ...]:
        return _random(t, width), _random(t, width), _random(t, width), _random(num_pages * CONV_PAGE, width)

    def run(u: Tensor, x: Tensor, out: Tensor, cache: Tensor) -> None:
        normed = (weight, EPS, out) if has_norm else ()
        short_conv_add_norm(u, x, taps, cache, rows, pages, CONV_PAGE, KEEP_AFTER, *normed, config=config)

    sets = rotating(buffers, moved)

    def check() -> None:
        u, x, out, cache = sets[0]
        before, position = x.double(), rows.position.long()
        inputs = u.double()
        total = inputs * (1 + taps[3].double())
        for lag in (1, 2, 3):
            older = position - lag
            at = pages[rows.slot.long(), older // CONV_PAGE].long() * CONV_PAGE + older % CONV_PAGE
            index = (torch.arange(t, device="cuda") - lag).clamp(min=0)
            older = torch.where((rows.offset >= lag)[:, None], inputs[index], cache[at].double())
            total += older * taps[3 - lag].double()
        run(*sets[0])
        _assert_close(x, before + total)
        if has_norm:
            _assert_close(out, _exact(x, weight))

    return Built([partial(run, *s) for s in sets], check, moved, bound=NORM_BOUND * (has_norm and t == 4096))


def _inputs(t: int, name: str, run_rows: int | None = None, block_r: int | None = None) -> Built:
    g = GEOMETRIES[name]
    rows, conv_pages, num_conv = _paged(t, CONV_PAGE)
    _, pages, num_pages = _paged(t, PAGE)
    channels, decodes = 2 * g.num_kv * g.head_dim, t <= 256
    q_norm, k_norm, taps, rel = (
        _random(g.head_dim),
        _random(g.head_dim),
        _random(4, channels),
        _random(g.extent, 16),
    )
    kept = t if g.window is None else min(t, g.keep_keys)
    outputs = g.num_heads * (g.head_dim + g.extent)
    moved = 2 * (t * (g.row_width + outputs) + kept * channels + 4 * decodes * t * channels)

    def buffers() -> tuple[Tensor, ...]:
        cache = [_random(num_pages, g.num_kv, PAGE, g.head_dim) for _ in range(2)]
        conv = _random(num_conv * CONV_PAGE, channels)
        return (
            _random(t, g.row_width),
            conv,
            *cache,
            _random(t, g.num_heads, g.head_dim),
            _random(t, g.num_heads, bank_width(g.extent)),
        )

    def run(qkvr: Tensor, conv: Tensor, keys: Tensor, values: Tensor, q: Tensor, bank: Tensor) -> None:
        attention_inputs(
            qkvr, q_norm, k_norm, taps, rel, conv, keys, values, q, bank, rows, conv_pages, CONV_PAGE, pages, g,
            run=run_rows, block_r=block_r,
        )  # fmt: skip

    sets = rotating(buffers, moved)

    def check() -> None:
        run(*sets[0])
        qkvr, *_, q, bank = sets[0]
        r = qkvr[:, -g.num_heads * 16 :].double().view(t, g.num_heads, 16)
        _assert_close(bank[:64], in_key_order(r[:64] @ rel.double().t(), rows.position[:64]))
        _assert_close(q, _exact(qkvr[:, : g.num_heads * g.head_dim].view(q.shape), q_norm))

    return Built([partial(run, *s) for s in sets], check, moved)


def _sampling(t: int, how: str) -> Built:
    def buffers() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits = torch.randn(t, VOCAB, device="cuda") * 3
        return logits, torch.empty(t, dtype=torch.int64, device="cuda"), *torch.empty(2, t, device="cuda")

    def filled(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((t,), value, dtype=dtype, device="cuda")

    ranked = how == "top_k 50, top_p 0.9"
    seed, position = torch.arange(t, device="cuda") * 77, torch.arange(t, device="cuda") + 1000
    rows = SamplingRows(
        filled(1.0),
        filled(50 * ranked, torch.int32),
        filled(0.9 if ranked else 1.0),
        filled(0.0),
        seed,
        position,
    )
    sampled = None if how == "greedy" else rows
    sets = rotating(buffers, t * VOCAB * 4)

    def run(logits: Tensor, tokens: Tensor, row_max: Tensor, log_sum: Tensor) -> None:
        sample(logits, sampled, tokens, row_max, log_sum, ranked=ranked)

    def check() -> None:
        logits, tokens, row_max, log_sum = sets[0]
        run(*sets[0])
        on_cpu = SamplingRows(**{name: value.cpu() for name, value in vars(rows).items()})
        expected = logits.cpu().argmax(1) if sampled is None else sample_reference(logits.cpu(), on_cpu)
        assert torch.equal(tokens.cpu(), expected), (tokens.tolist(), expected.tolist())
        exact = torch.logsumexp(logits.double(), 1)
        assert ((row_max.double() + log_sum.double() - exact).abs() < 1e-5).all()

    return Built([partial(run, *s) for s in sets], check, t * VOCAB * 4 * (1 + (how != "greedy") + ranked))


# Tried beside the committed configuration, from 1024 rows on.
NORM_CANDIDATES = {("add_norm", 4096): (NormConfig(8, is_early=True),)}
_CONV = ConvConfig(8, 8, is_early=True, stages=4)
CONV_CANDIDATES = {
    4096: (
        replace(_CONV, rows=16),
        replace(_CONV, rows=4),
        replace(_CONV, num_warps=16, max_registers=64),
        ConvConfig(8, is_early=True),
    ),
    6144: (
        replace(_CONV, num_warps=32),
        replace(_CONV, num_warps=16, rows=16, stages=3),
        ConvConfig(8, is_early=True),
    ),
    2048: (
        _CONV,
        replace(_CONV, rows=16, max_registers=64),
        replace(_CONV, num_warps=4),
        ConvConfig(4, is_early=True),
    ),
}


def _named(config: NormConfig) -> str:
    registers = f" r{config.max_registers}" if config.max_registers else ""
    stages = f" s{config.stages}" if isinstance(config, ConvConfig) else ""
    return f"w{config.num_warps} {config.rows} rows{registers}{stages}{' early' * config.is_early}"


def _norm_cells() -> list[Cell]:
    cells = []
    for op in ("rms_norm", "add_norm", "embed_norm", "dual_norm_cat"):
        for width in (4096, 6144, 2048):
            for t in (64, 4096):
                others: dict[str, Callable[[], Built]] = {
                    _named(c): partial(_norm, op, t, width, c)
                    for c in NORM_CANDIDATES.get((op, width), ()) * (t == 4096)
                }
                cells.append(Cell(op, f"{t}x{width}", partial(_norm, op, t, width), others))
    return cells


def _conv_cells() -> list[Cell]:
    cells = []
    for width in (4096, 6144, 2048):
        for t, has_norm in ((1, True), (64, True), (4096, True), (4096, False)):
            others: dict[str, Callable[[], Built]] = {
                _named(c): partial(_conv, t, width, has_norm, c)
                for c in CONV_CANDIDATES[width] * (has_norm and t == 4096)
            }
            op = "short_conv_add_norm" if has_norm else "short_conv_add"
            cells.append(Cell(op, f"{t}x{width}", partial(_conv, t, width, has_norm), others, timeout_s=60))
    return cells


def cells() -> list[Cell]:
    inputs = [
        Cell(
            "attention_inputs", f"{t} rows, {name}", partial(_inputs, t, name)
        )
        for name in GEOMETRIES
        for t in (1, 64, 2048)
    ]  # fmt: skip
    draws = [
        Cell("sampling", f"{t}x{VOCAB} {how}", partial(_sampling, t, how))
        for how in ("greedy", "temperature 1", "top_k 50, top_p 0.9")
        for t in (1, 16, 64)
    ]
    return [*_norm_cells(), *_conv_cells(), *inputs, *draws]

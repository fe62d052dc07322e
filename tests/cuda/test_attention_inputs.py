"""q, k, v, the bank and the caches: the reference's bits, at every chunk border, in every batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from kernels.cuda.attention_inputs import LayerGeometry, attention_inputs
from kernels.cuda.bank_order import bank_width, in_key_order
from tests.cuda.step_rows import Segment, chunked, make_step, page_table

EPS, CONV_PAGE, PAGE, LENGTH, SLOTS, KEEP_AFTER = 1e-6, 4, 8, 48, 4, 2
SENTINEL = 77.0


def geometries(device: str) -> tuple[LayerGeometry, ...]:
    """tau starts at position 12 on full layers; the windows are shorter than a chunk."""
    tau = (EPS, 12.0, 0.1, KEEP_AFTER)
    if device == "cuda":
        return (
            LayerGeometry(32, 8, 128, 1024, None, *tau),
            LayerGeometry(64, 16, 128, 512, 16, EPS, keep_after=KEEP_AFTER),
            LayerGeometry(64, 8, 128, 1024, None, *tau),
            LayerGeometry(4, 1, 128, 512, 16, EPS, keep_after=KEEP_AFTER),
            LayerGeometry(8, 2, 32, 256, None, *tau),
        )
    return (
        LayerGeometry(4, 2, 32, 24, None, *tau),
        LayerGeometry(6, 3, 16, 7, 5, EPS, keep_after=KEEP_AFTER),
    )


@dataclass
class State:
    """Caches of one layer, sentinels in all but page 0."""

    conv: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, g: LayerGeometry, device: str) -> State:
        def filled(pages: int, *shape: int) -> Tensor:
            cache = torch.full((pages, *shape), SENTINEL, dtype=torch.bfloat16, device=device)
            cache[0] = 0
            return cache

        kv = [filled(SLOTS * LENGTH // PAGE + 1, g.num_kv, PAGE, g.head_dim) for _ in range(2)]
        conv = filled(SLOTS * LENGTH // CONV_PAGE + 1, CONV_PAGE, 2 * g.num_kv * g.head_dim)
        return cls(conv.flatten(0, 1), *kv)

    def clone(self) -> State:
        return State(self.conv.clone(), self.keys.clone(), self.values.clone())

    def equals(self, other: State) -> bool:
        return all(torch.equal(a, b) for a, b in zip(vars(self).values(), vars(other).values(), strict=True))


@cache
def weights(g: LayerGeometry, device: str) -> tuple[Tensor, ...]:
    """qkvr of every position [slots, LENGTH, row], q_norm, k_norm, taps, P transposed."""
    generator = torch.Generator().manual_seed(g.num_heads)
    shapes = ((SLOTS, LENGTH, g.row_width), (g.head_dim,), (g.head_dim,), (4, 2 * g.num_kv * g.head_dim))
    return tuple(
        torch.randn(shape, generator=generator).bfloat16().to(device) for shape in (*shapes, (g.extent, 16))
    )


def step_of(
    g: LayerGeometry,
    segments: list[Segment],
    state: State,
    device: str,
    padded: int = 0,
    run: int | None = None,
) -> dict[Segment, tuple[Tensor, ...]]:
    """(q, k, v, bank) by segment; writes ``state``."""
    qkvr, q_norm, k_norm, taps, rel = weights(g, device)
    step = make_step(segments, CONV_PAGE, device, SLOTS, LENGTH, padded)
    pages = page_table(SLOTS, LENGTH // PAGE, device, seed=3)
    poison = torch.full((padded, g.row_width), float("nan"), dtype=torch.bfloat16, device=device)
    x = torch.cat([*(qkvr[slot, first : first + n] for slot, first, n in segments), poison])

    def poisoned(*shape: int) -> Tensor:
        return torch.full((len(x), *shape), float("nan"), dtype=torch.bfloat16, device=device)

    q, bank = poisoned(g.num_heads, g.head_dim), poisoned(g.num_heads, bank_width(g.extent))
    k, v = poisoned(g.num_kv, g.head_dim), poisoned(g.num_kv, g.head_dim)
    attention_inputs(
        x, q_norm, k_norm, taps, rel, state.conv, state.keys, state.values, q, bank, step.rows, step.pages,
        CONV_PAGE, pages, g, (k, v), run=run,
    )  # fmt: skip
    outputs = (q, k, v, bank)
    assert not padded or all(t[-padded:].isnan().all() for t in outputs), "a padding row wrote"
    counts = [n for *_, n in segments] + [padded]
    return dict(zip(segments, zip(*(t.split(counts) for t in outputs), strict=True), strict=False))


def expected(g: LayerGeometry, slot: int, device: str) -> tuple[Tensor, ...]:
    """(q, k, v, bank) in float64 where the last rounding is left out, k and v rounded before the norm."""
    qkvr, q_norm, k_norm, taps, rel = (t.double() for t in weights(g, device))
    q, kv, r = qkvr[slot].split((g.num_heads * g.head_dim, 2 * g.num_kv * g.head_dim, g.num_heads * 16), 1)
    old = torch.cat((torch.zeros(3, kv.shape[1], dtype=kv.dtype, device=kv.device), kv)).float()
    total = old[:-3] * taps[0].float()
    for j in (1, 2, 3):
        total = total + old[j : LENGTH + j] * taps[j].float()
    k, v = (total + kv.float()).bfloat16().double().view(LENGTH, 2, g.num_kv, g.head_dim).unbind(1)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS) * weight

    tau = torch.ones(LENGTH, 1, 1, dtype=torch.float64, device=kv.device)
    if g.window is None:
        position = torch.arange(LENGTH, device=kv.device)
        tau[:, 0, 0] += g.log_alpha * torch.log(((position + 1) / g.log_floor).clamp(min=1))
    q = normed(q.view(LENGTH, g.num_heads, g.head_dim), q_norm).bfloat16().double() * tau
    bank = (r.view(LENGTH, g.num_heads, 16) @ rel.t()).bfloat16().double() * tau
    return q, normed(k, k_norm), v, in_key_order(bank, range(LENGTH))


def check_against_float64(device: str) -> None:
    """Half a bf16 unit after the last rounding, but for the few whose rounding before it fell to the other side."""
    length = LENGTH if device == "cuda" else 16
    for g in geometries(device):
        ((*found,),) = step_of(g, [(1, 0, length)], State.empty(g, device), device).values()
        for name, a, b in zip(("q", "k", "v", "bank"), found, expected(g, 1, device), strict=True):
            b = b[:length]
            error = (a.double() - b).abs()
            assert (error <= b.abs() * 2**-6 + (2**-6 if name == "bank" else 1e-6)).all(), (g, name)
            off = (error > b.abs() * (2**-8 + 2**-18) + 1e-6).float().mean().item()
            assert off < 0.01, (g, name, off)


def check_chunks_agree(device: str) -> None:
    length = 40 if device == "cuda" else 15
    for g in geometries(device):
        state = State.empty(g, device)
        ((*whole,),) = step_of(g, [(1, 0, length)], state, device).values()
        singles = range(1, length) if device == "cuda" else (3,)
        for borders in [
            *([b] for b in singles),
            [1, 2, 4, 9, 14],
            *([list(range(1, length))] * (device == "cuda")),
        ]:
            chunks_state, parts = State.empty(g, device), []
            for first, n in chunked(length, borders):
                parts += step_of(g, [(1, first, n)], chunks_state, device, padded=n % 2).values()
            assert all(
                torch.equal(torch.cat(c), w) for c, w in zip(zip(*parts, strict=True), whole, strict=True)
            )
            last = (
                state.keys != SENTINEL
            )  # the whole prompt keeps no key before its window; smaller chunks do
            assert torch.equal(chunks_state.keys[last], state.keys[last])
            assert torch.equal(chunks_state.values[last], state.values[last])


def check_batches_agree(device: str) -> None:
    segments = [(0, 0, 1), (1, 5, 4), (2, 1, 2), (3, 11, 3)]
    for g in geometries(device):
        before = State.empty(g, device)
        for slot, first, _ in segments[1:]:
            step_of(g, [(slot, 0, first)], before, device)
        alone, single = {}, before.clone()
        for segment in segments:
            alone |= step_of(g, [segment], single, device)
        for order, run in (((0, 1, 2, 3), None), ((3, 1, 0, 2), 4)):
            state, padded = before.clone(), 246 if device == "cuda" else 3
            found = step_of(g, [segments[i] for i in order], state, device, padded, run)
            assert state.equals(single)
            for segment, outputs in found.items():
                assert all(torch.equal(a, b) for a, b in zip(outputs, alone[segment], strict=True)), (
                    g,
                    segment,
                )


def test_inputs_agree_with_float64(device):
    check_against_float64(device)


def test_chunk_borders_change_no_bit(device):
    check_chunks_agree(device)


def test_the_batch_changes_no_bit(device):
    check_batches_agree(device)


@pytest.mark.parametrize("index", [0, 1])
def test_only_what_a_later_pass_reads_is_written(index, device):
    g = geometries(device)[index]
    state, first, count = State.empty(g, device), 3, 20
    ((_, k, v, _),) = step_of(g, [(2, first, count)], state, device).values()
    pages = page_table(SLOTS, LENGTH // PAGE, device, seed=3)
    kept = range(first, first + count)[-(g.window - 1 + KEEP_AFTER) if g.window else None :]
    written = State.empty(g, device)
    for position in kept:
        page, offset = int(pages[2, position // PAGE]), position % PAGE
        written.keys[page, :, offset] = k[position - first]
        written.values[page, :, offset] = v[position - first]
    assert torch.equal(state.keys, written.keys) and torch.equal(state.values, written.values)
    held = (state.conv != SENTINEL).any(1).nonzero().flatten().tolist()
    conv_pages = make_step([(2, first, count)], CONV_PAGE, device, SLOTS, LENGTH).pages
    positions = range(first + count - 3 - KEEP_AFTER, first + count)
    slots = [int(conv_pages[2, p // CONV_PAGE]) * CONV_PAGE + p % CONV_PAGE for p in positions]
    assert sorted([*range(CONV_PAGE), *slots]) == held


@pytest.mark.gpu
def test_caches_beyond_two_to_the_31_elements_are_addressed(device):
    g = geometries(device)[0]
    small, large = State.empty(g, device), State.empty(g, device)
    ((*expected_outputs,),) = step_of(g, [(0, 0, 1)], small, device).values()
    shape = (270_000, *large.keys.shape[1:])
    large.keys, large.values = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    pages = torch.full((SLOTS, LENGTH // PAGE), shape[0] - 1, dtype=torch.int32, device=device)
    qkvr, *others = weights(g, device)
    step = make_step([(0, 0, 1)], CONV_PAGE, device, SLOTS, LENGTH)
    q, bank = (torch.empty_like(expected_outputs[i]) for i in (0, 3))
    attention_inputs(
        qkvr[0, :1].contiguous(), *others, large.conv, large.keys, large.values, q, bank, step.rows, step.pages,
        CONV_PAGE, pages, g,
    )  # fmt: skip
    assert torch.equal(large.keys[-1, :, 0], expected_outputs[1][0])
    assert torch.equal(large.values[-1, :, 0], expected_outputs[2][0])
    assert torch.equal(q, expected_outputs[0]) and torch.equal(bank, expected_outputs[3])

"""q, k, v and the bias bank out of the fused product, and what is written to the caches."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kernels.attention_inputs import KeyWrites, attention_inputs_reference
from kernels.norm import rms_norm_reference
from kernels.rows import padded_rows
from kernels.short_conv import ConvRows, short_conv_reference
from tests.kernels.rounding import UNIT, assert_within, padded, random, rows_alike

EPS = 1e-6
PAGE = 4


@dataclass
class Layer:
    heads: int
    kv_heads: int
    d: int
    extent: int
    q_norm: Tensor = field(init=False)
    k_norm: Tensor = field(init=False)
    kv_taps: Tensor = field(init=False)  # [4, 2*n_kv*d]
    profile: Tensor = field(init=False)  # [R, 16]

    def __post_init__(self):
        self.q_norm = 1 + random(self.d, seed=1, scale=0.2)
        self.k_norm = 1 + random(self.d, seed=2, scale=0.2)
        self.kv_taps = random(4, 2 * self.kv_heads * self.d, seed=3, scale=0.5)
        self.profile = random(self.extent, 16, seed=4)

    @property
    def kv_width(self) -> int:
        return 2 * self.kv_heads * self.d

    @property
    def width(self) -> int:
        return self.heads * (self.d + 16) + self.kv_width

    def caches(self, pages: int) -> tuple[Tensor, Tensor, Tensor]:
        block = (pages, self.kv_heads, PAGE, self.d)
        return torch.zeros(1 + pages * PAGE, self.kv_width), torch.zeros(block), torch.zeros(block)

    def __call__(
        self, qkvr: Tensor, tau: Tensor | None, caches, conv: ConvRows, writes: KeyWrites, dtype=torch.float32
    ):
        weights = (self.q_norm, self.k_norm, self.kv_taps, torch.cat((self.profile, torch.zeros(2, 16))))
        q_norm, k_norm, _, rel_proj = (w.to(dtype) for w in weights)
        return attention_inputs_reference(
            qkvr, tau, q_norm, k_norm, self.kv_taps, rel_proj, *caches, conv, writes, EPS
        )


LAYERS = [Layer(4, 2, 16, 11), Layer(3, 1, 5, 1), Layer(6, 6, 8, 33)]


def key_writes(rows: Tensor, positions: Tensor, kv_heads: int) -> KeyWrites:
    """Position p in key page 1 + p // PAGE."""
    heads = torch.arange(kv_heads)
    places = ((1 + positions // PAGE)[:, None] * kv_heads + heads) * PAGE + (positions % PAGE)[:, None]
    return KeyWrites(rows, places.flatten())


def addresses(first: int, rows: int, kept: int, kv_heads: int) -> tuple[ConvRows, KeyWrites]:
    """One sequence at positions ``first`` on: conv slot 1 + p, key page 1 + p // PAGE; the last ``kept`` stay."""
    size = padded_rows(rows)
    taps = []
    for back in (3, 2, 1, 0):
        tap = torch.arange(size)
        for i in range(rows):
            tap[i] = i - back if i >= back else size + 3 + i - back
        taps.append(tap)
    history = torch.tensor([1 + p if p >= 0 else 0 for p in range(first - 3, first)])
    last = torch.arange(rows - kept, rows)
    conv = ConvRows(history, torch.cat(taps), torch.arange(rows), first + 1 + torch.arange(rows))
    return conv, key_writes(last, first + last, kv_heads)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight.double() * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


@dataclass
class Exact:
    """Of a whole sequence, fp64: q, k, v, the bank's first R columns, and bounds on the errors of the four."""

    q: Tensor
    k: Tensor
    v: Tensor
    bank: Tensor
    bounds: tuple[Tensor, Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, layer: Layer, qkvr: Tensor, tau: Tensor) -> Exact:
        rows, d, qkvr, tau = len(qkvr), layer.d, qkvr.double(), tau.double()[:, None, None]
        q, kv, r = qkvr.split((layer.heads * d, layer.kv_width, layer.heads * 16), dim=1)
        conv, size = kv.clone(), kv.abs()
        for j in range(4):
            term = layer.kv_taps[j].double() * kv[: rows - (3 - j)]
            conv[3 - j :] += term
            size[3 - j :] += term.abs()
        before, v = conv.view(rows, 2, layer.kv_heads, d).unbind(1)
        k_error, v_error = (6 * UNIT * size).view(rows, 2, layer.kv_heads, d).unbind(1)
        q, k = rms_norm(q.reshape(rows, layer.heads, d), layer.q_norm) * tau, rms_norm(before, layer.k_norm)
        r, profile = r.reshape(rows, layer.heads, 16), layer.profile.double().T
        norm = (d / 2 + 8) * UNIT
        rms = torch.sqrt((before * before).mean(-1, keepdim=True))
        # an error e of the norm's inputs moves its output by up to w * e / rms * (1 + |x| / rms)
        moved = layer.k_norm.abs() * k_error.amax(-1, keepdim=True) / rms * (1 + before.abs() / rms)
        bounds = (
            norm * q.abs(),
            norm * k.abs() + 1.01 * moved,
            v_error,
            18 * UNIT * (r.abs() @ profile.abs()) * tau,
        )
        return cls(q, k, v, r @ profile * tau, bounds)


@pytest.mark.parametrize(
    "layer", LAYERS, ids=lambda layer: f"{layer.heads}/{layer.kv_heads} heads of {layer.d}"
)
@pytest.mark.parametrize("with_tau", [False, True], ids=["no temperature", "temperature"])
def test_inputs_of_a_prompt_in_two_chunks_are_within_the_bound(layer: Layer, with_tau: bool) -> None:
    rows, cut = 27, 10
    qkvr = random(rows, layer.width, seed=5)
    tau = 1 + random(rows, seed=6, scale=0.1).abs() if with_tau else None
    caches = layer.caches(8)
    parts = []
    for first, end in ((0, cut), (cut, rows)):
        part = None if tau is None else padded(tau[first:end, None])[:, 0]
        out = layer(
            padded(qkvr[first:end]),
            part,
            caches,
            *addresses(first, end - first, min(6, end - first), layer.kv_heads),
        )
        parts.append([x[: end - first] for x in out])
    q, k, v, bank = (torch.cat(pair) for pair in zip(*parts, strict=True))
    exact = Exact.of(layer, qkvr, torch.ones(rows) if tau is None else tau)
    for ours, wanted, bound in zip(
        (q, k, v, bank[..., : layer.extent]),
        (exact.q, exact.k, exact.v, exact.bank),
        exact.bounds,
        strict=True,
    ):
        assert_within(ours, wanted, bound)
    assert (bank[..., layer.extent] == 0).all(), "beyond the extent there is no bias"
    assert (bank[..., layer.extent + 1] == -torch.inf).all(), "what is not visible has none of the weight"

    conv, keys, values = caches
    assert torch.equal(conv[1 : 1 + rows], qkvr[:, layer.heads * layer.d :][:, : layer.kv_width])
    kept = [*range(cut - 6, cut), *range(rows - 6, rows)]
    for position in range(8 * PAGE - PAGE):
        place = (1 + position // PAGE, slice(None), position % PAGE)
        if position in kept:
            assert torch.equal(keys[place], k[position]) and torch.equal(values[place], v[position])
        else:
            assert not keys[place].any() and not values[place].any()


@pytest.mark.parametrize(
    "layer", LAYERS, ids=lambda layer: f"{layer.heads}/{layer.kv_heads} heads of {layer.d}"
)
def test_rows_of_one_row_sequences_do_not_depend_on_the_others(layer: Layer) -> None:
    """Every row is a sequence of its own: taps read zeros."""

    def op(qkvr: Tensor, tau: Tensor) -> Tensor:
        rows = padded(qkvr)
        n, size = len(qkvr), len(rows)
        taps = torch.cat((torch.full((3 * size,), size), torch.arange(size)))
        conv = ConvRows(torch.zeros(3, dtype=torch.int64), taps, torch.arange(n), 1 + torch.arange(n))
        writes = key_writes(torch.arange(n), torch.arange(n), layer.kv_heads)
        out = layer(rows, padded(tau[:, None])[:, 0], layer.caches(13), conv, writes)
        return torch.cat([x[:n].flatten(1) for x in out], 1)

    assert rows_alike(op, random(45, layer.width, seed=7), 1 + random(45, seed=8).abs())


def test_bfloat16_keys_are_rounded_before_their_norm() -> None:
    layer = Layer(2, 1, 8, 5)
    qkvr = padded(random(8, layer.width, seed=9)).bfloat16()
    conv, writes = addresses(0, 8, 8, layer.kv_heads)
    caches = [cache.bfloat16() for cache in layer.caches(4)]
    _, k, v, _ = layer(qkvr, None, caches, conv, writes, dtype=torch.bfloat16)
    kv = qkvr[:, 16:32]
    convolved = short_conv_reference(kv, layer.kv_taps, torch.zeros(33, 16).bfloat16(), conv)
    wide = short_conv_reference(kv.float(), layer.kv_taps, torch.zeros(33, 16), conv)
    norm = layer.k_norm.bfloat16()
    assert torch.equal(v[:, 0], convolved[:, 8:])
    assert torch.equal(k[:, 0], rms_norm_reference(convolved[:, :8], norm, EPS))
    assert not torch.equal(k[:, 0], rms_norm_reference(wide[:, :8], norm, EPS).bfloat16())

"""Relative attention on CUDA: against float64, and the same row by every path.

On a GPU a row has the same bits by decode, verification and prompt at every tile and every split. The interpreter's
products are a CPU library's, whose bits depend on shapes: there a row agrees to one rounding of the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.cuda.relative_attention import (
    AttentionConfig,
    Heads,
    SegmentParts,
    decode_attention,
)
from kernels.cuda.relative_attention_prompt import prompt_attention, prompt_tiles

FULL = Heads(8, 2, 32, extent=48)
LOCAL = Heads(4, 1, 16, extent=70, window=70)
SHORT_BIAS = Heads(6, 2, 64, extent=9, window=150)  # three heads a KV head; a window longer than the bias
GPU_HEADS = [
    Heads(32, 8, 128, extent=1024),
    Heads(32, 8, 128, extent=512, window=512),
    Heads(4, 1, 128, extent=1024),
    Heads(64, 16, 128, extent=512, window=512),
    Heads(64, 8, 64, extent=1024),
    FULL,
    LOCAL,
    SHORT_BIAS,
]


def name(heads: Heads) -> str:
    return f"{heads.num_heads}-{heads.num_kv}x{heads.head_dim} R{heads.extent} W{heads.window}"


@dataclass
class Sequences:
    """Whole sequences and their caches; whatever no row may read is NaN."""

    heads: Heads
    lengths: list[int]
    q: list[Tensor]  # [length, n_q, d] bf16
    bank: list[Tensor]  # [length, n_q, R + 2] bf16
    keys: list[Tensor]  # [length, n_kv, d] bf16
    values: list[Tensor]
    key_cache: Tensor
    value_cache: Tensor
    page_table: Tensor

    @classmethod
    def draw(cls, heads: Heads, lengths: list[int], device: str, page: int = 64, seed: int = 0) -> Sequences:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(device, torch.bfloat16)

        d, counts = heads.head_dim, [-(-n // page) for n in lengths]
        order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
        shape = (sum(counts) + 1, heads.num_kv, page, d)
        caches = [torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device) for _ in range(2)]
        parts = {"q": [], "bank": [], "keys": [], "values": []}
        for slot, length in enumerate(lengths):
            parts["q"].append(random(length, heads.num_heads, d, scale=2.0 * d**0.5))
            bank = random(length, heads.num_heads, heads.extent + 2)
            bank[..., heads.extent :] = float("nan")
            parts["bank"].append(bank)
            for cache, kind in zip(caches, ("keys", "values"), strict=True):
                new = random(length, heads.num_kv, d)
                parts[kind].append(new)
                for i in range(counts[slot]):
                    table[slot, i] = order[sum(counts[:slot]) + i]
                    rows = new[i * page : (i + 1) * page]
                    cache[table[slot, i], :, : len(rows)] = rows.transpose(0, 1)
        return cls(heads, lengths, **parts, key_cache=caches[0], value_cache=caches[1], page_table=table.to(device))

    def rows(self, parts: list[Tensor], segments: list[tuple[int, int, int]]) -> Tensor:
        return torch.cat([parts[slot][first : first + count] for slot, first, count in segments])

    def records(self, segments: list[tuple[int, int, int]]) -> Tensor:
        """(slot, first position, rows) -> the kernels' records; one more that holds nothing."""
        out, row = [], 0
        for slot, first, count in segments:
            out.append((slot, row, first, count))
            row += count
        return torch.tensor([*out, (-1, 0, 0, 0)], dtype=torch.int32, device=self.page_table.device)

    def attend(self, segments: list[tuple[int, int, int]], path: str, **options: object) -> Tensor:
        """Rows of ``segments`` by "decode" or "prompt"; one padding row more, which has to stay NaN."""
        heads, records = self.heads, self.records(segments)
        q, bank = (self.rows(x, segments) for x in (self.q, self.bank))
        q, bank = (torch.cat((x, torch.full_like(x[:1], float("nan")))) for x in (q, bank))
        out = torch.full((len(q), heads.num_heads * heads.head_dim), float("nan"), dtype=q.dtype, device=q.device)
        if path == "decode":
            max_rows = max(count for _, _, count in segments)
            parts = SegmentParts.allocate(heads, len(records), max(self.lengths), max_rows, q.device)
            for part in (parts.m, parts.l, parts.a):
                part.fill_(float("nan"))
            caches = (self.key_cache, self.value_cache)
            decode_attention(heads, q, bank, *caches, self.page_table, records, parts, out, max_rows, **options)
        else:
            new = None
            if options.pop("from_pass", False):
                new = tuple(self.rows(x, segments) for x in (self.keys, self.values))
            columns = options.get("columns")
            tiles = torch.from_numpy(prompt_tiles(heads, records.cpu().numpy(), columns, padding=2)).to(q.device)
            caches = (self.key_cache, self.value_cache)
            prompt_attention(heads, q, bank, *caches, new, self.page_table, records, tiles, out, **options)
        assert out[-1].isnan().all(), "a padding row was written"
        return out[:-1]

    def exact(self, slot: int) -> tuple[Tensor, Tensor]:
        """float64 attention of every row of a sequence, and the bound of its error."""
        heads, length = self.heads, self.lengths[slot]
        q, keys, values = (x[slot].double().cpu() for x in (self.q, self.keys, self.values))
        keys, values = (x.repeat_interleave(heads.per_kv, 1) for x in (keys, values))
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (heads.window or length))
        at = distance.clamp(0, heads.extent)
        bank = self.bank[slot].double().cpu()
        bank[..., heads.extent :] = 0
        bias = bank.gather(2, at[:, None].expand(-1, heads.num_heads, -1)).transpose(0, 1)
        products = torch.einsum("thd,shd->hts", q, keys) / heads.head_dim
        scores = (products + bias).masked_fill(hidden, float("-inf"))
        weights = torch.softmax(scores, -1)
        out = torch.einsum("hts,shd->thd", weights, values)
        size = torch.einsum("hts,shd->thd", weights, values.abs())
        # weights and outputs are rounded to bf16 (2**-9 each); the rest is fp32: scores of up to 2**5 or so
        bound = 2.0**-8 * size + 2.0**-9 * out.abs() + 2.0**-14 * size + 1e-30
        return out.reshape(length, -1), bound.reshape(length, -1)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits on a GPU; within a rounding or two of bf16 in the interpreter."""
    if a.is_cuda:
        return torch.equal(a.view(torch.int16), b.view(torch.int16))
    return bool(((a.float() - b.float()).abs() <= 2.0**-7 * b.float().abs().clamp(min=0.05)).all())


def check_within_bound(sequences: Sequences, slot: int, got: Tensor, positions: range) -> None:
    wanted, bound = sequences.exact(slot)
    error = (got.double().cpu() - wanted[positions]).abs()
    assert (error <= bound[positions]).all(), f"error is {(error / bound[positions]).max():.2f} times its bound"


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("heads", [FULL, LOCAL, SHORT_BIAS], ids=name)
def test_prompts_are_within_the_bound_and_read_nothing_they_do_not_see(heads: Heads, page: int, device: str) -> None:
    sequences = Sequences.draw(heads, [200, 37], device, page)
    got = sequences.attend([(1, 0, 37), (0, 0, 200)], "prompt")
    check_within_bound(sequences, 1, got[:37], range(37))
    check_within_bound(sequences, 0, got[37:], range(200))


@pytest.mark.parametrize("heads", [FULL, LOCAL, SHORT_BIAS], ids=name)
def test_decodes_and_verifications_are_within_the_bound(heads: Heads, device: str) -> None:
    sequences = Sequences.draw(heads, [1100, 37, 520], device)
    got = sequences.attend([(0, 1098, 2), (2, 510, 9), (1, 0, 1)], "decode")
    check_within_bound(sequences, 0, got[:2], range(1098, 1100))
    check_within_bound(sequences, 2, got[2:11], range(510, 519))
    check_within_bound(sequences, 1, got[11:], range(1))


@pytest.mark.parametrize("heads", [FULL, LOCAL], ids=name)
def test_a_row_is_the_same_by_decode_verification_and_prompt(heads: Heads, device: str) -> None:
    sequences = Sequences.draw(heads, [600], device)
    prompt = sequences.attend([(0, 503, 40)], "prompt")
    for first, count in ((503, 9), (510, 3), (512, 1)):
        rows = sequences.attend([(0, first, count)], "decode")
        assert same(rows, prompt[first - 503 : first - 503 + count]), (first, count)


def test_programs_that_share_segments_change_nothing(device: str) -> None:
    sequences = Sequences.draw(FULL, [1700], device)
    one_each = sequences.attend([(0, 1690, 2)], "decode")
    for programs in (1, 3, 9):
        shared = sequences.attend([(0, 1690, 2)], "decode", programs=programs)
        assert torch.equal(shared, one_each), programs


def test_keys_of_the_pass_stand_in_for_the_cache(device: str) -> None:
    sequences = Sequences.draw(LOCAL, [260], device)
    wanted = sequences.attend([(0, 90, 170)], "prompt")
    held = sequences.page_table[0, : 90 // 64 + 1].tolist()
    for cache in (sequences.key_cache, sequences.value_cache):
        kept = cache[held[-1], :, : 90 % 64].clone()
        cache[[p for p in range(len(cache)) if p not in held[:-1]]] = float("nan")
        cache[held[-1], :, : 90 % 64] = kept
    assert torch.equal(sequences.attend([(0, 90, 170)], "prompt", from_pass=True), wanted)


def test_configurations_that_break_the_order_are_refused() -> None:
    with pytest.raises(ValueError, match="block_keys is 96"):
        AttentionConfig(block_keys=96)
    with pytest.raises(ValueError, match="head_dim is 48"):
        Heads(4, 2, 48, extent=8)
    with pytest.raises(ValueError, match="6 heads"):
        Heads(6, 4, 32, extent=8)

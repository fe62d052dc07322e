"""Relative attention on CUDA: against float64, and the same row by every path.

On a GPU a row has the same bits by decode, verification and prompt at every tile and every split. The interpreter's
products are a CPU library's, whose bits depend on shapes: there a row agrees to one rounding of the output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.cuda.bank_order import bank_width, in_key_order
from kernels.cuda.relative_attention import (
    AttentionConfig,
    Heads,
    Launch,
    SegmentParts,
    decode_attention,
)
from kernels.cuda.relative_attention_prompt import prompt_attention, prompt_tiles

FULL = Heads(8, 2, 32, extent=48)
LOCAL = Heads(4, 1, 16, extent=70, window=70)
SHORT_BIAS = Heads(6, 2, 64, extent=9, window=150)  # three heads a KV head; a window longer than the bias
SERVED = [
    Heads(32, 8, 128, extent=1024),
    Heads(64, 16, 128, extent=512, window=512),
    Heads(64, 8, 64, extent=1024),
    LOCAL,
    SHORT_BIAS,
]
SMALL = AttentionConfig(segment=128)  # more segments of less keys: the interpreter is slow
Segment = tuple[int, int, int]  # slot, first position, rows


def name(heads: Heads) -> str:
    return f"{heads.num_heads}-{heads.num_kv}x{heads.head_dim} R{heads.extent} W{heads.window}"


@dataclass
class Sequences:
    """Whole sequences and their caches; whatever no row may read is NaN."""

    heads: Heads
    lengths: list[int]
    q: list[Tensor]  # [length, n_q, d] bf16
    bank: list[Tensor]  # [length, n_q, R] bf16, by distance
    keys: list[Tensor]  # [length, n_kv, d] bf16
    values: list[Tensor]
    key_cache: Tensor
    value_cache: Tensor
    page_table: Tensor

    @classmethod
    def draw(
        cls, heads: Heads, lengths: list[int], device: str, page: int = 64, seed: int = 0, spare_pages: int = 0
    ) -> Sequences:
        generator, on_cpu = torch.Generator(device).manual_seed(seed), torch.Generator().manual_seed(seed)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator, device=device) * scale).bfloat16()

        d, counts = heads.head_dim, [-(-n // page) for n in lengths]
        order = (torch.randperm(sum(counts), generator=on_cpu) + 1 + spare_pages).tolist()
        table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
        shape = (spare_pages + sum(counts) + 1, heads.num_kv, page, d)
        caches = [torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device) for _ in range(2)]
        parts = {"q": [], "bank": [], "keys": [], "values": []}
        for slot, length in enumerate(lengths):
            parts["q"].append(random(length, heads.num_heads, d, scale=2.0 * d**0.5))
            parts["bank"].append(random(length, heads.num_heads, heads.extent))
            for cache, kind in zip(caches, ("keys", "values"), strict=True):
                new = random(length, heads.num_kv, d)
                parts[kind].append(new)
                for i in range(counts[slot]):
                    table[slot, i] = order[sum(counts[:slot]) + i]
                    rows = new[i * page : (i + 1) * page]
                    cache[table[slot, i], :, : len(rows)] = rows.transpose(0, 1)
        return cls(heads, lengths, **parts, key_cache=caches[0], value_cache=caches[1], page_table=table.to(device))

    def rows(self, parts: list[Tensor], segments: list[Segment]) -> Tensor:
        return torch.cat([parts[slot][first : first + count] for slot, first, count in segments])

    def banks(self, segments: list[Segment]) -> Tensor:
        positions = [p for _, first, count in segments for p in range(first, first + count)]
        return in_key_order(self.rows(self.bank, segments), positions)

    def records(self, segments: list[Segment], lead: int = 0) -> Tensor:
        """The kernels' records of ``segments``, from row ``lead`` on; one more that holds nothing."""
        out, row = [], lead
        for slot, first, count in segments:
            out.append((slot, row, first, count))
            row += count
        return torch.tensor([*out, (-1, 0, 0, 0)], dtype=torch.int32, device=self.page_table.device)

    def attend(
        self,
        segments: list[Segment],
        path: str,
        config: AttentionConfig | None = None,
        from_pass: bool = False,
        lead: int = 0,
        **options: int,
    ) -> Tensor:
        """Rows of ``segments`` by "decode" or "prompt", with padding rows around them that have to stay NaN."""
        heads, records, caches = self.heads, self.records(segments, lead), (self.key_cache, self.value_cache)
        padding = (0, 0, 0, 0, lead, 1)
        rows = (self.rows(self.q, segments), self.banks(segments))
        q, bank = (pad(x, padding, value=float("nan")) for x in rows)
        out = torch.full((len(q), heads.num_heads * heads.head_dim), float("nan"), dtype=q.dtype, device=q.device)
        if path == "decode":
            max_rows = max(count for _, _, count in segments)
            parts = SegmentParts.allocate(heads, len(records), max(self.lengths), max_rows, q.device, config)
            for part in (parts.m, parts.l, parts.a):
                part.fill_(float("nan"))
            decode_attention(
                heads, q, bank, *caches, self.page_table, records, parts, out, max_rows, config=config, **options
            )
        else:
            new = None
            if from_pass:
                new = tuple(pad(self.rows(x, segments), padding, value=float("nan")) for x in (self.keys, self.values))
            columns = options.get("columns", (config or heads.config).prompt_columns)
            tiles = prompt_tiles(heads, records.cpu().numpy(), columns, padding=2)
            tiles = torch.from_numpy(tiles).to(q.device)
            prompt_attention(
                heads, q, bank, *caches, new, self.page_table, records, tiles, out, config=config, **options
            )
        assert out[-1].isnan().all() and out[:lead].isnan().all(), "a padding row was written"
        return out[lead:-1]

    def exact(self, slot: int, positions: range) -> tuple[Tensor, Tensor]:
        """float64 attention of some rows of a sequence, and the bound of its error."""
        heads = self.heads
        q, bank = (x[slot][positions.start : positions.stop].double() for x in (self.q, self.bank))
        keys, values = (
            x[slot][: positions.stop].double().repeat_interleave(heads.per_kv, 1) for x in (self.keys, self.values)
        )
        distance = torch.arange(positions.start, positions.stop)[:, None] - torch.arange(positions.stop)
        distance = distance.to(q.device)
        hidden = (distance < 0) | (distance >= (heads.window or positions.stop))
        bank = pad(bank, (0, 1))
        at = distance.clamp(0, heads.extent)[:, None].expand(-1, heads.num_heads, -1)
        scores = torch.einsum("thd,shd->ths", q, keys) / heads.head_dim + bank.gather(2, at)
        weights = torch.softmax(scores.masked_fill(hidden[:, None], float("-inf")), -1)
        out = torch.einsum("ths,shd->thd", weights, values)
        size = torch.einsum("ths,shd->thd", weights, values.abs())
        # weights are rounded to bf16 in the values and in their sum, the output once (2**-9 each);
        # scores up to 2**5 are off by 2**-18 or so in fp32
        bound = 2.0**-8 * size + 2.0**-9 * out.abs() + 2.0**-16 * size
        return out.flatten(1), bound.flatten(1)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits on a GPU; within two roundings of bf16 in the interpreter."""
    if a.is_cuda:
        return torch.equal(a.view(torch.int16), b.view(torch.int16))
    return bool(((a.float() - b.float()).abs() <= 2.0**-7 * b.float().abs().clamp(min=0.05)).all())


def check_within_bound(sequences: Sequences, slot: int, got: Tensor, positions: range) -> None:
    wanted, bound = sequences.exact(slot, positions)
    error = (got.double() - wanted).abs()
    assert (error <= bound).all(), f"error is {(error / bound).max():.2f} times its bound"


@pytest.mark.parametrize("heads,page", [(FULL, 16), (FULL, 64), (LOCAL, 64), (SHORT_BIAS, 16)])
def test_prompts_are_within_the_bound_and_read_nothing_they_do_not_see(heads: Heads, page: int, device: str) -> None:
    sequences = Sequences.draw(heads, [200, 37], device, page)
    got = sequences.attend([(1, 0, 37), (0, 100, 100)], "prompt", SMALL)
    check_within_bound(sequences, 1, got[:37], range(37))
    check_within_bound(sequences, 0, got[37:], range(100, 200))


@pytest.mark.parametrize(
    "config",
    [replace(SMALL, block_keys=128), AttentionConfig(segment=64, block_keys=64)],
    ids=["one block of two pages", "one block of one page"],
)
@pytest.mark.parametrize("heads", [FULL, SHORT_BIAS], ids=name)
def test_segments_of_one_block_are_within_the_bound(heads: Heads, config: AttentionConfig, device: str) -> None:
    sequences = Sequences.draw(heads, [200], device)
    check_within_bound(sequences, 0, sequences.attend([(0, 110, 70)], "prompt", config), range(110, 180))
    check_within_bound(sequences, 0, sequences.attend([(0, 191, 2)], "decode", config), range(191, 193))


@pytest.mark.parametrize("heads", [FULL, LOCAL, SHORT_BIAS], ids=name)
def test_decodes_and_verifications_are_within_the_bound(heads: Heads, device: str) -> None:
    sequences = Sequences.draw(heads, [300, 37, 134], device)
    got = sequences.attend([(0, 298, 2), (2, 125, 9), (1, 0, 1)], "decode", SMALL)
    check_within_bound(sequences, 0, got[:2], range(298, 300))
    check_within_bound(sequences, 2, got[2:11], range(125, 134))
    check_within_bound(sequences, 1, got[11:], range(1))


@pytest.mark.parametrize("heads", [FULL, LOCAL], ids=name)
def test_a_row_is_the_same_by_decode_verification_and_prompt(heads: Heads, device: str) -> None:
    sequences = Sequences.draw(heads, [160], device)
    prompt = sequences.attend([(0, 119, 40)], "prompt", SMALL)
    for first, count in ((119, 9), (128, 1), (140, 17)):  # the last in two tiles
        rows = sequences.attend([(0, first, count)], "decode", SMALL)
        assert same(rows, prompt[first - 119 : first - 119 + count]), (first, count)


def test_launches_change_nothing(device: str) -> None:
    sequences = Sequences.draw(Heads(4, 2, 64, extent=48), [300], device)
    prompt, decode = [(0, 60, 240)], [(0, 296, 4)]
    wanted = sequences.attend(prompt, "prompt", SMALL)
    for launch in (Launch(True, 4, 2), Launch(False, 4, 2)):
        config = replace(SMALL, narrow=launch, wide=launch)
        assert same(sequences.attend(decode, "decode", config), wanted[-4:]), launch


def test_programs_that_share_segments_change_nothing(device: str) -> None:
    sequences = Sequences.draw(Heads(2, 1, 16, extent=100), [500], device)
    one_each = sequences.attend([(0, 490, 2)], "decode", SMALL)
    for programs in (1, 3, 9):
        shared = sequences.attend([(0, 490, 2)], "decode", SMALL, programs=programs)
        assert torch.equal(shared, one_each), programs


def test_keys_of_the_pass_stand_in_for_the_cache(device: str) -> None:
    sequences = Sequences.draw(LOCAL, [200], device)
    wanted = sequences.attend([(0, 90, 110)], "prompt", SMALL)
    held = sequences.page_table[0, : 90 // 64 + 1].tolist()
    for cache in (sequences.key_cache, sequences.value_cache):
        kept = cache[held[-1], :, : 90 % 64].clone()
        cache[[p for p in range(len(cache)) if p not in held[:-1]]] = float("nan")
        cache[held[-1], :, : 90 % 64] = kept
    assert torch.equal(sequences.attend([(0, 90, 110)], "prompt", SMALL, from_pass=True), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", SERVED, ids=name)
def test_no_bit_of_a_row_depends_on_its_path_tile_split_or_neighbours(heads: Heads, device: str) -> None:
    lengths = [1700, 1039, 512, 1]
    sequences = Sequences.draw(heads, lengths, device)
    whole = [(slot, 0, length) for slot, length in enumerate(lengths)]
    rows = sequences.attend(whole, "prompt").split(lengths)
    for slot, length in enumerate(lengths):
        check_within_bound(sequences, slot, rows[slot][-64:], range(max(0, length - 64), length))

    def check(segments: list[Segment], path: str, **options: object) -> None:
        wanted = torch.cat([rows[slot][first : first + count] for slot, first, count in segments])
        got = sequences.attend(segments, path, **options)
        differing = int((got.view(torch.int16) != wanted.view(torch.int16)).sum())
        assert not differing, f"{differing} of {got.numel()} bits' places differ: {path} {segments[:4]} {options}"

    from_pass = heads.window > 0  # as served
    check(whole[::-1], "prompt", from_pass=from_pass)
    is_served = heads.head_dim == 128
    for columns in (64, 128) if is_served else (heads.config.prompt_columns,):
        for cuts in ((0, 1, 64, 65, 511, 512, 513, 1023, 1025, 1700), (0, 777, 1699, 1700)):
            chunks = [(0, a, b - a) for a, b in pairwise(cuts)]
            check(chunks, "prompt", columns=columns)
            for chunk in chunks:
                check([chunk, (1, 1000, 39)], "prompt", columns=columns, from_pass=from_pass)
    for count in range(1, 11):
        firsts = (0, 60, 505, 512, 1020, 1024, 1700 - count)
        check([(0, first, count) for first in firsts] + [(1, 1029, 1), (3, 0, 1), (2, 500, count)], "decode")
        check([(0, 1600, count)], "decode", programs=1)
        check([(0, 1600, count)], "decode", programs=3)
    check([(0, p, 1) for p in range(0, 1700, 13)], "decode")
    if heads is SERVED[0]:
        wide = replace(heads.config, narrow=Launch(False, 4, 2))
        check([(0, p, 1) for p in range(0, 1700, 13)], "decode", config=wide)
        launch = Launch(True, 8, 2)
        check([(0, 1300, 4), (1, 514, 2)], "decode", config=replace(heads.config, narrow=launch))
        for launch in (Launch(True, 4, 2), Launch(False, 4, 2), Launch(False, 8, 3)):
            config = replace(heads.config, narrow=launch, wide=launch)
            check([(0, 1300, 4), (1, 514, 2), (0, 700, 9)], "decode", config=config)
        check(whole, "prompt", config=replace(heads.config, prompt=Launch(False, 4, 2), prompt_columns=64))


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31(device: str) -> None:
    heads = SERVED[0]
    near, far = Sequences.draw(heads, [600], device), Sequences.draw(heads, [600], device, spare_pages=33_000)
    assert far.key_cache.numel() > 2**31
    lead = 2**31 // (heads.num_heads * bank_width(heads.extent)) + 1
    for path, segment in (("decode", (0, 590, 5)), ("prompt", (0, 300, 300))):
        wanted = near.attend([segment], path)
        assert torch.equal(far.attend([segment], path), wanted), path
        assert torch.equal(near.attend([segment], path, lead=lead), wanted), path


@pytest.mark.gpu
def test_replays_of_a_captured_decode_follow_the_segments(device: str) -> None:
    heads = SERVED[0]
    sequences = Sequences.draw(heads, [1200], device)
    first = [(0, 1100, 4)]
    q, bank = sequences.rows(sequences.q, first), sequences.banks(first)
    records, out = sequences.records(first), torch.empty(4, 32 * 128, dtype=torch.bfloat16, device=device)
    parts = SegmentParts.allocate(heads, len(records), 1200, 4, device)

    def step() -> None:
        caches = (sequences.key_cache, sequences.value_cache)
        decode_attention(heads, q, bank, *caches, sequences.page_table, records, parts, out, 4)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for segment in ((0, 1100, 4), (0, 3, 4), (0, 1020, 2)):
        records.copy_(sequences.records([segment]))
        rows = sequences.rows(sequences.q, [segment])
        q[: len(rows)], bank[: len(rows)] = rows, sequences.banks([segment])
        graph.replay()
        assert torch.equal(out[: len(rows)], sequences.attend([segment], "decode")), segment


def test_configurations_that_break_the_order_are_refused() -> None:
    with pytest.raises(ValueError, match="block_keys is 96"):
        AttentionConfig(block_keys=96)
    with pytest.raises(ValueError, match="num_stages is 1"):
        Launch(True, 4, 1)
    with pytest.raises(ValueError, match="head_dim is 48"):
        Heads(4, 2, 48, extent=8)
    with pytest.raises(ValueError, match="6 heads"):
        Heads(6, 4, 32, extent=8)


def check_exactness(device: str = "cuda") -> None:
    """Everything that a GPU has to prove, without pytest."""
    for heads in SERVED:
        test_no_bit_of_a_row_depends_on_its_path_tile_split_or_neighbours(heads, device)
    test_offsets_beyond_two_to_the_31(device)
    test_replays_of_a_captured_decode_follow_the_segments(device)

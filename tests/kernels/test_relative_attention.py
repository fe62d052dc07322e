"""Attention with a bias by distance over pages: the formula, and bits that no tile, block or page order changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from torch import Tensor

from kernels.relative_attention import AttentionRows, QueryTiles, relative_attention_reference
from kernels.rows import padded_rows, row_quantum
from tests.kernels.rounding import UNIT, assert_within, random

PAGE = 16
LENGTH = 70  # positions of the sequence: four pages and a part
NUM_PAGES = 12


@dataclass
class Sequence:
    """One sequence whose row t stands at position t; its keys lie on shuffled pages, others hold garbage."""

    heads: int
    kv_heads: int
    d: int
    window: int | None
    extent: int

    def __post_init__(self):
        self.q = random(LENGTH, self.heads, self.d, seed=1, scale=2.0)
        self.k = random(LENGTH, self.kv_heads, self.d, seed=2, scale=2.0)
        self.v = random(LENGTH, self.kv_heads, self.d, seed=3)
        self.bank = random(LENGTH, self.heads, self.extent + 2, seed=4)
        self.bank[..., -2], self.bank[..., -1] = 0.0, -torch.inf
        self.pages = Random(5).sample(range(1, NUM_PAGES), -(-LENGTH // PAGE))
        self.keys = random(NUM_PAGES, self.kv_heads, PAGE, self.d, seed=6, scale=50.0)
        self.values = random(NUM_PAGES, self.kv_heads, PAGE, self.d, seed=7, scale=50.0)
        self.keys[0] = self.values[0] = 0.0
        for p in range(LENGTH):
            self.keys[self.pages[p // PAGE], :, p % PAGE] = self.k[p]
            self.values[self.pages[p // PAGE], :, p % PAGE] = self.v[p]

    @property
    def step(self) -> int:
        """The smallest tile height whose rows fill the quantum of a product."""
        per_kv, size = self.heads // self.kv_heads, 1
        while size * per_kv % row_quantum():
            size += 1
        return size

    def tiles(
        self, groups: list[list[list[int]]], size: int, before: int = 0, after: int = 0
    ) -> AttentionRows:
        """Groups of tiles of up to ``size`` positions; ``before``, ``after``: more blocks that no row sees."""
        made, output, base = [], {}, 0
        for group in groups:
            first = [0 if self.window is None else max(0, t[0] - self.window + 1) // PAGE for t in group]
            count = max(t[-1] // PAGE + 1 - f for t, f in zip(group, first, strict=True))
            rows = torch.tensor([t + [t[-1]] * (size - len(t)) for t in group])  # [n, Q]
            blocks = torch.tensor(first)[:, None] - before + torch.arange(before + count + after)
            positions = (blocks[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)  # [n, keys]
            distance = rows[:, :, None] - positions[:, None]
            seen = (distance >= 0) & (positions >= 0)[:, None]
            if self.window is not None:
                seen &= distance < self.window
            index = torch.where(seen, distance.clamp(max=self.extent), self.extent + 1)
            known = (blocks >= 0) & (blocks < len(self.pages))
            page = torch.tensor(self.pages)[blocks.clamp(0, len(self.pages) - 1)]
            page[~known] = 0
            made.append(QueryTiles(rows.flatten(), page.flatten(), index, None, None, None))
            for number, tile in enumerate(group):
                output |= {t: base + number * size + i for i, t in enumerate(tile)}
            base += rows.numel()
        self.order = list(output)
        return AttentionRows(made, torch.tensor(list(output.values())))

    def attend(self, rows: AttentionRows) -> Tensor:
        """Outputs in the order of the tiles, [rows, n_q * d]."""
        return relative_attention_reference(self.q, self.k, self.v, self.bank, self.keys, self.values, rows)

    def whole(self) -> Tensor:
        """Every row, in ascending tiles."""
        size = 4 * self.step
        tiles = [list(range(t, min(t + size, LENGTH))) for t in range(0, LENGTH, size)]
        return self.attend(self.tiles([tiles], size))

    def exact(self) -> tuple[Tensor, Tensor]:
        """The formula and a bound on fp32's error, fp64 [T, n_q * d]."""
        per_kv = self.heads // self.kv_heads
        k, v = (x.double().repeat_interleave(per_kv, dim=1) for x in (self.k, self.v))
        q, distance = self.q.double(), torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        scores = torch.einsum("thd,shd->hts", q, k) / self.d
        size = torch.einsum("thd,shd->hts", q.abs(), k.abs()) / self.d
        bias = self.bank.double().transpose(0, 1)  # [h, T, R + 2]
        column = distance.clamp(0, self.extent)
        bias = bias.gather(2, column.expand(self.heads, LENGTH, LENGTH))
        seen = distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)
        scores = (scores + bias).masked_fill(~seen, -torch.inf)
        weights = torch.softmax(scores, -1)
        out = torch.einsum("hts,shd->thd", weights, v).flatten(1)
        spread = torch.einsum("hts,shd->thd", weights, v.abs()).flatten(1)
        error = ((self.d + 2) * UNIT * size + 2 * UNIT * (size + bias.abs())).masked_fill(~seen, 0).amax(-1)
        # a score's error moves weight and total; then exp, PAGE and block sums, the division
        reach = scores.masked_fill(~seen, torch.inf).amin(-1) - scores.amax(-1)
        relative = 2.2 * error + UNIT * (PAGE + 8 + LENGTH / PAGE + 12 + reach.abs())
        return out, spread * relative.T.repeat_interleave(self.d, dim=1)


WINDOWS = [(None, 1), (None, 9), (None, 100), (1, 1), (5, 5), (16, 16), (17, 17), (33, 7)]
HEADS = [(4, 2, 16), (3, 1, 20), (6, 6, 12)]


@pytest.fixture(params=HEADS, ids=lambda h: f"{h[0]} heads on {h[1]} of {h[2]}")
def heads(request: pytest.FixtureRequest) -> tuple[int, int, int]:
    return request.param


@pytest.mark.parametrize(("window", "extent"), WINDOWS)
def test_attention_is_within_the_bound(heads: tuple[int, int, int], window: int | None, extent: int) -> None:
    sequence = Sequence(*heads, window, extent)
    exact, bound = sequence.exact()
    assert_within(sequence.whole(), exact, bound)


@pytest.mark.parametrize(("window", "extent"), WINDOWS)
def test_tiles_and_groups_change_no_bit(heads: tuple[int, int, int], window: int | None, extent: int) -> None:
    sequence = Sequence(*heads, window, extent)
    whole, step, shuffle = sequence.whole(), sequence.step, Random(6)
    for size in (step, 2 * step, 3 * step, 8 * step):
        tiles, t = [], 0
        while t < LENGTH:  # tiles of any number of rows up to the height
            rows = shuffle.randint(1, min(size, LENGTH - t))
            tiles.append(list(range(t, t + rows)))
            t += rows
        shuffle.shuffle(tiles)
        cut = shuffle.randrange(1, len(tiles))
        for groups in ([tiles], [tiles[:cut], tiles[cut:]], [[tile] for tile in tiles]):
            out = sequence.attend(sequence.tiles(groups, size))
            assert torch.equal(out, whole[sequence.order]), size


@pytest.mark.parametrize(("window", "extent"), WINDOWS)
def test_blocks_that_no_row_sees_change_no_bit(
    heads: tuple[int, int, int], window: int | None, extent: int
) -> None:
    sequence = Sequence(*heads, window, extent)
    whole, size = sequence.whole(), 2 * sequence.step
    tiles = [list(range(t, min(t + size, LENGTH))) for t in range(0, LENGTH, size)]
    sequence.keys[0] = sequence.values[0] = 1e4  # what stands for positions outside may be any number
    for before, after in ((0, 1), (1, 0), (2, 3)):
        out = sequence.attend(sequence.tiles([tiles], size, before, after))
        assert torch.equal(out, whole), (before, after)


def test_keys_behind_the_row_and_beyond_the_window_change_no_bit(heads: tuple[int, int, int]) -> None:
    sequence = Sequence(*heads, 17, 17)
    tile = [list(range(40, 40 + sequence.step))]
    before = sequence.attend(sequence.tiles([tile], sequence.step))
    last = 40 + sequence.step - 1
    for p in [*range(24), *range(last + 1, LENGTH)]:
        sequence.keys[sequence.pages[p // PAGE], :, p % PAGE] = 77.0
        sequence.values[sequence.pages[p // PAGE], :, p % PAGE] = -77.0
    assert torch.equal(sequence.attend(sequence.tiles([tile], sequence.step)), before)
    sequence.values[sequence.pages[24 // PAGE], :, 24 % PAGE] = 1e3  # the oldest that the first row sees
    assert not torch.equal(sequence.attend(sequence.tiles([tile], sequence.step)), before)


def test_keys_of_the_pass_stand_in_for_the_cache(heads: tuple[int, int, int]) -> None:
    sequence = Sequence(*heads, 17, 17)
    whole, size = sequence.whole(), 4 * sequence.step
    tiles = [list(range(t, min(t + size, LENGTH))) for t in range(0, LENGTH, size)]
    rows = sequence.tiles([tiles], size)
    (group,) = rows.groups
    missing = range(20, 50)  # in no page
    for p in missing:
        sequence.keys[sequence.pages[p // PAGE], :, p % PAGE] = 55.0
        sequence.values[sequence.pages[p // PAGE], :, p % PAGE] = 55.0
    fills = [
        (p, index, p % PAGE)
        for index, page in enumerate(group.pages.tolist())
        for p in missing
        if page == sequence.pages[p // PAGE]
    ]
    fill_rows, fill_blocks, fill_offsets = (torch.tensor(column) for column in zip(*fills, strict=True))
    filled = replace(group, fill_rows=fill_rows, fill_blocks=fill_blocks, fill_offsets=fill_offsets)
    assert torch.equal(sequence.attend(AttentionRows([filled], rows.output_rows)), whole)
    assert not torch.equal(sequence.attend(rows), whole)


@pytest.mark.parametrize(("window", "extent"), [(None, 9), (17, 17)])
def test_rows_do_not_depend_on_the_others(
    heads: tuple[int, int, int], window: int | None, extent: int
) -> None:
    """1 to 40 rows at unrelated positions, a tile each."""
    sequence = Sequence(*heads, window, extent)
    whole = sequence.whole()
    for n in range(1, 41):
        tiles = [[t] for t in Random(n).sample(range(LENGTH), n)]
        out = sequence.attend(sequence.tiles([tiles], sequence.step))
        assert torch.equal(out, whole[sequence.order])


def test_output_rows_may_repeat_for_padding() -> None:
    sequence = Sequence(4, 2, 16, None, 9)
    rows = sequence.tiles([[[5, 6, 7]]], 2 * sequence.step)
    padding = rows.output_rows.new_zeros(padded_rows(3) - 3)
    padded = AttentionRows(rows.groups, torch.cat((rows.output_rows, padding)))
    out = sequence.attend(padded)
    assert out.shape == (padded_rows(3), 64) and torch.equal(out[:3], sequence.whole()[5:8])

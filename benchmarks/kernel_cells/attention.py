"""Relative attention: decodes and verification over long contexts, prompts; beside torch's attention without a bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernel_cells.cell import Built, Cell, rotating
from kernels.cuda.bank_order import bank_width, in_key_order
from kernels.cuda.relative_attention import AttentionConfig, Heads, Launch, SegmentParts, decode_attention
from kernels.cuda.relative_attention_prompt import prompt_attention, prompt_tiles

PAGE = 64  # positions
SMALL_FULL, SMALL_LOCAL = Heads(32, 8, 128, extent=1024), Heads(32, 8, 128, extent=512, window=512)
LARGE_FULL, SHARD_FULL = Heads(64, 8, 128, extent=1024), Heads(4, 1, 128, extent=1024)
MINI_FULL = Heads(16, 4, 128, extent=1024)


@dataclass
class Inputs:
    """``sequences`` of ``keys`` cached positions each, of which the last ``rows`` are attended."""

    heads: Heads
    sequences: int
    keys: int
    rows: int
    q: Tensor
    bank: Tensor  # in key order
    key_cache: Tensor
    value_cache: Tensor
    page_table: Tensor
    segments: Tensor
    out: Tensor

    @classmethod
    def draw(cls, heads: Heads, sequences: int, keys: int, rows: int) -> Inputs:
        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_().mul_(scale)

        pages, total, d = -(-keys // PAGE), sequences * rows, heads.head_dim
        table = torch.randperm(sequences * pages, device="cuda").add_(1).int().view(sequences, pages)
        cache = (sequences * pages + 1, heads.num_kv, PAGE, d)
        records = [(slot, slot * rows, keys - rows, rows) for slot in range(sequences)]
        bank = random(total, heads.num_heads, bank_width(heads.extent))
        ones = torch.ones(rows, 1, heads.extent, dtype=torch.bfloat16, device="cuda")
        bank *= in_key_order(ones, range(keys - rows, keys)).repeat(sequences, 1, 1)
        return cls(
            heads, sequences, keys, rows, random(total, heads.num_heads, d, scale=d**0.5),
            bank, random(*cache), random(*cache), table,
            torch.tensor(records, dtype=torch.int32, device="cuda"),
            torch.empty(total, heads.num_heads * d, dtype=torch.bfloat16, device="cuda"),
        )  # fmt: skip

    @property
    def visible(self) -> int:
        """(row, key) pairs of one sequence."""
        window = self.heads.window or self.keys
        return sum(min(t + 1, window) for t in range(self.keys - self.rows, self.keys))

    @property
    def bytes(self) -> int:
        heads, total = self.heads, self.sequences * self.rows
        kept = min(self.keys, heads.window + self.rows - 1 if heads.window else self.keys)
        cached = 2 * self.sequences * kept * heads.num_kv * heads.head_dim
        bank = total * heads.num_heads * min(heads.extent, self.keys)
        return 2 * (cached + bank + 2 * total * heads.num_heads * heads.head_dim)

    @property
    def flops(self) -> int:
        return 4 * self.sequences * self.visible * self.heads.num_heads * self.heads.head_dim

    def decode(
        self, parts: SegmentParts, config: AttentionConfig | None, programs: int | None = None
    ) -> Tensor:
        return decode_attention(
            self.heads, self.q, self.bank, self.key_cache, self.value_cache, self.page_table, self.segments, parts,
            self.out, self.rows, programs, config,
        )  # fmt: skip

    def prompt(self, tiles: Tensor, columns: int, config: AttentionConfig | None) -> Tensor:
        return prompt_attention(
            self.heads, self.q, self.bank, self.key_cache, self.value_cache, None, self.page_table, self.segments,
            tiles, self.out, columns, config,
        )  # fmt: skip

    def tiles(self, columns: int) -> Tensor:
        return torch.from_numpy(prompt_tiles(self.heads, self.segments.cpu().numpy(), columns)).cuda()

    def parts(self, config: AttentionConfig | None = None) -> SegmentParts:
        return SegmentParts.allocate(self.heads, self.sequences, self.keys, self.rows, "cuda", config)

    def gathered(self, slot: int) -> tuple[Tensor, Tensor]:
        """Keys and values [n_kv, keys, d] of one sequence."""
        pages = self.page_table[slot].long()
        caches = (self.key_cache, self.value_cache)
        return tuple(c[pages].transpose(0, 1).flatten(1, 2)[:, : self.keys] for c in caches)

    def check(self, run: Callable[[], Tensor], other: Callable[[], Tensor]) -> None:
        """float64 for the last row of the first and last sequence; all bits beside the other path."""
        self.out.fill_(float("nan"))
        got = run().clone()
        heads, distance = self.heads, torch.arange(self.keys - 1, -1, -1, device="cuda")
        for slot in {0, self.sequences - 1}:
            row = (slot + 1) * self.rows - 1
            keys, values = (x.double().repeat_interleave(heads.per_kv, 0) for x in self.gathered(slot))
            scores = (keys @ self.q[row].double()[..., None])[..., 0] / heads.head_dim
            # the row's last key is its own: its bias lies where distance 0 lies
            by_distance = torch.arange(heads.extent, device="cuda").bfloat16()[None, None].expand(1, 1, -1)
            own = int((in_key_order(by_distance + 1, [self.keys - 1])[0, 0] == 1).nonzero()[0])
            seen = min(heads.extent, self.keys)
            scores[:, self.keys - seen :] += self.bank[row, :, own - seen + 1 : own + 1].double()
            if heads.window:
                scores.masked_fill_(distance >= heads.window, float("-inf"))
            weights = torch.softmax(scores, -1)[:, None]
            wanted, size = (weights @ values).flatten(), (weights @ values.abs()).flatten()
            error = (got[row].double() - wanted).abs()
            assert (error <= 2.0**-8 * size + 2.0**-9 * wanted.abs() + 2.0**-16 * size).all(), (
                f"{error.max():.2e}"
            )
        self.out.fill_(float("nan"))
        assert torch.equal(other(), got), "other bits than by the other path"

    def dense(self) -> Callable[[], Tensor]:
        """torch's attention over the same keys, contiguous and without bias and window."""
        keys, values = (torch.stack(x) for x in zip(*map(self.gathered, range(self.sequences)), strict=True))
        q = self.q.view(self.sequences, self.rows, self.heads.num_heads, -1).transpose(1, 2)
        is_causal = self.rows == self.keys
        scale = 1 / self.heads.head_dim
        return partial(
            scaled_dot_product_attention, q, keys, values, is_causal=is_causal, scale=scale, enable_gqa=True
        )


def _build(
    heads: Heads,
    sequences: int,
    keys: int,
    rows: int,
    bound: str,
    is_prompt: bool,
    config: AttentionConfig | None = None,
    programs: int | None = None,
    beside_table: bool = False,
) -> Built:
    """``beside_table``: the committed launch is the baseline, else torch."""
    columns = (config or heads.config).prompt_columns
    first = Inputs.draw(heads, sequences, keys, rows)
    sets = [first, *rotating(partial(Inputs.draw, heads, sequences, keys, rows), first.bytes)[1:]]
    share = programs and -(-programs // (sequences * heads.num_kv))  # of one sequence and KV head
    decodes = [partial(x.decode, x.parts(config), config, share) for x in (sets[:1] if is_prompt else sets)]
    prompts = [
        partial(x.prompt, x.tiles(columns), columns, config) for x in (sets if is_prompt else sets[:1])
    ]
    runs, other = (prompts, decodes[0]) if is_prompt else (decodes, prompts[0])
    comparable = rows == 1 or rows == keys
    baseline = [x.dense() for x in sets] if comparable and not heads.window and not beside_table else None
    if beside_table and is_prompt:
        columns = heads.config.prompt_columns
        baseline = [partial(x.prompt, x.tiles(columns), columns, None) for x in sets]
    elif beside_table:
        baseline = [partial(x.decode, x.parts(), None) for x in sets]
    return Built(
        runs=runs,
        check=partial(first.check, runs[0], other),
        bytes=first.bytes,
        flops=first.flops,
        baseline=baseline,
        bound=bound,
    )


def _tried(base: AttentionConfig) -> dict[str, dict]:
    """Other launches."""
    configs = {
        "64 columns": replace(base, prompt=Launch(False, 4, 2), prompt_columns=64),
        "2 stages": replace(base, prompt=Launch(False, 8, 2)),
    }
    return {name: {"config": config} for name, config in configs.items()}


def _cell(
    heads: Heads, sequences: int, keys: int, rows: int, bound: str, *names: str, is_prompt: bool = False
) -> Cell:
    build = partial(_build, heads, sequences, keys, rows, bound, is_prompt)
    tried = _tried(heads.config)
    kind = f"W{heads.window}" if heads.window else "full"
    what = (
        f"{sequences} x {keys} keys, {rows} rows, {heads.num_heads}/{heads.num_kv} x {heads.head_dim} {kind}"
    )
    op = "attention prompt" if is_prompt else "attention decode"
    return Cell(op, what, build, {name: partial(build, **tried[name]) for name in names})


def _free_cells() -> list[Cell]:
    """Other segments, which a kernel that need not be row-exact could take by shape: the ratio is exactness' cost."""
    found, base = [], SMALL_FULL.config
    shapes = ((64, 8192, 1), (1, 8192, 1), (64, 8192, 5), (1, 2048, 2048))
    for sequences, keys, rows in shapes:
        is_prompt = rows == keys
        bound = "cost <= 1.15" if is_prompt else "cost <= 1.05"
        for segment in (128, 512):
            config = replace(base, segment=segment)
            run = partial(
                _build, SMALL_FULL, sequences, keys, rows, bound, is_prompt, config, beside_table=True
            )
            what = f"{sequences} x {keys} keys, {rows} rows, 32/8 x 128 full"
            found.append(Cell("attention free", what, run, configuration=f"{segment} / {base.block_keys}"))
    return found


def cells() -> list[Cell]:
    decodes = [
        _cell(SMALL_FULL, 64, 8192, 1, ">= 75 % of the read ceiling"),
        _cell(SMALL_FULL, 1, 8192, 1, "<= 20 us"),
        _cell(SHARD_FULL, 1, 8192, 1, "<= 10 us"),
        _cell(SMALL_FULL, 1, 8192, 4, ""),
        _cell(SMALL_FULL, 16, 8192, 9, ""),
        _cell(SMALL_FULL, 64, 8192, 5, ""),
        _cell(SMALL_FULL, 64, 8192, 9, ""),
        _cell(SHARD_FULL, 64, 8192, 5, ""),
        _cell(LARGE_FULL, 64, 8192, 1, ""),
        _cell(SMALL_FULL, 1, 131_072, 1, ""),
        _cell(SMALL_LOCAL, 64, 8192, 1, ""),
        _cell(SMALL_LOCAL, 64, 8192, 5, ""),
        _cell(SMALL_LOCAL, 1, 8192, 1, ""),
    ]
    prompts = [
        (SMALL_FULL, 2048, ">= 316 TFLOP/s", ("64 columns", "2 stages")),
        (MINI_FULL, 2048, ">= 316 TFLOP/s", ("2 stages",)),
        (SMALL_FULL, 10_240, "", ("2 stages",)),
        (SMALL_LOCAL, 2048, "", ("64 columns", "2 stages")),
        (LARGE_FULL, 2048, "", ()),
    ]
    prompt_cells = [
        _cell(heads, 1, keys, 2048, bound, *names, is_prompt=True) for heads, keys, bound, names in prompts
    ]
    return decodes + prompt_cells + _free_cells()

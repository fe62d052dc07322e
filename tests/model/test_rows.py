"""Row-invariance of the target, in bits: a row is the same whatever it was computed with, and whoever came before.

The baseline of every comparison is the sequence alone, as one prompt chunk, in clean caches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from inkling.config import AttentionGeometry
from inkling.engine.loop import Engine
from inkling.engine.pages import CacheLayout, Model, PagePool, PoolLayout
from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from inkling.engine.scheduler import EngineLimits
from inkling.model.cache import LayerCache, PagedCache
from inkling.model.runner import DraftRunner
from inkling.protocol import Kind, SlotOptions
from inkling.testing import tiny_config, write_random_checkpoint
from kernels.rows import find_row_quantum, row_quantum, set_row_quantum
from tests.engine.harness import RecordedReply
from tests.in_process import SESSION, LocalModels
from tests.model.stepping import (
    SMALL_PAGES,
    Run,
    TargetSteps,
    new_draft,
    new_target,
    readable,
    same_bits,
    small_pages,
)

CHUNKS = (1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65)
LENGTHS = (131, 90, 66, 17, 5)
NUM_DRAFTS = 3
SENTINEL = 7.0
CONFIGS = {
    "tiny": tiny_config(),
    "three heads to a key head, odd widths": tiny_config(
        hidden_size=44,
        num_layers=2,
        layer_is_local=(True, False),
        layer_is_dense=(False, False),
        full=AttentionGeometry(num_heads=6, num_kv_heads=2, head_dim=12, rel_extent=70, window=None),
        local=AttentionGeometry(num_heads=3, num_kv_heads=1, head_dim=20, rel_extent=17, window=17),
        expert_ffn=21,
        num_experts=5,
        num_experts_per_token=3,
        num_shared_experts=1,
    ),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("checkpoint") for name in CONFIGS}
    for name, directory in made.items():
        dtype = torch.float32 if name == "tiny" else torch.bfloat16  # as stored; all arithmetic is fp32
        write_random_checkpoint(directory, CONFIGS[name], seed=9, dtype=dtype)
    return made


def load(directory: Path, threads: int) -> Iterator[LocalModels]:
    before = torch.get_num_threads(), row_quantum()
    yield LocalModels(directory, max_context=192, max_running_sequences=len(LENGTHS), threads=threads)
    torch.set_num_threads(before[0])
    set_row_quantum(before[1])


@pytest.fixture(scope="module", params=CONFIGS)
def models(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Iterator[LocalModels]:
    yield from load(directories[request.param], 1)


@pytest.fixture(params=CONFIGS)
def two_threads(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Iterator[LocalModels]:
    yield from load(directories[request.param], 2)


@pytest.fixture(params=["large pages", "small pages"])
def layout(request: pytest.FixtureRequest, models: LocalModels) -> CacheLayout:
    if request.param == "large pages":
        return models.deployment.layout
    geometries = (models.deployment.config.full, models.deployment.config.local)
    size = SMALL_PAGES[Kind.FULL]
    products = {shape for g in geometries for shape in ((g.head_dim, size), (size, g.head_dim))}
    assert find_row_quantum([], products, 256, torch.float32) == row_quantum()
    return small_pages(models)


def sequences(models: LocalModels) -> list[tuple[list[int], SlotOptions]]:
    """Ids and options of each slot: greedy and seeded ones."""
    random = Random(8)
    vocab = range(models.deployment.config.vocab_size)
    return [
        (random.choices(vocab, k=length), SlotOptions(slot, 0, temperature=0.8 * (slot % 2), seed=slot))
        for slot, length in enumerate(LENGTHS)
    ]


def opened(models: LocalModels, layout: CacheLayout, slots: Sequence[int]) -> TargetSteps:
    steps = TargetSteps(new_target(models, layout), layout)
    for slot in slots:
        ids, options = sequences(models)[slot]
        steps.open(options, len(ids) + NUM_DRAFTS, len(ids))
    return steps


def caches(steps: TargetSteps, slot: int, end: int) -> list[Tensor]:
    return readable(steps.runner.cache, steps.runner.slots.tables, steps.layout, slot, end)


class Alone:
    """One sequence in one chunk: states [T, H], the token drawn after every row, the caches at its end."""

    def __init__(self, models: LocalModels, layout: CacheLayout, slot: int):
        self.ids, _ = sequences(models)[slot]
        steps = opened(models, layout, [slot])
        self.states, self.tokens = steps.step(Run(slot, 0, self.ids, len(self.ids)))[0]
        self.caches = caches(steps, slot, len(self.ids))


def check_chunks(models: LocalModels, layout: CacheLayout, slot: int, sizes: Sequence[int]) -> None:
    alone = Alone(models, layout, slot)
    for size in sizes:
        steps = opened(models, layout, [slot])
        states, tokens = [], []
        for first in range(0, len(alone.ids), size):
            ids = alone.ids[first : first + size]
            part, drawn = steps.step(Run(slot, first, ids, len(ids)))[0]
            states.append(part)
            tokens += drawn
        assert torch.equal(torch.cat(states), alone.states), size
        assert tokens == alone.tokens, size
        assert same_bits(caches(steps, slot, len(alone.ids)), alone.caches), size


@pytest.mark.parametrize("slot", [0, 1], ids=["greedy", "seeded"])
def test_every_chunk_size_gives_the_same_states_tokens_and_caches(
    models: LocalModels, layout: CacheLayout, slot: int
) -> None:
    check_chunks(models, layout, slot, CHUNKS)


def test_two_threads_give_every_row_the_same_bits(two_threads: LocalModels) -> None:
    layout = two_threads.deployment.layout
    check_chunks(two_threads, layout, 1, (1, 5, 17, 33, 65))
    check_ragged(two_threads, layout, seed=4)


def check_ragged(models: LocalModels, layout: CacheLayout, seed: int) -> None:
    """Prompt chunks, decodes and verifications of five sequences in one step, in any order."""
    random = Random(seed)
    alone = [Alone(models, layout, slot) for slot in range(len(LENGTHS))]
    steps = opened(models, layout, range(len(LENGTHS)))
    done = [0] * len(LENGTHS)  # rows computed on true ids
    num_rejected = 0
    while left := [slot for slot, ref in enumerate(alone) if done[slot] < len(ref.ids)]:
        runs, num_true = [], []
        for slot in random.sample(left, random.randint(1, len(left))):
            first, true = done[slot], alone[slot].ids
            size = min(random.choice((1, 1, 1, 2, *CHUNKS)), len(true) - first)
            wrong = random.randint(0, NUM_DRAFTS)
            ids = true[first : first + size] + random.choices(range(5), k=wrong)
            runs.append(Run(slot, first, ids, random.randint(wrong, len(ids))))
            num_true.append(size)
            done[slot] += size
            num_rejected += wrong
        for run, size, (states, tokens) in zip(runs, num_true, steps.step(*runs), strict=True):
            ref = alone[run.slot]
            assert torch.equal(states[:size], ref.states[run.first : run.first + size])
            drawn_from = run.first + len(run.ids) - run.draws
            true_tokens = ref.tokens[drawn_from : run.first + size]
            assert tokens[: len(true_tokens)] == true_tokens
    assert num_rejected > 10
    for slot, ref in enumerate(alone):
        assert same_bits(caches(steps, slot, len(ref.ids)), ref.caches)


@pytest.mark.parametrize("seed", range(3))
def test_ragged_shuffled_steps_with_rejected_rows_change_no_bit(
    models: LocalModels, layout: CacheLayout, seed: int
) -> None:
    check_ragged(models, layout, seed)


def test_the_row_quantum_holds_up_to_the_bound_of_a_step(models: LocalModels) -> None:
    """The quantum that start-up chose holds for the whole checkpoint up to the step's bound."""
    linears, batched = models.target.model.product_shapes({64})
    narrow = {torch.bfloat16}
    assert find_row_quantum(linears, batched, 512, torch.float32, narrow) == row_quantum()


def arrays(layer: LayerCache, page_size: int) -> dict[str, Tensor]:
    """Every cache of a layer as [pages, positions, ...]."""
    conv = {name: getattr(layer, name) for name in ("kv_conv", "attn_conv", "mlp_conv")}
    return {
        "keys": layer.keys.transpose(1, 2),
        "values": layer.values.transpose(1, 2),
        **{name: cache.view(-1, page_size, cache.shape[1]) for name, cache in conv.items()},
    }


def array_kinds(cache: PagedCache) -> Iterator[tuple[Kind, Tensor]]:
    """Every cache of every layer, as ``arrays``, with its kind."""
    for layer, layer_kind in zip(cache.layers, cache.kinds, strict=True):
        for name, array in arrays(layer, cache.page_size[Kind.CONV]).items():
            yield Kind.CONV if name.endswith("conv") else layer_kind, array


@pytest.mark.parametrize("zeroing", [False, True], ids=["pages as they are", "fresh pages zeroed"])
def test_windowed_caches_are_written_only_where_a_later_row_reads(
    models: LocalModels, layout: CacheLayout, zeroing: bool
) -> None:
    alone = Alone(models, layout, 1)
    pools = tuple(PoolLayout(pool.page_size, 3 + 128 // pool.page_size) for pool in layout.target)
    layout = replace(layout, target=pools)
    steps = opened(models, layout, [1])
    steps.zero_fresh_pages = zeroing
    for table in steps.pages[1].tables:
        table.reach = None  # every position gets a page and keeps it
    cache = steps.runner.cache
    for _, array in array_kinds(cache):
        array[1:] = SENTINEL
    cuts = (0, 70, 75, 76, len(alone.ids))
    spans = list(zip(cuts, cuts[1:], strict=False))
    states = [steps.step(Run(1, first, alone.ids[first:end]))[0][0] for first, end in spans]
    assert torch.equal(torch.cat(states), alone.states)

    for kind, array in array_kinds(cache):
        size, reach = pools[kind].page_size, layout.reach(kind)
        keep = LENGTHS[1] if reach is None else reach + NUM_DRAFTS + 1
        kept = np.concatenate([np.arange(max(first, end - keep), end) for first, end in spans])
        pages = steps.runner.slots.tables.pages[kind][1]
        written = torch.zeros(array.shape[:2], dtype=torch.bool)
        written[pages[kept // size], kept % size] = True
        assert len(kept) == written.sum() and (reach is None or len(kept) < LENGTHS[1])
        before = torch.full(array.shape[:2], SENTINEL)
        before[0] = 0
        if zeroing:
            before[pages[: (LENGTHS[1] - 1) // size + 1]] = 0
        rows = array.reshape(*written.shape, -1)
        assert (rows == before[..., None])[~written].all()
        assert (rows != before[..., None])[written].all()


class KeptDrafts:
    """Draft client that keeps the drafts of every step."""

    def __init__(self, draft: DraftRunner):
        self.runner = draft
        self.drafts: list[list[int]] = []

    def step(self, control: np.ndarray, hidden: Tensor) -> np.ndarray:
        drafts = self.runner.step(control, hidden)
        self.drafts.append(drafts.tolist())
        return drafts


def generate_stepwise(
    models: LocalModels, layout: CacheLayout, requests: list[GenerateRequest], *, poison: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Answers, and the drafts of every step. ``poison``: before each step all free pages and ring rows are NaN."""
    target, draft = new_target(models, layout), KeptDrafts(new_draft(models, layout))
    limits = EngineLimits(192, len(LENGTHS), 40, 100, layout.num_draft_tokens)
    engine = Engine(limits, layout, target, draft, SESSION)
    replies = [RecordedReply() for _ in requests]
    for request, reply in zip(requests, replies, strict=True):
        engine.submit(request, reply)
    more = True
    while more:
        if poison:
            for model, runner in ((Model.TARGET, target), (Model.DRAFT, draft.runner)):
                for kind, array in array_kinds(runner.cache):
                    array[engine.scheduler.allocator.pools[model][kind].free] = torch.nan
            free = set(range(limits.max_running_sequences)) - {s.slot for s in engine.scheduler.running}
            draft.runner.ring.view(limits.max_running_sequences, draft.runner.ring_rows, -1)[list(free)] = (
                torch.nan
            )
        more = engine.step()
    engine.sender.send_ready()
    assert all(reply.error is None for reply in replies)
    return [reply.ids for reply in replies], draft.drafts


def test_nan_in_recycled_pages_reaches_no_other_sequence(
    models: LocalModels, layout: CacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(12)
    vocab = range(models.deployment.config.vocab_size)
    requests = [
        GenerateRequest(
            tuple(random.choices(vocab, k=random.choice((1, 3, 20, 70)))),
            SamplingParams(temperature=0.8 * (i % 2), seed=i),
            StopRules(random.randint(3, 30)),
            num_draft_tokens=NUM_DRAFTS,
        )
        for i in range(14)
    ]
    taken: Counter[tuple[str, int]] = Counter()
    take = PagePool.take

    def counted(pool: PagePool) -> int:
        page = take(pool)
        taken[pool.name, page] += 1
        return page

    clean = generate_stepwise(models, layout, requests, poison=False)
    monkeypatch.setattr(PagePool, "take", counted)
    assert generate_stepwise(models, layout, requests, poison=True) == clean
    recycled = {name for (name, _), times in taken.items() if times > 1}
    assert len(recycled) == sum(pool.num_pages > 0 for pool in layout.target + layout.draft)

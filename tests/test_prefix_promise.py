"""Hits, evictions and preemptions on the real runners: no token differs from the target alone, uncached."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from inkling.engine.pages import CacheLayout, PoolLayout
from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from inkling.protocol import Kind
from tests.engine.scripted import References
from tests.in_process import LocalModels, generate
from tests.test_promise import CHECKPOINTS, DEMO, write_random_checkpoint
from tests.test_promise import SETTINGS as PLAIN

BLOCK = 64  # the page size of the attention kinds
SETTINGS = (
    *PLAIN,
    SamplingParams(repetition_penalty=1.3),  # the history of a resumed or half cached prompt must be whole
    SamplingParams(temperature=0.8, seed=9, presence_penalty=0.9, frequency_penalty=0.4),
)
NUM_REQUESTS = 20


@pytest.fixture(scope="module", params=["demo", "tiny", "narrow"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalModels:
    directory = DEMO
    if (config := CHECKPOINTS[request.param]) is not None:
        directory = tmp_path_factory.mktemp(request.param)
        write_random_checkpoint(directory, config, seed=12)
    return LocalModels(
        directory, max_context=320, max_running_sequences=16, threads=1, prefix_block=BLOCK, prefix_cache="on"
    )


def prompts_of_a_tree(random: Random, count: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Prompts that leave one of two common ones at, around and away from its block ends."""
    trunks = [[random.randrange(vocab_size) for _ in range(250)] for _ in range(2)]
    prompts = [tuple(trunks[0])]
    for number in range(count - 1):
        trunk = random.choice(trunks)
        kept = BLOCK * random.randint(1, 3) + random.choice((0, 1, 2, 3, 4, 5, 9, -1, -2, 30))
        if number % 4 == 3:  # the very prompt, shorter
            prompts.append(tuple(trunk[:kept]))
        else:
            tail = [random.randrange(vocab_size) for _ in range(random.randint(1, 20))]
            prompts.append(tuple(trunk[:kept] + tail))
    return prompts


def requests_of(random: Random, models: LocalModels) -> list[GenerateRequest]:
    config = models.deployment.config
    return [
        GenerateRequest(
            prompt,
            SETTINGS[number % len(SETTINGS)],
            StopRules(max_tokens=random.randint(3, 70), stop_ids=frozenset(config.eos_token_ids)),
            priority=random.randint(0, 1),
        )
        for number, prompt in enumerate(prompts_of_a_tree(random, NUM_REQUESTS, config.vocab_size))
    ]


def smaller(layout: CacheLayout, full_pages: int) -> CacheLayout:
    """Both models' full pools cut to ``full_pages``: page numbers that the caches have."""

    def cut(pools: tuple[PoolLayout, ...]) -> tuple[PoolLayout, ...]:
        full = pools[Kind.FULL]
        return (replace(full, num_pages=min(full.num_pages, full_pages + 1)), *pools[1:])

    return replace(layout, target=cut(layout.target), draft=cut(layout.draft))


def test_hits_and_preemptions_return_the_tokens_of_the_target_alone(models: LocalModels) -> None:
    random = Random(20261130)
    requests = requests_of(random, models)
    alone = models.engine(prefix_block=0)
    expected = [generate(alone, [request])[0].ids for request in requests]
    references = References(zip(requests, expected, strict=True))
    differing: list[tuple] = []
    hits = preemptions = served = 0
    for run, num_drafts in enumerate([models.num_depths, models.num_depths, 1]):
        scripted = run % 2 == 0
        draft = models.scripted_draft(references, seed=run)
        engine = models.engine(
            draft if scripted else None,
            layout=smaller(models.deployment.layout, (6, 7, 9)[run % 3]),
            max_prompt_chunk=random.choice((1 << 20, 50)),
            max_tokens_per_step=random.choice((512, 100)),
            prefix_block=BLOCK,
        )
        draft.true_ids = lambda slot, engine=engine: next(
            s.ids for s in engine.scheduler.running if s.slot == slot
        )
        order = random.sample(range(NUM_REQUESTS), NUM_REQUESTS)
        drafted = [replace(requests[i], num_draft_tokens=num_drafts) for i in order]
        replies = generate(engine, drafted, Random(run))
        differing += [(i, run) for i, r in zip(order, replies, strict=True) if r.ids != expected[i]]
        hits += engine.scheduler.prefixes.num_hits
        preemptions += engine.scheduler.num_preemptions
        served += len(order)
    assert not differing
    assert hits > 0.2 * served and preemptions > 0.05 * served, (hits, preemptions, served)


def test_a_hit_at_every_boundary_gives_the_bits_of_a_whole_prompt(models: LocalModels) -> None:
    random = Random(7)
    trunk = tuple(random.randrange(models.deployment.config.vocab_size) for _ in range(230))
    n = models.num_depths
    lengths = (230, *range(BLOCK, 230, BLOCK), *(b + n for b in range(BLOCK, 230, BLOCK)))
    for num_drafts in (0, n):
        requests = [
            GenerateRequest(trunk[:length], SETTINGS[2], StopRules(10), num_draft_tokens=num_drafts)
            for length in lengths
        ]
        plain = models.engine(prefix_block=0)
        expected = [generate(plain, [request])[0].ids for request in requests]
        engine = models.engine(prefix_block=BLOCK)
        hits = []
        for request, ids in zip(requests, expected, strict=True):
            before = engine.scheduler.prefixes.num_hit_positions
            assert generate(engine, [request])[0].ids == ids
            hits.append(engine.scheduler.prefixes.num_hit_positions - before)
        assert hits == [0, *((length - max(1, n)) // BLOCK * BLOCK for length in lengths[1:])]

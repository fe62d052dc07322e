"""A cached prefix saves work and changes no token, whoever built it and whatever came behind it."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest

from inkling.engine.pages import CacheLayout, Model, PoolLayout
from inkling.engine.prefix_cache import PrefixCache
from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from tests.engine.harness import MODEL, Bench, RecordedReply, arrive, make_layout, random_request

VOCAB = 23


def bench_of(block: int = 8, full_pages: int | None = None, boundaries: int = 40, **options) -> Bench:
    def layout(limits):
        return make_layout(limits, full_pages=full_pages, boundaries=boundaries)

    return Bench(block=block, layout=layout, **options)


def request(ids: list[int], max_tokens: int = 8, num_drafts: int = 3, seed: int = 5) -> GenerateRequest:
    return GenerateRequest(
        tuple(ids), SamplingParams(seed=seed), StopRules(max_tokens), num_draft_tokens=num_drafts
    )


def ids_of(length: int, seed: int = 1) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(length)]


def hit_of(bench: Bench, new: GenerateRequest) -> int:
    """Serves ``new`` alone; the length of its hit. Its answer is checked."""
    before = bench.engine.scheduler.prefixes.num_hit_positions
    bench.submit(new)
    bench.run()
    bench.check_answers()
    return bench.engine.scheduler.prefixes.num_hit_positions - before


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("chunk", [1, 3, 1 << 30])
def test_a_prompt_served_before_is_hit_at_every_boundary(num_drafts: int, chunk: int):
    ids = ids_of(60)
    bench = bench_of(num_drafts=num_drafts, chunk=chunk, full_pages=1000, boundaries=400)
    assert hit_of(bench, request(ids, num_drafts=num_drafts)) == 0
    for length in range(1, 60):
        expected = (length - max(1, num_drafts)) // 8 * 8
        assert hit_of(bench, request(ids[:length], num_drafts=num_drafts)) == max(0, expected)


def test_a_hit_saves_the_rows_of_the_target_and_of_the_draft():
    bench = bench_of(num_drafts=3, probability=1)
    ids = ids_of(43)
    assert hit_of(bench, request(ids)) == 0
    target, draft = sum(bench.target.rows), sum(bench.draft.window_rows)
    assert hit_of(bench, request(ids, seed=6)) == 40
    assert sum(bench.target.rows) - target == target - 40
    assert sum(bench.draft.window_rows) - draft == draft - 40


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_reuse_of_a_prefix_whose_pages_hold_another_continuation(num_drafts: int):
    """The depths of the last entries before a boundary have used ids behind it: they are part of the key."""
    first = ids_of(40)
    for common in range(16, 33):
        bench = bench_of(num_drafts=num_drafts, probability=0.7, context=200)
        other = [(t + 1) % VOCAB for t in first[common:]]
        assert hit_of(bench, request(first, num_drafts=num_drafts)) == 0
        hit = hit_of(bench, request(first[:common] + other, num_drafts=num_drafts))
        assert hit == (common - num_drafts) // 8 * 8


def test_continuations_of_one_prefix_share_its_pages_at_once():
    bench = bench_of(num_drafts=3, slots=8)
    prefix = ids_of(32)
    bench.submit(request(prefix))
    bench.run()
    for seed in range(8):
        bench.submit(request(prefix[:27] + ids_of(9, seed=seed), 20, seed=seed))
    bench.step()
    scheduler = bench.engine.scheduler
    pages = [tuple(s.target_pages.tables[0].pages[i] for i in range(6)) for s in scheduler.running]
    assert len(pages) == 8 and len(set(pages)) == 1
    assert scheduler.allocator.pools[Model.TARGET][0].users[pages[0][0]] == 8
    bench.run()
    bench.check_answers()


def test_the_answer_is_cached_too_but_nothing_past_a_stop():
    ids = ids_of(14)
    tokens, _ = MODEL.answer(request(ids, 60))
    cut = next(i for i in range(20, 60) if tokens[i] not in tokens[:i])
    stopped = dataclasses.replace(
        request(ids, num_drafts=5), stop=StopRules(60, stop_ids=frozenset({tokens[cut]}))
    )
    bench = bench_of(num_drafts=5, probability=1)  # accepted drafts behind the cut
    bench.submit(stopped)
    bench.run()
    bench.check_answers()
    committed = len(ids) + cut + 1
    cached = 8 * len(bench.engine.scheduler.prefixes.blocks)
    assert cached == (committed - 5) // 8 * 8
    follow_up = ids + tokens[: cut + 1] + ids_of(9, seed=3)
    assert hit_of(bench, request(follow_up, num_drafts=5)) == cached


@pytest.mark.parametrize("built", range(4))
@pytest.mark.parametrize("wanted", range(4))
def test_a_block_serves_sequences_of_at_most_its_depths(built: int, wanted: int):
    bench = bench_of(num_drafts=3)
    ids = ids_of(40)
    assert hit_of(bench, request(ids, num_drafts=built)) == 0
    assert hit_of(bench, request(ids, num_drafts=wanted)) == (32 if wanted <= built else 0)
    assert hit_of(bench, request(ids, num_drafts=wanted)) == 32  # built again with more depths


def test_stale_drafts_near_the_context_limit():
    """Sequences that end at the limit of the context draft less and less; what they leave is still exact."""
    ids = ids_of(60)
    for length in range(30, 60, 3):
        bench = bench_of(num_drafts=5, context=60, probability=0.6, seed=length)
        for end in (length, length, min(59, length + 3), 59):
            hit_of(bench, request((ids[:length] + ids_of(30, seed=end))[:end], 50, num_drafts=5, seed=end))
        for sent, reply in list(bench.sent):
            follow_up = (list(sent.prompt_ids) + reply.ids)[:59]
            hit_of(bench, request(follow_up, 50, num_drafts=5))
        assert bench.engine.scheduler.prefixes.num_hits >= 4


def random_tree(random: Random, count: int, num_drafts: int) -> list[GenerateRequest]:
    """Prompts that share prefixes of any length with one another."""
    prompts = [ids_of(40, seed=random.random())]
    for _ in range(count - 1):
        parent = random.choice(prompts)
        kept = random.randint(0, len(parent))
        prompts.append(parent[:kept] + ids_of(random.randint(1, 30), seed=random.random()))
        prompts[-1] = prompts[-1][-60:] if random.random() < 0.1 else prompts[-1][:60]
    requests = []
    for ids in prompts:
        like = random_request(random, num_drafts)
        requests.append(dataclasses.replace(like, prompt_ids=tuple(ids)))
    return requests


@pytest.mark.parametrize("seed", range(60))
def test_hits_evictions_and_preemptions_change_no_token(seed: int):
    random = Random(seed)
    num_drafts = seed % 6
    block = random.choice((4, 8, 16))
    sizes = tuple(random.choice([s for s in (1, 2, 4, 8) if block % s == 0]) for _ in range(3))
    window = random.choice((2, 5, 9, 20))
    sequences, boundaries = random.choice((None, 2)), random.choice((0, 3, 30))
    full = random.choice((None, -(-random.randint(90, 130) // sizes[0])))
    bench = Bench(
        num_drafts=num_drafts,
        budget=random.choice((1, 7, 17, 64, 1000)),
        slots=random.choice((1, 4, 12)),
        chunk=random.choice((1, 4, 11, 1 << 30)),
        block=block,
        probability=random.choice((0, 0.7, 1)),
        seed=seed,
        layout=lambda limits: make_layout(
            limits,
            window=window,
            page_sizes=sizes,
            full_pages=full,
            sequences=sequences,
            boundaries=boundaries,
        ),
    )
    if random.random() < 0.5:
        bench.engine.scheduler.draft_length = lambda sequence: random.randint(0, sequence.max_drafts)
    arrive(bench, random, random_tree(random, 30, num_drafts))
    bench.run()
    bench.check_answers()
    TOTALS.append((bench.engine.scheduler.prefixes.num_hits, bench.engine.scheduler.num_preemptions))


TOTALS: list[tuple[int, int]] = []


def test_the_random_runs_hit_and_preempted_often():
    if len(TOTALS) < 60:
        pytest.skip("needs the runs above")
    hits, preemptions = zip(*TOTALS, strict=True)
    assert sum(hits) > 300 and sum(preemptions) > 50


def test_idle_blocks_go_before_anyone_is_preempted_the_least_recently_used_first():
    bench = bench_of(num_drafts=0, slots=2, full_pages=36)
    a, b, c = (request(ids_of(48, seed=s), 1, 0) for s in range(3))
    assert hit_of(bench, a) == 0 and hit_of(bench, b) == 0  # 12 pages each
    assert hit_of(bench, a) == 40  # used now: b is the oldest
    assert hit_of(bench, request(ids_of(70, seed=9), 1, 0)) == 0
    assert bench.engine.scheduler.num_preemptions == 0
    assert hit_of(bench, a) == 40
    assert hit_of(bench, b) < 40
    assert hit_of(bench, c) == 0


def test_a_preempted_sequence_resumes_from_its_own_blocks():
    bench = bench_of(block=4, num_drafts=3, slots=3, full_pages=24)
    for seed in range(5):
        bench.submit(request(ids_of(16, seed=seed), 40, seed=seed))
    bench.run()
    bench.check_answers()
    scheduler = bench.engine.scheduler
    assert scheduler.num_preemptions > 0 and scheduler.prefixes.num_hits > 0


def test_step_gaps_open_shared_pages_again():
    bench = bench_of(num_drafts=3, slots=4)
    prefix = ids_of(40)
    bench.submit(request(prefix, 4))
    bench.run()
    for seed in range(6):
        bench.submit(request(prefix[:20] + ids_of(9, seed=seed), 30, seed=seed))
    for step in range(100):
        if step % 3 == 0:
            bench.target.lose_step()
        if step % 4 == 0:
            bench.draft.lose_step()
        if not bench.step():
            break
    bench.run()
    bench.check_answers()
    assert bench.engine.scheduler.prefixes.num_hits == 6


def test_a_failed_step_drops_what_was_cached():
    bench = bench_of(num_drafts=3)
    bench.target_client.failures[3] = ("after", RuntimeError("lost"))
    ids = ids_of(40)
    bench.submit(request(ids, 60))
    bench.run()
    assert bench.sent.pop()[1].error is not None
    assert not bench.engine.scheduler.prefixes.blocks
    assert hit_of(bench, request(ids)) == 0


def test_without_prefix_reuse_nothing_is_kept():
    bench = Bench(num_drafts=3)
    assert hit_of(bench, request(ids_of(40))) == hit_of(bench, request(ids_of(40))) == 0
    pools = [pool for pools in bench.engine.scheduler.allocator.pools.values() for pool in pools]
    assert all(len(pool.free) == pool.num_usable for pool in pools)


def test_a_block_must_be_a_multiple_of_every_page_size():
    pools = (PoolLayout(4, 10), PoolLayout(4, 10), PoolLayout(8, 10))
    with pytest.raises(ValueError, match="prefix_block is 12; it must be a multiple of every page size, 8"):
        PrefixCache(CacheLayout(5, 3, pools, pools), 12)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_boundary_in_a_long_draft_window_is_no_hit_for_drafting_sequences(size: int):
    """A catch-up window stores only the rows before its end; what it ran past is read by nobody."""
    for seed in range(6):
        bench = Bench(
            num_drafts=3,
            block=8,
            context=160,
            probability=0.7,
            layout=lambda limits: make_layout(limits, page_sizes=(size, size, size), boundaries=200),
        )
        random = Random(seed)
        bench.engine.scheduler.draft_length = lambda s, r=random: s.max_drafts if r.random() < 0.04 else 0
        ids = ids_of(random.randint(5, 20), seed)
        long = request(ids, 110)
        bench.submit(long)
        bench.run()
        whole = ids + MODEL.answer(long)[0]
        for length in range(len(whole), 8, -5):
            hit_of(bench, request(whole[:length], 6, seed=7))
        assert bench.engine.scheduler.prefixes.num_hits > 3


def test_a_block_of_fewer_depths_inside_a_chain_ends_it():
    bench = bench_of(num_drafts=3)
    ids = ids_of(40)
    hit_of(bench, request(ids))
    first = next(iter(reversed(bench.engine.scheduler.prefixes.blocks.values())))
    assert 0 in first.pages[Model.TARGET, 0][1]  # the block of position 0
    first.num_depths = first.hit_depths = 1
    assert hit_of(bench, request(ids, num_drafts=1)) == 32
    assert hit_of(bench, request(ids, num_drafts=3)) == 0


@pytest.mark.parametrize(("prompt_log_probs", "expected"), [(0, 32), (1, 0)])
def test_a_request_for_prompt_log_probs_takes_no_hit(prompt_log_probs: int, expected: int):
    bench = bench_of(num_drafts=3)
    hit_of(bench, request(ids_of(40)))
    new = dataclasses.replace(request(ids_of(40)), prompt_log_probs=prompt_log_probs)
    sequence = bench.engine.submit(new, RecordedReply())
    assert bench.engine.scheduler.admit() == [sequence]
    assert sequence.num_computed == expected

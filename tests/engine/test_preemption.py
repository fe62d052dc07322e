"""Pages run short: some sequences give way, all finish, and no token changes."""

from __future__ import annotations

import dataclasses
import time
from random import Random

import pytest

from inkling.engine.request import StopRules
from inkling.errors import CancelledError
from tests.engine.harness import (
    MODEL,
    Bench,
    Letters,
    arrive,
    make_layout,
    random_bench,
    request_of,
    requests_of,
)


def short_bench(full_pages: int = 12, **options) -> Bench:
    return Bench(layout=lambda limits: make_layout(limits, full_pages=full_pages), **options)


@pytest.mark.parametrize("seed", range(40))
def test_preempted_requests_get_the_tokens_of_the_target_alone(seed: int):
    random = Random(seed)
    num_drafts = seed % 5
    sizes = (random.choice((1, 4)), random.choice((1, 4, 5)), random.choice((1, 2, 3, 8)))
    bench = Bench(
        num_drafts=num_drafts,
        budget=random.choice((1, 5, 17, 64)),
        slots=random.choice((3, 8)),
        chunk=random.choice((1, 4, 1 << 30)),
        probability=random.choice((0, 0.7, 1)),
        seed=seed,
        layout=lambda limits: make_layout(
            limits, page_sizes=sizes, full_pages=-(-random.randint(70, 110) // sizes[0])
        ),
    )
    if seed % 2:
        bench.engine.scheduler.draft_length = lambda sequence: random.randint(0, sequence.max_drafts)
    arrive(bench, random, requests_of(seed, 16, num_drafts))
    for number in range(8):  # long answers from short prompts, all at once
        bench.submit(request_of(random.randint(2, 9), random.randint(40, 60), num_drafts, seed=number))
    bench.run()
    bench.check_answers()
    assert bench.engine.scheduler.num_preemptions


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_request_is_preempted_again_and_again_and_draws_no_token_twice(num_drafts: int):
    bench = short_bench(full_pages=14, num_drafts=num_drafts, budget=16)
    requests = [request_of(5, 40, num_drafts, seed) for seed in range(4)]
    positions: dict[int, list[int]] = {}
    commit = bench.engine._commit

    def committed(plan):
        for segment in plan:
            if segment.draws:
                kept = segment.first + segment.rows - segment.draws + 1
                positions.setdefault(id(segment.sequence), []).append(kept)
        commit(plan)

    bench.engine._commit = committed
    for request in requests:
        bench.submit(request)
    bench.run()
    bench.check_answers()
    assert bench.engine.scheduler.num_preemptions >= 3
    for first_drawn in positions.values():  # each draw begins behind what was drawn before
        assert all(a < b for a, b in zip(first_drawn, first_drawn[1:], strict=False))


def test_min_tokens_and_stops_count_from_the_original_prompt_after_a_preemption():
    bench = short_bench(full_pages=10, num_drafts=3, probability=1, slots=8)
    for seed in range(12):
        stop = StopRules(30, 15, frozenset(range(0, 23, 3)))
        bench.submit(dataclasses.replace(request_of(4, 30, seed=seed), stop=stop))
    bench.run()
    bench.check_answers()
    assert bench.engine.scheduler.num_preemptions > 0
    assert min(len(reply.ids) for _, reply in bench.sent) == 16


def test_text_and_stop_words_survive_a_preemption():
    bench = short_bench(full_pages=12, slots=3)
    replies = [bench.submit(request_of(5, 40, seed=s), assembler=Letters(stop_after=35)) for s in range(3)]
    bench.run()
    bench.check_idle()
    assert bench.engine.scheduler.num_preemptions > 0
    for (request, _), reply in zip(bench.sent, replies, strict=True):
        tokens = MODEL.answer(request)[0][:35]
        assert (reply.ids, reply.finish_reason) == (tokens, "stop")
        assert reply.text == "".join(chr(97 + t) for t in tokens) + "."


def test_pages_that_run_short_between_target_and_draft_preempt_too():
    """Only the draft's pools are short: the tokens of the step stand, the drafts of the one preempted fall."""

    def layout(limits):
        ample, short = make_layout(limits), make_layout(limits, full_pages=12)
        return dataclasses.replace(ample, draft=short.draft)

    bench = Bench(num_drafts=3, probability=0.8, layout=layout)
    for seed in range(6):
        bench.submit(request_of(5, 40, seed=seed))
    bench.run()
    bench.check_answers()
    assert bench.engine.scheduler.num_preemptions > 0


def test_a_larger_priority_is_answered_first_and_never_preempted():
    bench = short_bench(full_pages=20, slots=3)
    ends: list[int] = []
    preempted: list[int] = []
    preempt = bench.engine.scheduler._preempt

    def spy(sequence):
        preempted.append(sequence.request.priority)
        preempt(sequence)

    bench.engine.scheduler._preempt = spy
    for number in range(9):
        priority = 2 if number == 7 else number % 2
        bench.submit(dataclasses.replace(request_of(8, 40, seed=number), priority=priority))
    while bench.step():
        for request, reply in bench.sent:
            if reply.finished and request.sampling.seed not in ends:
                ends.append(request.sampling.seed)
    bench.run()
    bench.check_answers()
    assert preempted and 2 not in preempted
    assert ends[0] == 7
    assert preempted.count(0) > preempted.count(1)


def test_the_longest_prompt_finishes_beside_a_steady_stream_of_short_ones():
    bench = short_bench(full_pages=33, slots=4, budget=16, context=128)
    for seed in range(6):
        bench.submit(request_of(4, 12, seed=seed))
    bench.step()
    long = bench.submit(request_of(127, 1, seed=99))
    for seed in range(100, 200):  # there is always a short one waiting
        bench.submit(request_of(4, 12, seed=seed))
        bench.step()
        if long.finished:
            break
    assert long.finished and bench.engine.scheduler.waiting
    bench.run()
    bench.check_answers()


def test_a_long_answer_finishes_beside_a_steady_stream_of_short_ones():
    bench = short_bench(full_pages=33, slots=4, budget=16, context=128)
    long = bench.submit(request_of(4, 120, seed=99))
    for seed in range(100, 400):
        bench.submit(request_of(30, 12, seed=seed))
        bench.step()
        if long.finished:
            break
    assert long.finished and bench.engine.scheduler.num_preemptions > 0
    bench.run()
    bench.check_answers()


def preempt_one(bench: Bench):
    """Steps until a sequence waits that has answered in part."""
    for _ in range(200):
        bench.step()
        for sequence in bench.engine.scheduler.waiting:
            if sequence.num_emitted:
                return sequence
    raise AssertionError("nothing was preempted")


def test_a_preempted_request_can_be_cancelled_or_time_out(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for ending in ("cancel", "timeout"):
        bench = short_bench(full_pages=12, slots=4)
        for seed in range(4):
            bench.submit(dataclasses.replace(request_of(5, 40, seed=seed), timeout_us=60_000_000))
        sequence = preempt_one(bench)
        request, reply = next(pair for pair in bench.sent if pair[1] is sequence.outbox.reply)
        if ending == "cancel":
            bench.engine.cancel(sequence)
            bench.step()
            assert isinstance(reply.error, CancelledError)
        else:
            sequence.deadline = 1.0
            bench.engine._next_deadline = 1.0
            bench.step()
            assert reply.finish_reason == "timeout"
            assert reply.ids == MODEL.answer(request)[0][: len(reply.ids)] and reply.ids
        bench.run()
        bench.check_idle()


def test_a_step_gap_after_preemptions_opens_what_still_runs():
    bench = short_bench(full_pages=12, slots=4)
    for seed in range(6):
        bench.submit(request_of(5, 40, seed=seed))
    for step in range(400):
        if not bench.step():
            break
        if step % 5 == 0:
            bench.target.lose_step()
        if step % 7 == 0:
            bench.draft.lose_step()
    bench.run()
    bench.check_answers()
    assert bench.engine.scheduler.num_preemptions > 0


def test_random_traffic_with_cancels_and_priorities_gives_everything_back():
    for seed in range(8):
        random = Random(seed)
        bench = random_bench(random, 3)
        arrive(bench, random, requests_of(seed, 12, 3))
        bench.run()
        bench.check_answers()


@pytest.mark.parametrize("seed", range(6))
def test_lengths_that_give_up_depths_beside_preemptions_and_hits(seed: int):
    """A sequence that gives up depths holds no draft pages for them, and leaves no block that claims them."""
    random = Random(seed)
    bench = Bench(
        num_drafts=4,
        block=8,
        slots=4,
        probability=0.7,
        seed=seed,
        layout=lambda limits: make_layout(limits, full_pages=26, boundaries=30),
    )
    run_draft = bench.engine._run_draft

    def shrinking(plan, hidden):
        for segment in plan:
            sequence = segment.sequence
            if sequence.window is not None and random.random() < 0.1:
                sequence.shrink(random.randint(0, sequence.num_depths - 1))
                if not sequence.num_depths:
                    bench.engine._to_draft.close(sequence)
        run_draft(plan, hidden)

    bench.engine._run_draft = shrinking
    prompt = requests_of(seed, 1, 4)[0].prompt_ids
    for number in range(24):
        like = request_of(random.randint(2, 20), random.randint(5, 40), random.randint(0, 4), seed=number)
        bench.submit(
            dataclasses.replace(like, prompt_ids=(*prompt[: random.randint(0, 40)], *like.prompt_ids))
        )
        bench.step()
    bench.run()
    bench.check_answers()

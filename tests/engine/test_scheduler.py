"""The queue, admission, how a step's rows are shared, and who gives way when pages run short."""

from __future__ import annotations

import math
from random import Random

import pytest

from inkling.engine.outbox import Outbox
from inkling.engine.pages import CacheLayout
from inkling.engine.request import GenerateRequest, StopRules
from inkling.engine.scheduler import EngineLimits, PlannedPass, Scheduler
from inkling.engine.sequence import Phase, Sequence
from inkling.errors import InklingError, QueueFullError, RequestError
from tests.engine.harness import RecordedReply, make_layout


def make_scheduler(
    budget: int = 16, slots: int = 4, queue: int = 10, num_drafts: int = 3, **layout
) -> Scheduler:
    limits = EngineLimits(256, slots, budget, queue, num_drafts)
    return Scheduler(limits, make_layout(limits, **layout))


def add(
    scheduler: Scheduler, num_prompt: int, max_tokens: int = 8, num_drafts: int = 3, priority: int = 0
) -> Sequence:
    request = GenerateRequest(
        tuple(range(num_prompt)), stop=StopRules(max_tokens), num_draft_tokens=num_drafts, priority=priority
    )
    outbox = Outbox(RecordedReply(), True, num_prompt)
    sequence = Sequence(request, outbox, None, max_tokens=max_tokens, deadline=math.inf)
    scheduler.enqueue(sequence)
    return sequence


def make_decoding(sequence: Sequence, num_drafts: int) -> None:
    sequence.num_computed = len(sequence.ids) - 1
    sequence.drafts = [0] * num_drafts


def rows_of(scheduler: Scheduler) -> dict[Sequence, tuple[int, int]]:
    plan = scheduler.plan()
    assert sum(segment.rows for segment in plan) <= scheduler.limits.max_tokens_per_step
    return {segment.sequence: (segment.rows, segment.draws) for segment in plan}


def test_a_full_queue_refuses_at_once():
    scheduler = make_scheduler(queue=2)
    add(scheduler, 3), add(scheduler, 3)
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        add(scheduler, 3)
    scheduler.admit()
    assert add(scheduler, 3).phase is Phase.WAITING


def test_admission_is_first_come_first_served_and_stops_at_the_slots():
    scheduler = make_scheduler(slots=2)
    sequences = [add(scheduler, 3) for _ in range(4)]
    assert scheduler.admit() == sequences[:2]
    assert scheduler.admit() == []
    scheduler.release(sequences[0])
    assert scheduler.admit() == [sequences[2]]
    assert sequences[2].slot == sequences[0].slot
    scheduler.check_integrity()


def test_a_large_request_at_the_head_is_not_overtaken_and_gets_its_pages():
    scheduler = make_scheduler(slots=4, sequences=1)
    first, large, small = add(scheduler, 100, 20), add(scheduler, 200, 50), add(scheduler, 2, 2)
    assert scheduler.admit() == [first]
    assert scheduler.waiting == [large, small]
    scheduler.release(first)
    assert scheduler.admit() == [large]


def test_admission_needs_pages_for_the_known_ids_not_for_the_worst_case():
    scheduler = make_scheduler(slots=4, full_pages=63)
    sequences = [add(scheduler, 60, 190) for _ in range(4)]  # the worst case of each is the whole pool
    assert scheduler.admit() == sequences[:3]  # 60 known ids and 3 drafts: 16 of 63 pages each
    scheduler.check_integrity()


def test_larger_priority_goes_first_and_order_of_arrival_within_one():
    scheduler = make_scheduler(slots=6)
    a, b, c, d = (add(scheduler, 3, priority=p) for p in (0, 5, -1, 5))
    assert scheduler.waiting == [b, d, a, c]
    assert scheduler.admit() == [b, d, a, c]


def cover(scheduler: Scheduler, sequence: Sequence, end: int) -> list[Sequence]:
    """A target pass up to ``end``; returns those preempted for it."""
    return scheduler.secure([PlannedPass(sequence, sequence.target_pages, sequence.num_computed, end)])[1]


def test_the_lowest_priority_gives_way_first_then_the_newest():
    scheduler = make_scheduler(slots=4, full_pages=64)
    old, low, new, vip = (add(scheduler, 20, 200, priority=p) for p in (1, 0, 1, 2))
    scheduler.admit()
    for sequence in (vip, old, new, low):
        assert cover(scheduler, sequence, 60) == []  # 60 of 64 pages of 4
    assert cover(scheduler, old, 76) == []
    assert cover(scheduler, old, 77) == [low]
    assert cover(scheduler, old, 160) == [new]
    assert cover(scheduler, vip, 100) == [old]
    assert scheduler.num_preemptions == 3
    scheduler.check_integrity()


def test_who_needs_pages_and_ranks_lowest_gives_way_itself():
    scheduler = make_scheduler(slots=4, full_pages=64)
    old, new = add(scheduler, 20, 200), add(scheduler, 20, 200)
    scheduler.admit()
    assert cover(scheduler, old, 200) == []
    words, preempted = scheduler.secure([PlannedPass(new, new.target_pages, 0, 60)])
    assert (words, preempted) == ([], [new])
    assert new.phase is Phase.WAITING and scheduler.running == [old]
    scheduler.requeue(preempted)
    scheduler.check_integrity()


def test_a_preempted_sequence_waits_ahead_of_later_arrivals_and_starts_afresh():
    scheduler = make_scheduler(slots=2, full_pages=64)
    old, new, later, vip = (add(scheduler, 20, 200, priority=p) for p in (1, 1, 1, 2))
    scheduler.admit()
    later_on = scheduler.waiting[:]
    victim = next(s for s in scheduler.running if s is not vip)
    victim.ids += [1, 2, 3]
    victim.drafts, victim.num_computed = [4], 22
    assert cover(scheduler, vip, 250) == [victim] or cover(scheduler, victim, 250) == [victim]
    scheduler.requeue([victim])
    assert scheduler.waiting == [victim, *later_on]
    assert (victim.num_computed, victim.drafts, len(victim.ids), victim.num_emitted) == (0, [], 23, 3)


def test_the_only_sequence_is_never_preempted():
    scheduler = make_scheduler(slots=2, full_pages=64)
    only = add(scheduler, 20, 200)
    scheduler.admit()
    with pytest.raises(InklingError, match="one sequence that was to fit"):
        cover(scheduler, only, 2000)  # beyond the context: no plan asks for this


def test_a_request_that_would_not_fit_empty_caches_is_refused():
    limits = EngineLimits(256, 4, 16, 10, 3)
    small = make_layout(EngineLimits(64, 1, 16, 10, 3))
    scheduler = Scheduler(limits, CacheLayout(5, 3, small.target, small.draft))
    with pytest.raises(RequestError, match=r"101 tokens and need .* full cache, which has .*cache_bytes"):
        add(scheduler, 100, 1)
    assert not scheduler.waiting


def test_sequences_without_depths_hold_nothing_in_the_draft():
    scheduler = make_scheduler()
    add(scheduler, 10, num_drafts=0), add(scheduler, 10, max_tokens=2, num_drafts=3)
    for sequence in scheduler.admit():
        assert sequence.num_depths == 0 and sequence.draft_pages is None and sequence.window is None


def test_release_returns_pages_and_slot():
    scheduler = make_scheduler()
    sequence = add(scheduler, 30)
    scheduler.admit()
    sequence.target_pages.cover(0, 30, sequence.slot, [])
    sequence.draft_pages.cover(0, 27, sequence.slot, [])
    scheduler.check_integrity()
    scheduler.release(sequence)
    scheduler.check_integrity()
    for pools in scheduler.allocator.pools.values():
        assert all(len(pool.free) == pool.num_usable for pool in pools)


def test_a_step_mixes_decodes_with_their_drafts_and_prompt_chunks():
    scheduler = make_scheduler(budget=16)
    a, b, c = add(scheduler, 5), add(scheduler, 5), add(scheduler, 30)
    scheduler.admit()
    make_decoding(a, 3), make_decoding(b, 2)
    assert rows_of(scheduler) == {a: (4, 4), b: (3, 3), c: (9, 0)}


def test_the_last_chunk_draws_one_token():
    scheduler = make_scheduler(budget=16)
    a = add(scheduler, 16)
    scheduler.admit()
    assert rows_of(scheduler) == {a: (16, 1)}
    a.num_computed = 3
    assert rows_of(scheduler) == {a: (13, 1)}


def test_a_short_budget_cuts_drafts_before_it_cuts_sequences():
    scheduler = make_scheduler(budget=7)
    a, b, c = add(scheduler, 5), add(scheduler, 5), add(scheduler, 30)
    scheduler.admit()
    make_decoding(a, 3), make_decoding(b, 3)
    assert rows_of(scheduler) == {a: (4, 4), b: (2, 2), c: (1, 0)}
    scheduler = make_scheduler(budget=3)
    a, b, c = add(scheduler, 5), add(scheduler, 5), add(scheduler, 5)
    scheduler.admit()
    for sequence in (a, b, c):
        make_decoding(sequence, 3)
    assert rows_of(scheduler) == {a: (1, 1), b: (1, 1), c: (1, 1)}


def test_the_oldest_prompt_comes_first():
    scheduler = make_scheduler(budget=10)
    a, b = add(scheduler, 12), add(scheduler, 12)
    scheduler.admit()
    assert rows_of(scheduler) == {a: (10, 0)}
    a.num_computed = 10
    assert rows_of(scheduler) == {a: (2, 1), b: (8, 0)}


def test_one_prompt_takes_no_more_than_its_chunk_of_a_step():
    limits = EngineLimits(256, 4, 16, 10, 3, max_prompt_chunk=6)
    scheduler = Scheduler(limits, make_layout(limits))
    a, b = add(scheduler, 12), add(scheduler, 12)
    scheduler.admit()
    assert rows_of(scheduler) == {a: (6, 0), b: (6, 0)}


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_with_more_sequences_than_rows_each_gets_one_in_turn(budget: int):
    scheduler = make_scheduler(budget=budget, slots=5)
    sequences = [add(scheduler, 5 + i) for i in range(5)]
    scheduler.admit()
    for sequence in sequences[:3]:
        make_decoding(sequence, 3)
    served = dict.fromkeys(sequences, 0)
    for _ in range(30):
        for sequence, (rows, _) in rows_of(scheduler).items():
            assert rows == 1
            served[sequence] += 1
    assert min(served.values()) >= 30 * budget // 5 - 1


def test_the_plan_never_exceeds_the_budget_and_always_moves():
    random = Random(1)
    for _ in range(300):
        scheduler = make_scheduler(budget=random.randint(1, 20), slots=8)
        sequences = [add(scheduler, random.randint(1, 30)) for _ in range(random.randint(1, 8))]
        scheduler.admit()
        for sequence in sequences:
            sequence.num_computed = random.randrange(len(sequence.ids))
            if sequence.num_uncomputed == 1:
                sequence.drafts = [0] * random.randint(0, 3)
        plan = rows_of(scheduler)
        assert plan
        if len(sequences) <= scheduler.limits.max_tokens_per_step:
            assert all(s in plan for s in sequences if s.num_uncomputed == 1)


def test_draft_length_leaves_room_for_the_token_that_follows():
    scheduler = make_scheduler()
    sequence = add(scheduler, 4, max_tokens=5)
    scheduler.admit()
    assert scheduler.draft_length(sequence) == 3
    sequence.ids += [1, 2]
    assert scheduler.draft_length(sequence) == 2
    sequence.ids += [1, 2]
    assert scheduler.draft_length(sequence) == 0


def test_nothing_is_drafted_that_no_step_has_rows_for():
    scheduler = make_scheduler(budget=5, slots=8)
    sequences = [add(scheduler, 4) for _ in range(3)]
    scheduler.admit()
    assert scheduler.draft_length(sequences[0]) == 2
    sequences = [add(scheduler, 4) for _ in range(4)]
    scheduler.admit()
    assert scheduler.draft_length(sequences[0]) == 0

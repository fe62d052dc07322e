"""The promise at engine level: the tokens of a request depend on the request alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from random import Random

import pytest

from inkling.engine.request import StopRules
from inkling.errors import InklingError, QueueFullError, RequestError
from tests.engine.harness import MODEL, Bench, Letters, arrive, random_bench, request_of, requests_of


@pytest.mark.parametrize("seed", range(40))
def test_tokens_do_not_depend_on_drafts_batch_chunks_order_or_page_sizes(seed: int):
    random = Random(seed)
    num_drafts = seed % 6
    bench = random_bench(random, num_drafts)
    arrive(bench, random, requests_of(seed, random.randint(1, 24), num_drafts))
    bench.run()
    bench.check_answers()
    if num_drafts == 0:
        assert bench.draft.calls == 0


def test_every_acceptance_count_occurs_and_is_counted():
    bench = Bench(num_drafts=5, slots=8, seed=3)
    accepted = Counter()
    verify = bench.engine._verify

    def spy(plan, tokens):
        verify(plan, tokens)
        accepted.update(segment.accepted for segment in plan if segment.num_drafts == 5)

    bench.engine._verify = spy
    for request in requests_of(9, 60, 5):
        bench.submit(dataclasses.replace(request, num_draft_tokens=5))
    bench.run()
    bench.check_answers()
    assert min(accepted[n] for n in range(6)) >= 5


def test_accepted_drafts_save_target_steps():
    steps = {}
    for num_drafts, probability in ((0, 0), (3, 0), (3, 1)):
        bench = Bench(num_drafts=num_drafts, probability=probability)
        bench.submit(request_of(6, 40, num_drafts))
        bench.run()
        bench.check_answers()
        steps[num_drafts, probability] = bench.target.calls
    assert steps == {(0, 0): 40, (3, 0): 40, (3, 1): 1 + 10}  # 1 token from the prompt, then 4 a step


def test_counters_hold_drafts_verified_and_those_accepted_and_emitted():
    bench = Bench(num_drafts=3, probability=1)
    reply = bench.submit(request_of(6, 9))
    bench.run()
    last = reply.chunks[-1]  # 1 token; then 4 and 4
    assert (last.num_input_tokens, last.total_draft_tokens, last.total_accepted_draft_tokens) == (6, 6, 6)
    assert last.final and last.finish_reason == "length"


def test_accepted_drafts_behind_the_cut_are_not_counted():
    request = request_of(6, 30)
    tokens, _ = MODEL.answer(request)
    position = next(i for i in range(2, 30) if i % 4 == 2 and tokens[i] not in tokens[:i])  # second of four
    stopped = dataclasses.replace(request, stop=StopRules(30, stop_ids=frozenset({tokens[position]})))
    bench = Bench(num_drafts=3, probability=1)
    reply = bench.submit(stopped)
    bench.run()
    bench.check_answers()
    steps = position // 4 + 1
    assert len(reply.ids) == position + 1
    assert reply.chunks[-1].total_draft_tokens == 3 * steps
    assert reply.chunks[-1].total_accepted_draft_tokens == 3 * (steps - 1) + 2


def test_drafts_stop_where_no_token_could_follow_them():
    bench = Bench(num_drafts=3, probability=1)
    bench.submit(request_of(5, 7))
    bench.run()
    bench.check_answers()
    assert bench.target.rows == [5, 4, 2]  # 1 + 4 + 2 tokens
    assert bench.draft.window_rows == [5, 4]  # what all N accepted drafts leave to do: no row twice
    bench = Bench(num_drafts=3, probability=0)
    bench.submit(request_of(5, 7))
    bench.run()
    bench.check_answers()
    assert bench.target.rows == [5, 4, 4, 4, 3, 2, 1]  # one token each
    assert bench.draft.calls == 5  # none when no draft could follow


def test_answers_of_two_tokens_never_reach_the_draft():
    bench = Bench(num_drafts=3, budget=3)  # prompts in several chunks
    bench.submit(request_of(8, 1)), bench.submit(request_of(8, 2, seed=6))
    bench.run()
    bench.check_answers()
    assert bench.draft.calls == 0


def test_a_request_may_turn_drafting_off_beside_one_that_drafts():
    bench = Bench(num_drafts=3, probability=1)
    off, on = bench.submit(request_of(5, 9, 0)), bench.submit(request_of(5, 9, 3, seed=6))
    bench.run()
    bench.check_answers()
    assert off.chunks[-1].total_draft_tokens == 0 < on.chunks[-1].total_draft_tokens


def test_an_engine_without_a_draft_model():
    bench = Bench(num_drafts=0)
    bench.engine._draft = None
    bench.submit(request_of(5, 9, 0))
    bench.run()
    bench.check_answers()


def test_the_answer_is_cut_to_the_context():
    bench = Bench(context=20)
    reply = bench.submit(request_of(15, 50))
    full = bench.submit(request_of(19, 50, seed=6))
    bench.run()
    bench.check_answers()
    assert (len(reply.ids), reply.finish_reason) == (5, "length")
    assert (len(full.ids), full.finish_reason) == (1, "length")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (request_of(0, 5), "0 tokens; 1 to 19"),
        (request_of(20, 5), "20 tokens; 1 to 19"),
        (request_of(4, 0), "max_tokens is 0"),
        (request_of(4, 5, 4), "num_draft_tokens is 4; it must be 0 to 3"),
        (request_of(4, 5, -1), "num_draft_tokens is -1"),
    ],
)
def test_a_bad_request_is_refused_and_leaves_nothing_behind(request_, message):
    bench = Bench(context=20)
    with pytest.raises(RequestError, match=message):
        bench.submit(request_)
    assert not bench.engine.scheduler.has_work and bench.engine.sender.num_open == 0


def test_a_full_queue_is_refused_while_others_run():
    bench = Bench(slots=1, queue=2)
    for seed in range(1, 4):
        bench.submit(request_of(5, 8, seed=seed))
        bench.step()
    with pytest.raises(QueueFullError):
        bench.submit(request_of(5, 8))
    bench.run()
    bench.check_answers()


# Text and the cut


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("probability", [0, 1])
def test_a_stop_word_cuts_at_the_token_that_completes_it(stream: bool, probability: float):
    bench = Bench(num_drafts=3, probability=probability)
    request = request_of(5, 30)
    reply = bench.submit(request, stream=stream, assembler=Letters(stop_after=7))
    bench.run()
    bench.check_idle()
    tokens = MODEL.answer(request)[0][:7]
    assert (reply.ids, reply.finish_reason) == (tokens, "stop")
    assert reply.text == "".join(chr(97 + t) for t in tokens) + "."
    assert (len(reply.chunks) == 1) == (not stream)


def test_streamed_chunks_carry_the_tokens_of_each_step():
    bench = Bench(num_drafts=3, probability=1)
    reply = bench.submit(request_of(5, 9), assembler=Letters())
    bench.run()
    assert [len(chunk.ids) for chunk in reply.chunks] == [1, 4, 4]
    assert [len(chunk.text) for chunk in reply.chunks] == [1, 4, 5]
    assert [chunk.finish_reason for chunk in reply.chunks] == ["", "", "length"]
    assert [chunk.final for chunk in reply.chunks] == [False, False, True]


@pytest.mark.parametrize("stream", [True, False])
def test_trouble_with_the_text_of_one_request_ends_that_request_only(stream: bool):
    bench = Bench()
    bad = bench.submit(request_of(5, 30), stream=stream, assembler=Letters(fail_after=3))
    good = request_of(5, 30, seed=6)
    reply = bench.submit(good, assembler=Letters())
    bench.run()
    bench.check_idle()
    assert isinstance(bad.error, InklingError) and "no such letter" in str(bad.error)
    assert reply.ids == MODEL.answer(good)[0]


@pytest.mark.parametrize("min_tokens", [0, 3, 12])
def test_stop_ids_end_a_request_only_after_min_tokens(min_tokens: int):
    bench = Bench(num_drafts=3, slots=8)
    for seed in range(40):
        stop = StopRules(12, min_tokens, frozenset(range(0, 23, 4)))
        bench.submit(dataclasses.replace(request_of(4, 12, seed=seed), stop=stop))
    bench.run()
    bench.check_answers()
    lengths = [len(reply.ids) for _, reply in bench.sent]
    assert min(lengths) == (12 if min_tokens == 12 else min_tokens + 1)

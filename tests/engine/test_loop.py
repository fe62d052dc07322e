"""The promise at engine level: the tokens of a request depend on the request alone."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from random import Random

import pytest

from inkling.engine.pages import Model
from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from inkling.errors import (
    CancelledError,
    DrainingError,
    GenerationError,
    InklingError,
    ModelError,
    QueueFullError,
    RequestError,
    StepGapError,
)
from tests.engine.harness import MODEL, Bench, make_layout, random_request


def requests_of(seed: int, count: int, num_drafts: int) -> list[GenerateRequest]:
    random = Random(seed)
    return [random_request(random, num_drafts) for _ in range(count)]


def request_of(num_prompt: int, max_tokens: int, num_drafts: int = 3, seed: int = 5) -> GenerateRequest:
    prompt = tuple((7 * i + seed) % 23 for i in range(num_prompt))
    return GenerateRequest(
        prompt, SamplingParams(seed=seed), StopRules(max_tokens), num_draft_tokens=num_drafts
    )


def random_bench(random: Random, num_drafts: int, **options) -> Bench:
    window = random.randint(2, 9)
    sizes = (random.choice((1, 4, 16)), random.choice((1, 4, 5)), random.choice((1, 2, 3, 8)))
    sequences = random.choice((None, 1.3))
    bench = Bench(
        num_drafts=num_drafts,
        budget=random.choice((1, 2, 7, 64, 1000)),
        slots=random.choice((1, 4, 16)),
        probability=random.choice((0, 0.5, 0.7, 1)),
        seed=random.getrandbits(32),
        layout=lambda limits: make_layout(limits, window=window, page_sizes=sizes, sequences=sequences),
        **options,
    )
    if random.random() < 0.5:
        choice = Random(random.getrandbits(32))
        bench.engine.scheduler.draft_length = lambda sequence: choice.randint(0, sequence.max_drafts)
    return bench


def arrive(bench: Bench, random: Random, requests: list[GenerateRequest]) -> None:
    """Submits in random order, steps in between."""
    for request in random.sample(requests, len(requests)):
        bench.submit(request, stream=random.random() < 0.5)
        while random.random() < 0.5:
            bench.step()


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


def test_answers_of_two_tokens_never_reach_the_draft():
    bench = Bench(num_drafts=3)
    bench.submit(request_of(5, 1)), bench.submit(request_of(5, 2, seed=6))
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


class Letters:
    """Token n is the letter n; the word "stop" is completed when ``stop_after`` tokens have come."""

    def __init__(self, stop_after: int = 1 << 30, fail_after: int = 1 << 30):
        self.stop_after, self.fail_after = stop_after, fail_after
        self.count, self.text = 0, ""

    def append(self, token_id: int) -> bool:
        self.count += 1
        if self.count >= self.fail_after:
            raise ValueError("no such letter")
        self.text += chr(97 + token_id)
        return self.count >= self.stop_after

    def take(self) -> str:
        text, self.text = self.text, ""
        return text

    def finish(self) -> str:
        return self.take() + "."


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


# Cancellation and deadlines


def pages_free(bench: Bench) -> bool:
    pools = [pool for pools in bench.engine.scheduler.allocator.pools.values() for pool in pools]
    return all(len(pool.free) == pool.num_usable for pool in pools)


def test_a_cancelled_request_gives_its_pages_back_at_the_next_step():
    bench = Bench()
    reply = bench.submit(request_of(9, 100))
    for _ in range(5):
        bench.step()
    assert not pages_free(bench)
    reply.cancelled = True  # seen by the poll between this step and the next
    bench.step()
    bench.step()
    assert pages_free(bench)
    assert isinstance(reply.error, CancelledError) and reply.finished
    bench.check_idle()


def test_a_waiting_request_can_be_cancelled():
    bench = Bench(slots=1)
    first, second = bench.submit(request_of(5, 20)), bench.submit(request_of(5, 20, seed=6))
    bench.step()
    second.cancelled = True
    bench.run()
    assert isinstance(second.error, CancelledError)
    assert first.error is None


@pytest.mark.parametrize("seed", range(15))
def test_cancelling_some_leaves_the_answers_of_the_others(seed: int):
    random = Random(seed)
    bench = random_bench(random, 3)
    cancelled = set()
    for request in requests_of(seed, 20, 3):
        reply = bench.submit(request)
        for _, other in random.sample(bench.sent, 1):
            if random.random() < 0.4 and not other.finished:
                other.cancelled = True
                cancelled.add(id(other))
        while random.random() < 0.6:
            bench.step()
    bench.run()
    bench.check_idle()
    survivors = 0
    for request, reply in bench.sent:
        if reply.error is not None:
            assert isinstance(reply.error, CancelledError) and id(reply) in cancelled
        else:
            survivors += 1
            assert (reply.ids, reply.finish_reason) == MODEL.answer(request)
    assert 0 < survivors < 20


def test_a_deadline_ends_a_request_with_what_it_has(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    bench = Bench(slots=1)
    timed = dataclasses.replace(request_of(5, 100), timeout_us=2_000_000)
    reply = bench.submit(timed, assembler=Letters())
    waiting = bench.submit(dataclasses.replace(request_of(5, 100, seed=6), timeout_us=3_000_000))
    other = bench.submit(request_of(5, 10, seed=7))
    for _ in range(4):
        bench.step()
    now[0] += 2.5
    bench.step()
    assert reply.finish_reason == "timeout" and reply.error is None and reply.text.endswith(".")
    assert reply.ids == MODEL.answer(timed)[0][: len(reply.ids)] and reply.ids
    now[0] += 1
    bench.run()
    assert waiting.finish_reason == "timeout"
    assert other.ids == MODEL.answer(bench.sent[2][0])[0]
    bench.check_idle()


# Failures


FAILURES = [
    ModelError("a layer burst"),
    GenerationError("another target"),
    RuntimeError("server not ready"),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("client", ["target", "draft"])
@pytest.mark.parametrize("call", [0, 1, 6])
def test_a_failed_call_answers_every_open_request_and_later_ones_are_served(client, when, call, error):
    bench = Bench(slots=3, **{f"{client}_failures": {call: (when, error)}})
    for request in requests_of(call, 6, 3):
        bench.submit(dataclasses.replace(request, num_draft_tokens=3, stop=StopRules(20)))
    bench.run()
    bench.check_idle()
    failed = [reply for _, reply in bench.sent if reply.error is not None]
    assert failed
    for reply in failed:
        expected = error if isinstance(error, InklingError) else InklingError
        assert reply.error is error or (
            type(reply.error) is expected and "server not ready" in str(reply.error)
        )
    bench.sent.clear()
    for request in requests_of(99, 6, 3):
        bench.submit(request)
    bench.run()
    bench.check_answers()


def test_a_request_that_ended_in_a_step_that_fails_later_is_answered_too():
    """Its text failed at the commit, then the draft call of the same step fails."""
    bench = Bench(probability=1, draft_failures={2: ("before", ModelError("a layer burst"))})
    bad = bench.submit(request_of(5, 30), assembler=Letters(fail_after=1 + 4 + 1))  # in the third step
    other = bench.submit(request_of(5, 30, seed=6))
    bench.run()
    bench.check_idle()
    assert "no such letter" in str(bad.error) and isinstance(other.error, ModelError)


@pytest.mark.parametrize("client", ["target", "draft"])
def test_an_answer_of_the_wrong_size_is_an_error(client):
    bench = Bench(**{f"{client}_failures": {3: ("short", None)}})
    reply = bench.submit(request_of(5, 40))
    bench.run()
    assert isinstance(reply.error, ModelError) and "were asked for" in str(reply.error)
    bench.check_idle()


@pytest.mark.parametrize("seed", range(20))
def test_random_failures_never_change_a_token(seed: int):
    random = Random(seed)
    kinds = [lambda: ModelError("burst"), lambda: RuntimeError("gone"), lambda: StepGapError("a gap")]

    def failures() -> dict:
        calls = random.sample(range(80), 4)
        return {call: (random.choice(("before", "after", "short")), random.choice(kinds)()) for call in calls}

    bench = random_bench(random, 3, target_failures=failures(), draft_failures=failures())
    arrive(bench, random, requests_of(seed, 24, 3))
    bench.run()
    bench.check_idle()
    for request, reply in bench.sent:
        assert reply.error is not None or (reply.ids, reply.finish_reason) == MODEL.answer(request)


@pytest.mark.parametrize("seed", range(10))
def test_a_gap_is_closed_by_opening_every_sequence_again(seed: int, caplog):
    random = Random(seed)
    bench = random_bench(random, 3)
    for request in requests_of(seed, 12, 3):
        bench.submit(request)
    while bench.step():
        if random.random() < 0.3:
            random.choice((bench.target, bench.draft)).lose_step()
    bench.check_answers()
    assert caplog.text.count("sequences again") > 2


def test_a_second_gap_in_a_row_is_an_error():
    gaps = {call: ("before", StepGapError("a gap")) for call in (2, 3)}
    bench = Bench(target_failures=gaps)
    reply = bench.submit(request_of(5, 20))
    bench.run()
    assert isinstance(reply.error, StepGapError)
    bench.check_idle()


@pytest.mark.parametrize(
    "part", ["_retire", "_admit", "_run_target", "_verify", "_commit", "_run_draft", "_reply"]
)
def test_when_the_engine_itself_fails_everyone_is_answered_and_the_loop_goes_on(part: str):
    bench = Bench(slots=3)
    original, calls = getattr(bench.engine, part), Counter()

    def broken(*args):
        calls["all"] += 1
        if calls["all"] == 4:
            raise KeyError("our own mistake")
        return original(*args)

    setattr(bench.engine, part, broken)
    for request in requests_of(4, 6, 3):
        bench.submit(request)
    bench.run()
    bench.check_idle()
    assert any("our own mistake" in str(reply.error) for _, reply in bench.sent)
    bench.sent.clear()
    bench.submit(request_of(5, 20))
    bench.run()
    bench.check_answers()


def test_a_step_number_wraps_before_it_leaves_its_word():
    bench = Bench()
    bench.engine._step = 2**31 - 4
    bench.submit(request_of(5, 40))
    bench.run()
    bench.check_answers()
    assert bench.engine._step < 100


# Threads


def wait_until(holds, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)


def test_many_threads_submit_to_a_running_engine():
    bench = Bench(num_drafts=3, slots=8)
    bench.engine.start()
    requests = requests_of(1, 60, 3)

    def client(part: list[GenerateRequest]) -> None:
        for request in part:
            bench.submit(request)

    threads = [threading.Thread(target=client, args=(requests[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bench.engine.drain(30)
    bench.check_answers()
    with pytest.raises(DrainingError):
        bench.submit(request_of(5, 5))
    bench.engine.close()


def test_a_running_engine_polls_for_cancellation_and_goes_idle():
    bench = Bench(
        context=1 << 20, layout=lambda limits: make_layout(dataclasses.replace(limits, max_context=9000))
    )
    bench.engine.start()
    reply = bench.submit(request_of(5, 8000))
    wait_until(lambda: reply.chunks)
    reply.cancelled = True
    wait_until(lambda: reply.finished)
    assert isinstance(reply.error, CancelledError)
    other = bench.submit(request_of(5, 20, seed=8))
    wait_until(lambda: other.finished)
    assert other.ids == MODEL.answer(bench.sent[1][0])[0]
    bench.engine.close()
    assert pages_free(bench)


def test_close_answers_what_is_open():
    bench = Bench(
        slots=1,
        context=1 << 20,
        layout=lambda limits: make_layout(dataclasses.replace(limits, max_context=9000)),
    )
    bench.engine.start()
    running, waiting = bench.submit(request_of(5, 8000)), bench.submit(request_of(5, 8000, seed=6))
    wait_until(lambda: running.chunks)
    bench.engine.close()
    assert isinstance(running.error, DrainingError) and isinstance(waiting.error, DrainingError)
    with pytest.raises(DrainingError):
        bench.submit(request_of(5, 5))


def test_close_answers_even_when_a_model_never_returns():
    bench = Bench()
    hang = threading.Event()
    bench.engine._target = type("Hung", (), {"step": lambda self, control: hang.wait(20)})()
    bench.engine.start()
    reply = bench.submit(request_of(5, 20))
    time.sleep(0.05)
    bench.engine.close(timeout_s=0.2)
    assert isinstance(reply.error, DrainingError)
    hang.set()


def test_idle_damage_is_repaired_and_logged(caplog):
    bench = Bench()
    bench.submit(request_of(5, 5))
    bench.run()
    bench.engine.scheduler.allocator.pools[Model.TARGET][0].free.pop()
    bench.engine._check_idle()
    assert "do not add up" in caplog.text
    bench.submit(request_of(5, 20))
    bench.run()
    bench.check_answers()

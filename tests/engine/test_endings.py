"""However a request ends, it is answered once, gives everything back, and no other request notices."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from random import Random

import pytest

from inkling.engine.pages import Model
from inkling.engine.request import GenerateRequest, StopRules
from inkling.errors import (
    CancelledError,
    DrainingError,
    GenerationError,
    InklingError,
    ModelError,
    ModelLostError,
    StepGapError,
)
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


def test_a_cancelled_request_gives_its_pages_back_at_the_next_step():
    bench = Bench()
    reply = bench.submit(request_of(9, 100))
    for _ in range(5):
        bench.step()
    assert not bench.pages_free()
    reply.cancelled = True  # seen by the poll between this step and the next
    bench.step()
    bench.step()
    assert bench.pages_free()
    assert isinstance(reply.error, CancelledError) and reply.finished
    bench.check_idle()


def test_a_waiting_request_can_be_cancelled():
    bench = Bench(slots=1)
    first, second = bench.submit(request_of(5, 20)), bench.submit(request_of(5, 20, seed=6))
    bench.step()
    second.cancelled = True
    bench.step()
    bench.step()
    assert not bench.engine.scheduler.waiting
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
    assert bench.pages_free()


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


def test_abandon_answers_at_once_what_runs_and_what_waits_while_a_model_never_returns():
    bench = Bench(slots=1)
    hang = threading.Event()
    bench.engine._target = type("Hung", (), {"step": lambda self, control: hang.wait(20)})()
    bench.engine.start()
    replies = [bench.submit(request_of(5, 20, seed=i)) for i in range(3)]
    time.sleep(0.05)
    lost = ModelLostError("inkling_target ended")
    bench.engine.abandon(lost)
    wait_until(lambda: all(reply.finished for reply in replies))
    assert all(reply.error is lost for reply in replies)
    with pytest.raises(DrainingError):
        bench.submit(request_of(5, 5))
    hang.set()  # the call comes back after all: nobody is answered twice, which a recorded reply checks
    bench.engine.close()
    bench.check_idle()


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

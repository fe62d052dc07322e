"""Increments gather into one chunk, FINAL goes out exactly once, and one bad client ends alone."""

from __future__ import annotations

import threading
import time

import pytest

from inkling.engine.metrics import EngineMetrics
from inkling.engine.outbox import POLL_ROUND_S, Outbox, Sender
from inkling.errors import CancelledError, InklingError
from tests.engine.harness import RecordedReply


def make(stream: bool = True, **reply_options) -> tuple[Sender, Outbox, RecordedReply, list]:
    cancels: list[int] = []
    sender = Sender(lambda: cancels.append(1), EngineMetrics(0))
    reply = RecordedReply(**reply_options)
    outbox = Outbox(reply, stream, 7)
    sender.register(outbox)
    return sender, outbox, reply, cancels


def test_increments_between_two_sends_make_one_chunk():
    sender, outbox, reply, _ = make()
    outbox.push([1], "a", "", 0, 0)
    outbox.push([2, 3], "b", "", 3, 1)
    sender.post([outbox])
    sender.post([outbox])
    sender.send_ready()
    outbox.push([4], "c", "stop", 6, 4)
    sender.post([outbox])
    sender.send_ready()
    assert [(c.ids, c.text, c.final) for c in reply.chunks] == [([1, 2, 3], "ab", False), ([4], "c", True)]
    assert [(c.total_draft_tokens, c.total_accepted_draft_tokens) for c in reply.chunks] == [(3, 1), (6, 4)]
    assert all(c.num_input_tokens == 7 for c in reply.chunks)
    assert sender.num_open == 0


def test_a_slow_sender_is_owed_one_turn_however_often_the_loop_posts():
    sender, outbox, _, _ = make()
    for token in range(100):
        outbox.push([token], "", "", 0, 0)
        sender.post([outbox])
    assert len(sender._ready) == 1


def test_without_streaming_everything_comes_in_the_final_chunk():
    sender, outbox, reply, _ = make(stream=False)
    for token in range(3):
        outbox.push([token], "", "", 0, 0)
        sender.post([outbox])
        sender.send_ready()
    assert not reply.chunks
    outbox.push([3], "text", "length", 0, 0)
    sender.post([outbox])
    sender.send_ready()
    assert [(c.ids, c.text, c.final) for c in reply.chunks] == [([0, 1, 2, 3], "text", True)]


def test_an_error_replaces_what_was_not_sent_and_nothing_follows_it():
    sender, outbox, reply, _ = make()
    outbox.push([1], "a", "", 0, 0)
    outbox.fail(CancelledError("gone"))
    outbox.push([2], "b", "stop", 0, 0)
    outbox.fail(InklingError("late"))
    sender.post([outbox])
    sender.send_ready()
    sender.post([outbox])
    sender.send_ready()
    assert len(reply.chunks) == 1
    chunk = reply.chunks[0]
    assert isinstance(chunk.error, CancelledError) and chunk.final and not chunk.ids and not chunk.text


def test_an_error_behind_the_final_chunk_is_dropped():
    sender, outbox, reply, _ = make()
    outbox.push([1], "", "stop", 0, 0)
    outbox.fail(InklingError("late"))
    sender.post([outbox])
    sender.send_ready()
    assert [c.error for c in reply.chunks] == [None]


@pytest.mark.parametrize("finish_reason", ["", "stop"])
def test_a_failed_send_ends_its_request_with_one_error_and_no_other(finish_reason: str):
    sender, outbox, reply, cancels = make(fail_sends=[0])
    healthy, healthy_reply = Outbox(other := RecordedReply(), True, 1), other
    sender.register(healthy)
    outbox.push([1], "a", finish_reason, 0, 0)
    healthy.push([5], "x", "stop", 0, 0)
    sender.post([outbox, healthy])
    sender.send_ready()
    outbox.push([2], "b", "stop", 0, 0)
    sender.post([outbox])
    sender.send_ready()
    assert len(reply.chunks) == 1 and "could not be sent" in str(reply.error) and reply.finished
    assert outbox.cancelled and cancels
    assert healthy_reply.ids == [5] and healthy_reply.finished
    assert sender.num_open == 0


def test_when_the_error_cannot_be_sent_either_the_request_is_given_up():
    sender, outbox, reply, cancels = make(fail_sends=[0, 1])
    outbox.push([1], "a", "", 0, 0)
    sender.post([outbox])
    sender.send_ready()
    assert not reply.chunks and outbox.cancelled and cancels and sender.num_open == 0


def test_polls_go_round_and_stop_at_the_first_yes():
    sender, outbox, reply, cancels = make()
    polls = []
    reply.is_cancelled = lambda: polls.append(1) or len(polls) == 3
    for _ in range(6):
        sender.poll_all()
    assert len(polls) == 3 and len(cancels) == 1 and outbox.cancelled


def test_a_poll_that_raises_counts_as_cancelled():
    sender, outbox, reply, cancels = make()

    def broken() -> bool:
        raise RuntimeError("no such request")

    reply.is_cancelled = broken
    sender.poll_all()
    assert outbox.cancelled and cancels


def test_finished_requests_are_not_polled():
    sender, outbox, reply, _ = make()
    polls = []
    reply.is_cancelled = lambda: polls.append(1) or False
    outbox.push([1], "", "stop", 0, 0)
    sender.post([outbox])
    sender.send_ready()
    sender.poll_all()
    assert not polls


def test_the_thread_sends_in_order_polls_all_and_ends_when_closed():
    cancels = threading.Event()
    sender = Sender(cancels.set, EngineMetrics(0))
    sender.start()
    replies = [RecordedReply() for _ in range(20)]
    outboxes = [Outbox(reply, True, 1) for reply in replies]
    for outbox in outboxes:
        sender.register(outbox)
    replies[13].cancelled = True
    assert cancels.wait(10) and outboxes[13].cancelled
    for token in range(50):
        for outbox in outboxes:
            outbox.push([token], "", "stop" if token == 49 else "", 0, 0)
        sender.post(outboxes)
        time.sleep(0.0005)
    assert sender.wait_all_sent(10)
    assert all(reply.ids == list(range(50)) and reply.finished for reply in replies)
    sender.close()
    assert not sender._thread.is_alive()


def test_a_busy_thread_polls_by_the_clock_not_by_the_send():
    sender, outbox, reply, _ = make()
    polls = []
    reply.is_cancelled = lambda: polls.append(1) or False
    sender.start()
    start = time.monotonic()
    for token in range(300):
        outbox.push([token], "", "", 0, 0)
        sender.post([outbox])
        time.sleep(0.0002)
    elapsed = time.monotonic() - start
    outbox.push([1], "", "stop", 0, 0)
    sender.post([outbox])
    sender.close()
    assert 1 <= len(polls) <= 2 + elapsed / POLL_ROUND_S


def test_close_sends_what_is_ready_first():
    sender, outbox, reply, _ = make()
    sender.start()
    outbox.push([1, 2], "", "stop", 0, 0)
    sender.post([outbox])
    sender.close()
    assert reply.ids == [1, 2] and reply.finished

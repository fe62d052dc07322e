"""Processes of a server under load are killed and stopped, one by one."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest

from inkling import process_group
from inkling.protocol import DRAFT_MODEL, ENSEMBLE_MODEL, TARGET_MODEL
from tests.qa.conftest import ANSWERED_S, THREADS
from tests.server.streams import OpenPost, OpenStream

pytestmark = pytest.mark.qa
ENDLESS = 4000  # tokens: more than come before the fault is over
OPTIONS = ("--threads", THREADS, "--max-running-sequences", "2")  # of five requests three wait


class Load:
    """Open and queued requests, and how they ended."""

    def __init__(self, command):
        self.streams = [OpenStream(command.grpc_url, ENDLESS) for _ in range(4)]
        self.post = OpenPost(command.http_url, ENDLESS)
        command.wait_for(lambda: sum(bool(s.ids) for s in self.streams) + 1 >= 2, "first tokens")

    def join(self, fault: float) -> list[str]:
        """The errors of the streams. Every request must be answered in time, and none with all its tokens."""
        for request in (*self.streams, self.post):
            request.join()
            assert request.ended - fault < ANSWERED_S
        assert all(stream.error and len(stream.ids) < ENDLESS for stream in self.streams)
        assert self.post.status != 200
        return [str(stream.error) for stream in self.streams]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("model", [TARGET_MODEL, DRAFT_MODEL, ENSEMBLE_MODEL])
def test_a_lost_model_process_is_answered_for_and_the_server_replaced(
    serve, tiny_checkpoint, expected, model: str, number: signal.Signals
) -> None:
    command = serve("--checkpoint", str(tiny_checkpoint), *OPTIONS, "--restart", "1")
    command.wait_ready()
    expected.check(command)
    load, pid = Load(command), command.stub(model)
    fault = time.monotonic()
    os.kill(pid, number)
    errors = load.join(fault)
    with suppress(ProcessLookupError):  # where it was replaced already
        os.kill(pid, signal.SIGCONT)
    if model != ENSEMBLE_MODEL:  # else nobody is there to say it
        # server 2.51 has one status for every error of this endpoint, 400; later ones say 503
        assert all(model in error for error in (*errors, load.post.answer)), (errors, load.post.answer)
        assert load.post.status in (400, 503)
    command.wait_ready(start=2)
    assert process_group.state(pid) in "ZX"
    expected.check(command)
    (reason,) = (line for line in command.log_text().splitlines() if "; restart 1 of 1 in 1 s" in line)
    assert model in reason
    command.signal(signal.SIGTERM)
    assert command.wait_stopped() == 0
    assert command.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_is_ended_by_somebody_else_ends_serve_with_the_reason(
    serve, tiny_checkpoint, number: signal.Signals
) -> None:
    command = serve("--checkpoint", str(tiny_checkpoint), *OPTIONS)
    command.wait_ready()
    load, fault = Load(command), time.monotonic()
    os.kill(command.server_pid, number)
    load.join(fault)
    assert command.wait_stopped() == 1
    assert "error: " in command.log_text()
    assert command.leftovers() == []


def test_after_a_killed_serve_the_next_one_removes_what_is_left(serve, tiny_checkpoint, expected) -> None:
    killed = serve("--checkpoint", str(tiny_checkpoint), *OPTIONS)
    killed.wait_ready()
    load, fault = Load(killed), time.monotonic()
    stopped = killed.stub(TARGET_MODEL)
    os.kill(stopped, signal.SIGSTOP)  # it cannot even see that its parent is gone
    killed.signal(signal.SIGKILL)
    killed.wait_stopped()
    load.join(fault)
    assert killed.leftovers(), "nothing to remove: the test shows nothing"
    command = serve("--checkpoint", str(tiny_checkpoint), *OPTIONS)
    command.wait_ready()
    assert process_group.state(stopped) in "ZX" and killed.shared_memory() == [] and not killed.processes()
    expected.check(command)
    command.signal(signal.SIGTERM)
    assert command.wait_stopped() == 0
    assert command.leftovers() == [] == killed.leftovers()

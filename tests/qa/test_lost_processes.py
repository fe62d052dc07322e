"""Processes of a server under load are killed, stopped and made to hang, one by one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from inkling import process_group
from inkling.liveness import CALLED_MODELS, SERVER
from inkling.protocol import MODELS, TARGET_MODEL
from tests.qa.conftest import ANSWERED_S, THREADS
from tests.server.streams import OpenPost, OpenStream

pytestmark = pytest.mark.qa
ENDLESS = 4000  # tokens: more than come before the fault is over
CLOSED_S = 5.0  # after a fault of the process that would have to answer
OPTIONS = ("--threads", THREADS, "--max-running-sequences", "2")  # of five requests three wait


class Load:
    """Open and queued requests, and how they ended."""

    def __init__(self, command):
        self.streams = [OpenStream(command.grpc_url, ENDLESS) for _ in range(4)]
        self.post = OpenPost(command.http_url, ENDLESS)
        command.wait_for(lambda: sum(bool(s.ids) for s in self.streams) + 1 >= 2, "first tokens")

    def join(self, fault: float, bound_s: float = ANSWERED_S) -> list[str]:
        """The errors of the streams. Every request must be answered in time, and none with all its tokens."""
        for request in (*self.streams, self.post):
            request.join()
            assert request.ended - fault < bound_s
        assert all(stream.error and len(stream.ids) < ENDLESS for stream in self.streams)
        assert self.post.status != 200
        return [str(stream.error) for stream in self.streams]


FAULTS = {
    f"{name} {how}": (name, number)
    for how, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP))
    for name in (*MODELS, SERVER)
    if (name, how) != (SERVER, "killed")  # the next test
}


@pytest.mark.parametrize(("name", "number"), FAULTS.values(), ids=FAULTS)
def test_a_lost_process_is_answered_for_and_the_server_replaced(
    serve, tiny_checkpoint, expected, name: str, number: signal.Signals
) -> None:
    command = serve("--checkpoint", str(tiny_checkpoint), *OPTIONS, "--restart", "1")
    command.wait_ready()
    expected.check(command)
    load, pid = Load(command), command.server_pid if name == SERVER else command.stub(name)
    fault = time.monotonic()
    os.kill(pid, number)
    errors = load.join(fault, ANSWERED_S if name in CALLED_MODELS else CLOSED_S)
    with suppress(ProcessLookupError):  # where it was replaced already
        os.kill(pid, signal.SIGCONT)
    if name in CALLED_MODELS:  # else nobody is there to say it
        # server 2.51 has one status for every error of this endpoint, 400; later ones say 503
        assert all(name in error for error in (*errors, load.post.answer)), (errors, load.post.answer)
        assert load.post.status in (400, 503)
    check_replaced(command, expected, pid, name)


def check_replaced(command, expected, pid: int, *words: str) -> None:
    """The process ``pid`` is gone, for a reason that holds ``words``; the server after it is right, and stops."""
    command.wait_ready(start=2)
    assert process_group.state(pid) in "ZX"
    expected.check(command)
    (reason,) = (line for line in command.log_text().splitlines() if "; restart 1 of 1 in 1 s" in line)
    assert all(word in reason for word in words)
    command.signal(signal.SIGTERM)
    assert command.wait_stopped() == 0
    assert command.leftovers() == []


# Halts every thread of processes in a state that is not that of stopped ones, until they are killed.
TRACER = """
import ctypes, os, sys
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
for thread in (thread for pid in sys.argv[1:] for thread in os.listdir(f"/proc/{pid}/task")):
    for request in (0x4206, 0x4207):  # PTRACE_SEIZE, PTRACE_INTERRUPT
        if ptrace(request, int(thread), None, None):
            sys.exit(f"ptrace: {os.strerror(ctypes.get_errno())}")
print("halted", flush=True)
while True:
    os.waitpid(-1, 0x40000000)  # __WALL: threads, too
"""


@contextmanager
def halted(*pids: int) -> Iterator[None]:
    command = [sys.executable, "-c", TRACER, *map(str, pids)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tracer:
        if tracer.stdout.readline() != "halted\n":
            pytest.skip(f"a process cannot be halted here: {tracer.stderr.read()}")
        yield
        tracer.kill()


@pytest.mark.parametrize("models", [(), (TARGET_MODEL,)], ids=["alone", "and a model waits for it"])
def test_a_server_that_hangs_is_replaced(serve, tiny_checkpoint, expected, models: tuple[str, ...]) -> None:
    command = serve("--checkpoint", str(tiny_checkpoint), *OPTIONS, "--restart", "1")
    command.wait_ready()
    load, pid = Load(command), command.server_pid
    fault = time.monotonic()
    with halted(pid, *map(command.stub, models)):
        assert process_group.state(pid) == "t"
        load.join(fault)
    check_replaced(command, expected, pid, SERVER, "no answer to a health request")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_is_ended_by_somebody_else_ends_serve_with_the_reason(
    serve, tiny_checkpoint, check_new_server, number: signal.Signals
) -> None:
    command = serve("--checkpoint", str(tiny_checkpoint), *OPTIONS)
    command.wait_ready()
    load, fault = Load(command), time.monotonic()
    os.kill(command.server_pid, number)
    load.join(fault)
    assert command.wait_stopped() == 1
    assert "error: " in command.log_text()
    assert command.leftovers() == []
    check_new_server()


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

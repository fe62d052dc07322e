"""Faults of real servers. ``live`` and ``drafting`` serve the cases that must leave their server as it was; others
start their own.

A request counts as answered when it got its final response, an error, or a closed connection.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from inkling.client import stream_grpc
from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from tests.in_process import LocalModels, generate
from tests.server.conftest import (  # noqa: F401
    ServeCommand,
    demo_checkpoint,
    serve,
    start_server,
    tiny_checkpoint,
)

ANSWERED_S = 15.0  # after a fault, at the latest
THREADS = "1"  # part of the promise: the references are computed with as many
PROMPT = (5, 17, 3, 42, 8)
NUM_TOKENS = 24


class Expected:
    """Right answers of a checkpoint: of its target alone, in this process, without drafts."""

    def __init__(self, checkpoint: Path):
        self._models = LocalModels(checkpoint, threads=int(THREADS))
        self.ids = self.ids_of(PROMPT, SamplingParams(), StopRules(NUM_TOKENS))

    def ids_of(self, prompt: Sequence[int], sampling: SamplingParams, stop: StopRules) -> list[int]:
        request = GenerateRequest(tuple(prompt), sampling, stop, num_draft_tokens=0)
        return generate(self._models.engine(), [request])[0].ids

    def check(self, command: ServeCommand) -> None:
        """A new request gets the right tokens."""
        inputs = {"input_ids": list(PROMPT), "max_tokens": NUM_TOKENS, "ignore_eos": True}
        responses = stream_grpc(command.grpc_url, inputs, 60.0)
        assert [token for response in responses for token in response["output_ids"]] == self.ids


@pytest.fixture(scope="session")
def expected(tiny_checkpoint: Path) -> Expected:  # noqa: F811
    return Expected(tiny_checkpoint)


@pytest.fixture
def check_new_server(serve, tiny_checkpoint: Path, expected: Expected) -> Callable[[], None]:  # noqa: F811
    """Starts another server, which must give the right tokens and leave nothing behind."""

    def check() -> None:
        command = serve("--checkpoint", str(tiny_checkpoint), "--threads", THREADS)
        command.wait_ready()
        expected.check(command)
        command.signal(signal.SIGTERM)
        assert command.wait_stopped() == 0
        assert command.leftovers() == []

    return check


@contextmanager
def start_live(base: Path, checkpoint: Path, *options: str) -> Iterator[ServeCommand]:
    command = ServeCommand.start(base, "--checkpoint", str(checkpoint), "--threads", THREADS, *options)
    command.wait_ready()
    command.expected = Expected(checkpoint)
    yield command
    command.end()
    assert command.process.returncode == 0 and command.leftovers() == []


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path) -> Iterator[ServeCommand]:  # noqa: F811
    with start_live(tmp_path_factory.mktemp("live"), demo_checkpoint) as command:
        yield command


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path) -> Iterator[ServeCommand]:  # noqa: F811
    """Drafts in every step: after short answers ``auto`` may let a request draft nothing."""
    with start_live(tmp_path_factory.mktemp("drafting"), demo_checkpoint, "--draft-length", "fixed") as command:
        yield command


def sizes(command: ServeCommand) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in command.shared_memory()}


@contextmanager
def left_as_it_was(command: ServeCommand) -> Iterator[ServeCommand]:
    """Afterwards it must have the same processes, regions and files, and give the right tokens."""
    before = {member.pid for member in command.processes()}, sizes(command)
    files = sorted(path.name for path in command.run_folders()[0].iterdir())
    command.expected.check(command)
    yield command
    command.expected.check(command)
    assert ({member.pid for member in command.processes()}, sizes(command)) == before
    assert sorted(path.name for path in command.run_folders()[0].iterdir()) == files
    assert command.process.poll() is None, command.log_text()


@pytest.fixture
def undisturbed(live: ServeCommand) -> Iterator[ServeCommand]:
    with left_as_it_was(live):
        yield live


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

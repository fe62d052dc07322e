"""``inkling health`` against live servers: whole, loaded to the brim, and with a model's process dead or stopped."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inkling import process_group
from inkling.cli import app
from inkling.client import ResponseError, stream_http
from inkling.health import ailment
from inkling.protocol import DRAFT_MODEL, ENSEMBLE_MODEL, TARGET_MODEL

pytestmark = pytest.mark.server

DEMO = Path(__file__).parents[2] / "demo" / "checkpoint"


def stub_of(server, model: str) -> int:
    return next(
        member.pid
        for member in process_group.members(server.pid)
        if f"/{model}/" in Path(f"/proc/{member.pid}/cmdline").read_text()
    )


def test_a_whole_server_is_healthy(server):
    result = CliRunner().invoke(app, ["health", "--url", f"http://{server.http_url}"])
    assert result.exit_code == 0 and result.stdout == "healthy\n", result.output


def test_a_server_that_is_not_there_is_not():
    result = CliRunner().invoke(app, ["health", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "127.0.0.1:1 does not answer" in result.stderr


@pytest.mark.parametrize("model", [TARGET_MODEL, DRAFT_MODEL])
def test_a_dead_model_process_is_seen(start_server, tiny_checkpoint, model):
    server = start_server(tiny_checkpoint)
    assert ailment(server.http_url) == ""
    os.kill(stub_of(server, model), signal.SIGKILL)
    assert model in ailment(server.http_url, timeout_s=5.0)


def test_a_full_server_is_healthy_and_a_stopped_one_is_not(start_server):
    server = start_server(DEMO, max_running_sequences=1, max_queued_requests=1)  # slow enough to stay full
    request = {"input_ids": [1], "max_tokens": 3000, "ignore_eos": True}
    with closing(stream_http(server.http_url, request)) as running:
        next(running)  # it has the only place
        thread = threading.Thread(target=first_response, args=(server.http_url, request))
        thread.start()
        deadline = time.monotonic() + 10.0
        while not is_full(server.http_url):
            assert time.monotonic() < deadline, "the queue never was full: the answer is too short"
        assert ailment(server.http_url, timeout_s=0.5) == ""
        running.close()
        thread.join()
    os.kill(stub_of(server, ENSEMBLE_MODEL), signal.SIGSTOP)
    assert ailment(server.http_url, timeout_s=2.0)  # silence, or the server's own word after 1 s
    server.kill()  # it could not drain


def first_response(url: str, request: dict[str, object]) -> None:
    """Asks again while the queue's place is taken, by ``is_full`` for one."""
    while True:
        with suppress(ResponseError), closing(stream_http(url, request)) as responses:
            next(responses)
            return


def is_full(url: str) -> bool:
    try:
        list(stream_http(url, {"input_ids": [1], "max_tokens": 1, "timeout_ms": 1}))
    except ResponseError as error:
        assert "which is the bound" in str(error)
        return True
    return False

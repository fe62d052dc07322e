"""A client that goes away gives its place back. The server runs one sequence at a time, so the next request shows it.

Steps are counted by the server's own statistics of ``inkling_target``: one execution is one step.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from inkling.client import ResponseError, stream_grpc, stream_http
from inkling.server import RunningServer
from tests.server.conftest import start
from tests.server.streams import target_steps

pytestmark = pytest.mark.server
LONG = {"input_ids": [1, 2, 3], "max_tokens": 4000, "ignore_eos": True}
SHORT = {"input_ids": [4, 5, 6], "max_tokens": 5, "ignore_eos": True, "num_draft_tokens": 0}
# Between the moment the client leaves and the server's report of it lie some steps: the server must notice, and the
# sender asks each request about it every 50 ms. Steps after the report are held to two in the engine's own tests.
NOTICE_STEPS = 150


@pytest.fixture(scope="module")
def single(tiny_checkpoint) -> Iterator[RunningServer]:
    with start(tiny_checkpoint, max_running_sequences=1, threads=1) as server:
        yield server


def assert_place_is_free(server: RunningServer, steps_before: int) -> None:
    tokens = [t for response in stream_grpc(server.grpc_url, SHORT, 120.0) for t in response["output_ids"]]
    assert len(tokens) == SHORT["max_tokens"]
    assert (
        target_steps(server.http_url) - steps_before
        <= SHORT["max_tokens"] + NOTICE_STEPS
        < LONG["max_tokens"] // 5
    )


def test_a_cancelled_grpc_stream_gives_its_place_back(single: RunningServer) -> None:
    responses = stream_grpc(single.grpc_url, LONG)
    next(responses)
    before = target_steps(single.http_url)
    responses.close()
    assert_place_is_free(single, before)


def test_a_killed_client_gives_its_place_back(single: RunningServer) -> None:
    script = (
        "import sys; from inkling.client import stream_grpc\n"
        f"for r in stream_grpc(sys.argv[1], {LONG!r}): print('token', flush=True)\n"
    )
    client = subprocess.Popen([sys.executable, "-c", script, single.grpc_url], stdout=subprocess.PIPE)
    try:
        assert client.stdout.readline() == b"token\n"
        before = target_steps(single.http_url)
    finally:
        client.kill()
        client.wait()
        client.stdout.close()
    assert_place_is_free(single, before)


def test_a_disconnected_http_stream_gives_its_place_back(single: RunningServer) -> None:
    responses = stream_http(single.http_url, LONG)
    next(responses)
    before = target_steps(single.http_url)
    responses.close()
    assert_place_is_free(single, before)


def test_a_request_that_waits_can_be_cancelled(single: RunningServer) -> None:
    running = stream_grpc(single.grpc_url, LONG)
    next(running)
    waiting = stream_grpc(single.grpc_url, LONG, timeout_s=1.0)
    with pytest.raises(ResponseError, match="no response"):  # gives up after a second, which cancels
        next(waiting)
    before = target_steps(single.http_url)
    running.close()
    assert_place_is_free(single, before)


def test_other_streams_go_on_while_one_is_cancelled(server: RunningServer) -> None:
    request = {"text_input": "def main():", "max_tokens": 40, "ignore_eos": True, "return_output_ids": True}
    alone = [t for r in stream_grpc(server.grpc_url, request) for t in r["output_ids"]]
    leaving = stream_grpc(server.grpc_url, request | {"max_tokens": 2000})
    next(leaving)
    staying = stream_http(server.http_url, request)
    tokens = list(next(staying)["output_ids"])
    leaving.close()
    tokens += [t for r in staying for t in r["output_ids"]]
    assert tokens == alone

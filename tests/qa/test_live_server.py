"""Clients that leave, crowd, dawdle or collide, on one server that must not notice."""

from __future__ import annotations

import asyncio
import http.client
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median, quantiles
from threading import Thread

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc
from tritonclient.grpc.service_pb2 import ModelInferRequest

from inkling.client import stream_grpc, stream_http
from inkling.liveness import Watch
from inkling.protocol import DRAFT_MODEL, TARGET_MODEL
from inkling.run_folder import RunFolder
from tests.malformed import grpc_request
from tests.qa.conftest import ANSWERED_S, NUM_TOKENS, PROMPT, left_as_it_was, resident_bytes
from tests.server.conftest import ServeCommand
from tests.server.streams import target_steps

pytestmark = pytest.mark.qa
LONG = {"input_ids": list(PROMPT), "max_tokens": 2000, "ignore_eos": True}
SHORT = LONG | {"max_tokens": NUM_TOKENS}
MIB = 1 << 20


def wait_idle(command: ServeCommand) -> None:
    """Until the target makes no more steps."""
    deadline = time.monotonic() + ANSWERED_S
    while (before := target_steps(command.http_url)) != (time.sleep(0.3) or target_steps(command.http_url)):
        assert time.monotonic() < deadline, f"still running after {before} steps"


def raw_stream(call: grpc.Call) -> list:
    return list(call)


@pytest.fixture
def stub(undisturbed: ServeCommand) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(undisturbed.grpc_url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def request_of(inputs: dict, request_id: str = "") -> ModelInferRequest:
    request = grpc_request(inputs | {"stream": True})
    request.id = request_id
    return request


def test_cancel_before_the_first_token(undisturbed, stub) -> None:
    for _ in range(10):
        stub.ModelStreamInfer(iter([request_of(LONG)])).cancel()
    wait_idle(undisturbed)


@pytest.mark.parametrize("model", [DRAFT_MODEL, TARGET_MODEL], ids=["mid-draft", "mid-verify"])
def test_cancel_in_a_step(drafting: ServeCommand, model: str) -> None:
    """The heartbeats say which model is in a step."""
    watched = Watch(RunFolder(drafting.run_folders()[0]), model, 60)
    with left_as_it_was(drafting), grpc.insecure_channel(drafting.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(10):
            call = stub.ModelStreamInfer(iter([request_of(LONG)]))
            next(call)
            deadline = time.monotonic() + 5.0
            while not watched.is_in_step():
                assert time.monotonic() < deadline, f"no step of {model}"
            call.cancel()
        wait_idle(drafting)


def test_cancel_after_final(undisturbed, stub) -> None:
    for _ in range(10):
        call = stub.ModelStreamInfer(iter([request_of(SHORT)]))
        for response in call:
            if response.infer_response.parameters["triton_final_response"].bool_param:
                break
        call.cancel()
    wait_idle(undisturbed)


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_killed_clients(undisturbed, scheme: str) -> None:
    url = undisturbed.grpc_url if scheme == "grpc" else undisturbed.http_url
    script = (
        f"import sys; from inkling.client import stream\n"
        f"for r in stream('{scheme}://{url}', {LONG!r}): print('token', flush=True)\n"
    )
    clients = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) for _ in range(2)]
    for client in clients:
        assert client.stdout.readline() == b"token\n"
        client.kill()
        client.communicate()
    wait_idle(undisturbed)


def test_unloading_and_loading_is_refused_while_requests_run(undisturbed) -> None:
    running = stream_http(undisturbed.http_url, SHORT | {"max_tokens": 200})
    tokens = list(next(running)["output_ids"])
    connection = http.client.HTTPConnection(undisturbed.http_url, timeout=30)
    for verb in ("unload", "load"):
        for model in (TARGET_MODEL, DRAFT_MODEL, "spec_ensemble"):
            connection.request("POST", f"/v2/repository/models/{model}/{verb}", "{}")
            response = connection.getresponse()
            assert response.status in (400, 403), (verb, model, response.read())
            response.read()
    connection.close()
    tokens += [token for response in running for token in response["output_ids"]]
    assert len(tokens) == 200 and tokens[:NUM_TOKENS] == undisturbed.expected.ids


def test_two_clients_with_one_request_id(undisturbed, stub) -> None:
    """The server tells requests apart by themselves, not by the ids that clients give them."""
    answers: list[list] = [[], []]
    inputs = [SHORT, SHORT | {"input_ids": [9, 9, 9]}]
    alone = [
        [t for r in stream_grpc(undisturbed.grpc_url, given) for t in r["output_ids"]] for given in inputs
    ]

    def read(i: int) -> None:
        with grpc.insecure_channel(undisturbed.grpc_url, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            client = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for response in client.ModelStreamInfer(iter([request_of(inputs[i], "same")]), timeout=60):
                assert not response.error_message and response.infer_response.id == "same"
                answers[i] += ids_of(response)

    threads = [Thread(target=read, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == alone and alone[0] != alone[1]


def ids_of(response) -> list[int]:
    names = [output.name for output in response.infer_response.outputs]
    raw = response.infer_response.raw_output_contents[names.index("output_ids")]
    return [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4)]


async def crowd(url: str, count: int, connections: int, inputs: dict) -> list[tuple[float, str, list[int]]]:
    """``count`` streams opened at once: seconds from the request to the end, error, tokens of each."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(url, options) for _ in range(connections)]
    stubs = [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in channels]
    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    request = request_of(inputs)

    async def one(i: int) -> tuple[float, str, list[int]]:
        call = stubs[i % connections].ModelStreamInfer(timeout=300)
        await call.write(request)
        start, ids, error = time.monotonic(), [], ""
        await call.done_writing()
        while not error and (response := await call.read()) is not grpc.aio.EOF:
            error = response.error_message
            ids += [] if error else ids_of(response)
        return time.monotonic() - start, error, ids

    ends = await asyncio.gather(*(one(i) for i in range(count)))
    for channel in channels:
        await channel.close()
    return ends


def test_a_thousand_streams_over_eight_connections(undisturbed) -> None:
    ends = asyncio.run(crowd(undisturbed.grpc_url, 1000, 8, SHORT))
    refused = [(seconds, error) for seconds, error, _ in ends if error]
    served = [ids for _, error, ids in ends if not error]
    assert len(served) >= 256 and all(ids == undisturbed.expected.ids for ids in served)
    assert refused and all("256 requests are waiting" in error for _, error in refused), {
        error for _, error in refused
    }
    slowest = max(seconds for seconds, _ in refused)
    print(f"{len(served)} served, {len(refused)} refused, the slowest refusal after {slowest:.2f} s")
    assert slowest < 1.0
    wait_idle(undisturbed)


def chunk_gaps(command: ServeCommand) -> list[float]:
    """Seconds between the chunks of one stream."""
    arrived = [time.monotonic() for _ in stream_grpc(command.grpc_url, LONG | {"max_tokens": 300})]
    return [later - earlier for earlier, later in zip(arrived, arrived[1:], strict=False)]


def p99_beside(command: ServeCommand, start: Callable[[], list[grpc.Call]]) -> float:
    """Of the time between chunks, beside the streams that ``start`` opens and leaves unread."""
    calls = start()
    gaps = chunk_gaps(command)
    for call in calls:
        call.cancel()
    wait_idle(command)
    return quantiles(gaps, n=100)[98]


def test_slow_readers(undisturbed, stub) -> None:
    """A stream that nobody reads costs others what one that is read costs; its answer waits in the server, whole."""
    inputs = LONG | {"return_output_ids": True}

    def open_streams() -> list[grpc.Call]:
        return [stub.ModelStreamInfer(iter([request_of(inputs)])) for _ in range(4)]

    def read_streams() -> list[grpc.Call]:
        calls = open_streams()
        for call in calls:
            Thread(target=drained, args=(call,), daemon=True).start()
        return calls

    pids = {undisturbed.server_pid, *(member.pid for member in undisturbed.processes())}
    p99_beside(undisturbed, open_streams)  # warm
    before = {pid: resident_bytes(pid) for pid in pids}
    rounds = [[p99_beside(undisturbed, start) for start in (read_streams, open_streams)] for _ in range(3)]
    read, unread = (median(p99s) for p99s in zip(*rounds, strict=True))
    grown = {pid: (resident_bytes(pid) - before[pid]) / MIB for pid in pids}
    print(f"p99 beside streams that are read and unread: {rounds} s; MiB grown: {grown}")
    assert unread < 1.5 * read + 0.02
    assert max(grown.values()) < 32


def drained(call: grpc.Call) -> None:
    try:
        for _ in call:
            pass
    except grpc.RpcError:  # cancelled at the end
        pass

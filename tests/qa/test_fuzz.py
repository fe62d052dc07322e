"""Malformed requests by the thousand beside valid traffic: each is refused, and nothing else notices.

``FUZZ=SEED make qa`` takes another seed; ``FUZZ=SEED:NUMBER`` one request of it, as a failure names it.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import grpc
import pytest
from tritonclient.grpc.service_pb2 import ModelInferResponse, ModelStreamInferResponse

from inkling.client import ResponseError, stream
from inkling.engine.request import SamplingParams, StopRules
from tests.fuzz.answers import CLOSED, LATE, ON_STREAM, Answer, fault
from tests.fuzz.requests import fuzzed
from tests.fuzz.values import STREAM, UNARY, Fuzzed
from tests.qa.conftest import PROMPT, resident_bytes
from tests.server.conftest import ServeCommand
from tests.server.test_metrics import settled

pytestmark = pytest.mark.qa
SEED, COUNT, CLIENTS = 20261130, 5000, 4
TIMEOUT_S = 30.0  # for any answer
MAX_FAULTS = 5  # of a client, which then ends
WARM_UP = 500  # requests until memory is looked at for the first time
MIB = 1 << 20
MAX_GROWTH = 64 * MIB  # of each model process after that
MAX_SERVER_GROWTH = 256 * MIB  # of tritonserver, whose heap keeps holes of the bodies of megabytes
BAD_ENDINGS = ("request_rejected_total", "request_failure_total")


def send_http(url: str, request: Fuzzed) -> Answer:
    connection = http.client.HTTPConnection(url, timeout=TIMEOUT_S)
    try:
        connection.putrequest(request.method, request.path)
        framing = {"Content-Length": str(len(request.body))} | dict(request.headers)
        if "Transfer-Encoding" in framing:
            del framing["Content-Length"]
        for header in framing.items():
            connection.putheader(*header)
        connection.endheaders(request.body)
        if request.ends:
            connection.sock.shutdown(socket.SHUT_WR)
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except TimeoutError:
        raise
    except (OSError, http.client.HTTPException) as error:
        return Answer(CLOSED, repr(error))
    finally:
        connection.close()
    last = text.strip().rpartition("\n\n")[2].removeprefix("data: ")
    try:
        said = json.loads(last)
    except ValueError:
        return Answer(response.status, text)
    if response.status == 200 and "seed" in said:
        return Answer(200, "", True)
    return Answer(response.status, said.get("error", text))


def send_grpc(channel: grpc.Channel, request: Fuzzed) -> Answer:
    try:
        if request.path == UNARY:
            call = channel.unary_unary(UNARY, response_deserializer=ModelInferResponse.FromString)
            return Answer("OK", str(call(request.body, timeout=TIMEOUT_S)))
        call = channel.stream_stream(STREAM, response_deserializer=ModelStreamInferResponse.FromString)
        responses = list(call(iter([request.body]), timeout=TIMEOUT_S))
    except grpc.RpcError as error:
        return Answer(error.code().name, error.details())
    if not responses:
        return Answer(CLOSED, "a stream without a response")
    is_final = responses[-1].infer_response.parameters["triton_final_response"].bool_param
    errors = [response.error_message for response in responses if response.error_message]
    if errors:
        return Answer(
            ON_STREAM, errors[0] if len(responses) == 1 else f"{len(responses)} responses: {errors}"
        )
    return Answer("OK", "" if is_final else "no final response", is_final)


def send(command: ServeCommand, channel: grpc.Channel, request: Fuzzed) -> Answer:
    start = time.monotonic()
    try:
        answer = send_grpc(channel, request) if request.is_grpc else send_http(command.http_url, request)
        if time.monotonic() - start <= TIMEOUT_S:
            return answer
    except TimeoutError:
        pass
    return Answer(LATE, f"no whole answer within {TIMEOUT_S:g} s")


def send_all(command: ServeCommand, seed: int, numbers: range) -> tuple[Counter, list[str]]:
    """How many requests of each fate got an answer of the model or none, and the faults. CLIENTS send at a time."""

    def client(first: int) -> tuple[Counter, list[str]]:
        answers, faults = Counter(), []
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(command.grpc_url, options) as channel:
            for number in numbers[first::CLIENTS]:
                request = fuzzed(seed, number)
                answer = send(command, channel, request)
                answers[request.fate.name, answer.is_whole] += 1
                if wrong := fault(request, answer):
                    faults.append(f"FUZZ={seed}:{number}: {wrong}: {answer}\n{request}")
                if len(faults) >= MAX_FAULTS:
                    break
        return answers, faults

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers, faults = zip(*pool.map(client, range(CLIENTS)), strict=True)
    return sum(answers, Counter()), sum(faults, [])


class Neighbours:
    """Valid requests, one over gRPC and one over HTTP at any time, each held against the right tokens."""

    def __init__(self, command: ServeCommand):
        self._command = command
        self._cases = [
            (
                self._inputs(prompt, settings, n),
                command.expected.ids_of(prompt, SamplingParams(**settings), StopRules(n)),
            )
            for prompt, settings, n in (
                (PROMPT, {}, 24),
                (range(1, 300), {}, 8),
                ([9, 9, 9], {"temperature": 0.8, "seed": 7}, 32),
                ([100, 200], {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 2**64 - 1}, 16),
                ([4, 5, 6], {"repetition_penalty": 1.2, "frequency_penalty": 0.5}, 16),
            )
        ]
        self.right, self.wrong = [], []
        self._stopped = threading.Event()

    @staticmethod
    def _inputs(prompt: Any, settings: dict, max_tokens: int) -> dict[str, Any]:
        return {"input_ids": list(prompt), "max_tokens": max_tokens, "ignore_eos": True, **settings}

    def _run(self, url: str) -> None:
        for inputs, expected in cycle(self._cases):
            try:
                given = [t for response in stream(url, inputs, TIMEOUT_S) for t in response["output_ids"]]
            except ResponseError as error:
                given = str(error)
            (self.right if given == expected else self.wrong).append((url, inputs, given, expected))
            if self._stopped.is_set():
                return

    @contextmanager
    def running(self) -> Iterator[None]:
        urls = f"grpc://{self._command.grpc_url}", f"http://{self._command.http_url}"
        threads = [threading.Thread(target=self._run, args=(url,)) for url in urls]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            for thread in threads:
                thread.join(TIMEOUT_S)
        assert not any(thread.is_alive() for thread in threads)


def resident(command: ServeCommand) -> dict[int, int]:
    return {member.pid: resident_bytes(member.pid) for member in command.processes()}


def test_malformed_requests_are_refused_and_disturb_nothing(undisturbed: ServeCommand) -> None:
    command = undisturbed
    seed, _, only = os.environ.get("FUZZ", f"{SEED}").partition(":")
    numbers = range(int(only), int(only) + 1) if only else range(COUNT)
    print(f"FUZZ={seed}")
    before, neighbours = settled(command), Neighbours(command)
    start = time.monotonic()
    with neighbours.running():
        answers, faults = send_all(command, int(seed), numbers[:WARM_UP])
        warm = resident(command)
        further, further_faults = send_all(command, int(seed), numbers[WARM_UP:])
    answers, faults = answers + further, faults + further_faults
    growth = {pid: size - warm[pid] for pid, size in resident(command).items()}
    server_growth, model_growth = growth.pop(command.server_pid), max(growth.values())
    print(f"{answers}; {len(neighbours.right)} valid ones beside; {time.monotonic() - start:.0f} s")
    print(
        f"resident: tritonserver +{server_growth / MIB:.0f} MiB, a model +{model_growth / MIB:.0f} MiB at most"
    )
    assert not faults, "\n\n".join(faults)
    assert sum(answers.values()) == len(numbers)
    assert not neighbours.wrong and neighbours.right, neighbours.wrong[:3]
    assert server_growth <= MAX_SERVER_GROWTH and model_growth <= MAX_GROWTH
    endings = {key: value - before[key] for key, value in settled(command).items() if key[0] in BAD_ENDINGS}
    assert {key[1][0][1] for key, value in endings.items() if value} <= {"invalid"}, endings

"""Malformed requests by the thousand beside valid traffic: each is refused, and nothing else notices.

``FUZZ=SEED make qa`` takes another seed; ``FUZZ=SEED:NUMBER`` one request of it, as a failure names it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from typing import Any, NamedTuple

import grpc
import pytest
from tritonclient.grpc.service_pb2 import ModelInferResponse, ModelStreamInferResponse

from inkling.client import ResponseError, stream
from inkling.engine.request import SamplingParams, StopRules
from inkling.parameters import INPUTS
from tests.fuzz.requests import fuzzed
from tests.fuzz.values import STREAM, UNARY, Fate, Fuzzed
from tests.qa.conftest import PROMPT, resident_bytes
from tests.server.conftest import ServeCommand
from tests.server.test_metrics import settled

pytestmark = pytest.mark.qa
SEED, COUNT, CLIENTS = 20261130, 5000, 4
TIMEOUT_S = 30.0  # for any answer
MAX_FAULTS = 20  # then it ends
WARM_UP = 500  # requests until memory is looked at for the first time
MIB = 1 << 20
MAX_GROWTH = 64 * MIB  # of each process after that
BAD_ENDINGS = ("request_rejected_total", "request_failure_total")
CLOSED, ON_STREAM = (
    "closed",
    "on the stream",
)  # beside HTTP and gRPC codes: no answer; an error without a code

# Refusals of our own: INVALID_ARG, which HTTP's generate gives as 400 and a gRPC stream without a code.
OURS = re.compile(
    rf"({'|'.join(INPUTS)})\b|(unknown )?request parameter |none of text_input|the request's timeout is "
)


class ServerAnswer(NamedTuple):
    """What tritonserver 2.51.0 itself answers before our code sees a request, or in place of its refusal."""

    status: int | str
    words: str  # a pattern
    reason: str


SERVER_ANSWERS = ()


class Answer(NamedTuple):
    """``status``: of HTTP or gRPC, or one of the above. ``is_whole``: a complete answer of the model."""

    status: int | str
    text: str
    is_whole: bool = False


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


def fault(request: Fuzzed, answer: Answer) -> str:
    """What is wrong with the answer; empty: nothing."""
    if answer.is_whole:
        return "" if request.fate in (Fate.ANSWERED, Fate.EITHER) else "answered as if it were valid"
    if request.fate is Fate.ANSWERED:
        return "valid, and not answered"
    if answer.status == CLOSED:
        return "" if request.fate is Fate.BROKEN else "closed without an answer"
    if answer.status in (400, ON_STREAM) and OURS.match(answer.text):
        return ""
    known = any(row.status == answer.status and re.search(row.words, answer.text) for row in SERVER_ANSWERS)
    return "" if known else "an answer that is not in the table"


def send_all(command: ServeCommand, seed: int, numbers: range, answers: Counter) -> list[str]:
    """Faults of the requests ``numbers``, which CLIENTS send at a time."""
    faults: list[str] = []

    def client(first: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(command.grpc_url, options) as channel:
            for number in numbers[first::CLIENTS]:
                request = fuzzed(seed, number)
                try:
                    answer = (
                        send_grpc(channel, request)
                        if request.is_grpc
                        else send_http(command.http_url, request)
                    )
                    wrong = fault(request, answer)
                except TimeoutError:
                    answer, wrong = Answer(CLOSED, ""), f"no answer within {TIMEOUT_S:g} s"
                answers[request.fate.name, answer.is_whole] += 1
                if wrong:
                    faults.append(f"FUZZ={seed}:{number}: {wrong}: {answer}\n{request}")
                if len(faults) >= MAX_FAULTS:
                    return

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))
    return faults


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
        self.num_right, self.wrong = 0, []
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
            if given == expected:
                self.num_right += 1
            else:
                self.wrong.append((url, inputs, given, expected))
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


def resident(command: ServeCommand) -> dict[int, int]:
    return {member.pid: resident_bytes(member.pid) for member in command.processes()}


def test_malformed_requests_are_refused_and_disturb_nothing(undisturbed: ServeCommand) -> None:
    command = undisturbed
    seed, _, only = os.environ.get("FUZZ", f"{SEED}").partition(":")
    numbers = range(int(only), int(only) + 1) if only else range(COUNT)
    print(f"FUZZ={seed}")
    before, neighbours, answers = settled(command), Neighbours(command), Counter()
    start = time.monotonic()
    with neighbours.running():
        faults = send_all(command, int(seed), numbers[:WARM_UP], answers)
        warm = resident(command)
        faults += send_all(command, int(seed), numbers[WARM_UP:], answers)
    growth = {pid: size - warm[pid] for pid, size in resident(command).items()}
    print(f"{answers}; {neighbours.num_right} valid ones beside; {time.monotonic() - start:.0f} s")
    print("resident growth in MiB:", [round(size / MIB, 1) for size in growth.values()])
    assert not faults, "\n\n".join(faults)
    assert not neighbours.wrong and neighbours.num_right > 0, neighbours.wrong[:3]
    assert max(growth.values()) <= MAX_GROWTH
    endings = {key: value - before[key] for key, value in settled(command).items() if key[0] in BAD_ENDINGS}
    assert {key[1][0][1] for key, value in endings.items() if value} <= {"invalid"}, endings

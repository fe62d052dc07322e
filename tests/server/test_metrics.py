"""What a real server's /metrics says, against what its clients saw."""

from __future__ import annotations

import json
import queue
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection

import numpy as np
import pytest
import tritonclient.grpc as grpc

from inkling.client import ResponseError, stream_http
from inkling.metrics import FAMILIES, PERIOD_S, PREFIX, family_of
from inkling.protocol import ENSEMBLE_MODEL
from inkling.server import RunningServer, ServerOptions
from inkling.settings import Settings

pytestmark = pytest.mark.server
PROMPTS = ["def quicksort(values):", "import os\n", "class Stack:\n", "for i in range(10):", "a", "x = ["]
SECRET = "zanzibar"

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass
class Seen:
    """One request as its client saw it; seconds."""

    num_prompt: int = 0
    num_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_chunks: int = 0
    reason: str = ""
    first_s: float = 0.0
    total_s: float = 0.0


class Client:
    """Streams over one open gRPC connection, so that a request's time holds no connecting."""

    def __init__(self, url: str):
        self._client = grpc.InferenceServerClient(url)
        self._arrived: queue.Queue = queue.Queue()
        self._client.start_stream(lambda result, error: self._arrived.put((time.monotonic(), result, error)))

    def ask(self, text: str, max_tokens: int, request_id: str = "", **flags: bool) -> Seen:
        wanted = ("finish_reason", "num_input_tokens", "num_output_tokens", "perf_metrics")
        flags = {"stream": True, **{f"return_{name}": True for name in wanted}, **flags}
        tensors = [tensor("text_input", [text.encode()], "BYTES", np.object_)]
        tensors.append(tensor("max_tokens", [max_tokens], "INT32", np.int32))
        tensors += [tensor(name, [value], "BOOL", np.bool_) for name, value in flags.items()]
        seen, start = Seen(), time.monotonic()
        self._client.async_stream_infer(ENSEMBLE_MODEL, tensors, request_id=request_id)
        while not seen.reason:
            at, result, error = self._arrived.get(timeout=60.0)
            assert error is None, error
            values = {o.name: result.as_numpy(o.name).ravel()[0] for o in result.get_response().outputs}
            seen.first_s = seen.first_s or at - start
            seen.total_s = at - start
            seen.num_chunks += 1
            seen.num_prompt = values["num_input_tokens"]
            seen.num_tokens += values["num_output_tokens"]
            seen.num_drafts, seen.num_accepted = (
                values["total_draft_tokens"],
                values["total_accepted_draft_tokens"],
            )
            seen.reason = values["finish_reason"].decode()
        return seen

    def close(self) -> None:
        self._client.stop_stream()
        self._client.close()


def tensor(name: str, values: list, triton_type: str, dtype: type) -> grpc.InferInput:
    made = grpc.InferInput(name, [1], triton_type)
    made.set_data_from_numpy(np.array(values, dtype))
    return made


def scrape(server: RunningServer) -> Series:
    connection = HTTPConnection(server.metrics_url, timeout=10.0)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    series = {}
    for name, labels, value in re.findall(rf"^{PREFIX}(\w+)\{{(.*)\}} (\S+)$", text, re.M):
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert (pairs.pop("model"), pairs.pop("version")) == (ENSEMBLE_MODEL, "1")
        series[name, tuple(sorted(pairs.items()))] = float(value)
    return series


def settled(server: RunningServer) -> Series:
    """After all that has ended was published: two looks, more than a period apart, that agree."""
    before, deadline = scrape(server), time.monotonic() + 30.0
    while True:
        time.sleep(PERIOD_S + 0.3)
        if (now := scrape(server)) == before:
            return now
        before = now
        assert time.monotonic() < deadline, "the metrics of an idle server go on changing"


def change(before: Series, after: Series) -> dict[str, float]:
    """By name, labels summed over but for buckets."""
    by_name: dict[str, float] = {}
    for (name, labels), value in after.items():
        by_name[name] = by_name.get(name, 0.0) + value - before[name, labels]
    return by_name


@pytest.mark.qa  # compares times: nothing else may run
def test_counters_and_times_are_those_of_the_clients(server):
    """Counters in every round; times, by their sums, in one of three: a busy machine adds to what a client sees."""
    client = Client(server.grpc_url)
    try:
        client.ask("a", 4)  # opens the connection
        for number in range(3):
            before = settled(server)
            ids = [f"round {number} request {index}" for index in range(2 * len(PROMPTS))]
            seen = [client.ask(t, 8 + 8 * k, ids[k]) for k, t in enumerate(2 * PROMPTS)]
            delta = change(before, settled(server))
            check_counters(seen, delta)
            whole, first = delta["e2e_request_latency_seconds_sum"], delta["time_to_first_token_seconds_sum"]
            assert first == pytest.approx(
                sum(first_token_s(server, request_id) for request_id in ids), abs=1e-5
            )
            seen_whole, seen_first = sum(one.total_s for one in seen), sum(one.first_s for one in seen)
            print(
                f"ms a request, seen later than counted: first token {per_request_ms(seen_first - first, seen)}, "
                f"whole {per_request_ms(seen_whole - whole, seen)} of {per_request_ms(seen_whole, seen)}"
            )
            # a send returns after its client has it, at times
            earliest_s = -0.001 * len(seen)
            is_first_near = earliest_s <= seen_first - first <= 0.005 * len(seen)
            if is_first_near and earliest_s <= seen_whole - whole <= 0.02 * seen_whole + 0.002 * len(seen):
                return
    finally:
        client.close()
    pytest.fail("the server's times differ from its client's in three rounds")


def per_request_ms(seconds: float, seen: list[Seen]) -> str:
    return f"{1e3 * seconds / len(seen):.1f}"


def first_token_s(server: RunningServer, request_id: str) -> float:
    (line,) = (line for line in list(server.log) if f'id="{request_id}"' in line)
    return float(re.search(r"first_token_s=(\S+)", line)[1])


def check_counters(seen: list[Seen], delta: dict[str, float]) -> None:
    totals = {name: sum(getattr(one, name) for one in seen) for name in vars(Seen()) if name != "reason"}
    assert delta["request_success_total"] == len(seen)
    assert delta["prompt_tokens_total"] == totals["num_prompt"]
    assert delta["generation_tokens_total"] == totals["num_tokens"]
    assert delta["spec_decode_num_draft_tokens_total"] == totals["num_drafts"]
    assert delta["spec_decode_num_accepted_tokens_total"] == totals["num_accepted"] > 0
    assert delta["spec_decode_num_accepted_tokens_per_pos_total"] == totals["num_accepted"]
    assert delta["inter_chunk_latency_seconds_count"] == totals["num_chunks"] - len(seen)
    for name in ("time_to_first_token", "time_per_output_token", "e2e_request_latency", "request_queue_time"):
        assert delta[f"{name}_seconds_count"] == len(seen)


def test_counters_are_exact_under_concurrent_requests(server):
    before = settled(server)

    def ask(number: int) -> Seen:
        client = Client(server.grpc_url)
        try:
            return client.ask(PROMPTS[number % len(PROMPTS)], 5 + number, stream=bool(number % 3))
        finally:
            client.close()

    with ThreadPoolExecutor(8) as clients:
        seen = list(clients.map(ask, range(24)))
    delta = change(before, after := settled(server))
    assert delta["generation_tokens_total"] == sum(one.num_tokens for one in seen)
    assert delta["prompt_tokens_total"] == sum(one.num_prompt for one in seen)
    assert delta["spec_decode_num_draft_tokens_total"] == sum(one.num_drafts for one in seen)
    assert delta["spec_decode_num_accepted_tokens_total"] == sum(one.num_accepted for one in seen)
    for reason in {one.reason for one in seen}:
        key = "request_success_total", (("finished_reason", reason),)
        assert after[key] - before[key] == sum(one.reason == reason for one in seen)
    assert after["num_requests_running", ()] == after["num_requests_waiting", ()] == 0


def test_the_server_exports_what_is_documented_and_nothing_else(server):
    assert {family_of(name) for name, _ in settled(server)} == set(FAMILIES)


def test_a_refused_request_counts_by_reason(server):
    before = settled(server)
    with pytest.raises(ResponseError, match="max_tokens"):
        list(stream_http(server.http_url, {"text_input": "a", "max_tokens": 0}))
    after = settled(server)
    changed = {key for key, value in after.items() if value != before[key]}
    assert changed == {("request_rejected_total", (("reason", "invalid"),))}


@pytest.mark.qa  # compares times
def test_every_request_has_one_line_without_its_text(server):
    start = len(server.log)
    client = Client(server.grpc_url)
    try:
        seen = client.ask(f"{SECRET} = 1\nprint({SECRET}", 12, request_id="one of a kind")
    finally:
        client.close()
    settled(server)
    lines = [line for line in list(server.log)[start:] if 'id="one of a kind"' in line]
    assert len(lines) == 1
    values = dict(re.findall(r"(\w+)=(\S+)", lines[0].partition('"one of a kind"')[2]))
    assert values["output_tokens"] == str(seen.num_tokens) and values["prompt_tokens"] == str(seen.num_prompt)
    assert values["accepted_tokens"] == str(seen.num_accepted)
    assert json.loads(values["reason"]) == seen.reason
    assert abs(float(values["total_s"]) - seen.total_s) < 0.02 * seen.total_s + 0.05
    assert SECRET not in "\n".join(server.log)


def test_all_three_models_have_worked_before_ready(tiny_checkpoint):
    options = ServerOptions(http_port=0, grpc_port=0, metrics_port=0)
    with RunningServer(Settings(str(tiny_checkpoint)), options) as server:
        seen = settled(server)
    assert seen["spec_decode_num_drafts_total", ()] >= 1, "the draft was never called"
    assert seen["generation_tokens_total", ()] == 3


def test_a_server_knows_how_many_failed_before_it_and_writes_json(tiny_checkpoint):
    settings = Settings(str(tiny_checkpoint), log_format="json")
    options = ServerOptions(http_port=0, grpc_port=0, metrics_port=0)
    with RunningServer(settings, options, restarts=2) as server:
        list(stream_http(server.http_url, {"text_input": "a", "max_tokens": 3, "ignore_eos": True}))
        assert settled(server)["restarts_total", ()] == 2
        *_, line = (json.loads(line) for line in server.log if '"event"' in line)  # after the self-test's
        assert line["output_tokens"] == 3

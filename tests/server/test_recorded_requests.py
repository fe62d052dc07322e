"""Requests as other tools send them, recorded from their code (sources in the file), replayed to a live server.

GenAI-Perf in both of its formats, through perf_analyzer; Triton's OpenAI frontend in the format of ``--backend vllm``.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from inkling.client import stream_http
from inkling.parameters import INPUTS
from tests.malformed import grpc_request

pytestmark = pytest.mark.server
RECORDED = json.loads(Path(__file__).with_name("recorded_requests.json").read_text())
GENAI_PERF, OPENAI = RECORDED["genai-perf"], RECORDED["openai"]
TIMEOUT_S = 60


def replay(server, recorded: dict) -> list[dict]:
    """The outputs of each response; every input goes out in the shape it was recorded with. The last has FINAL."""
    inputs = {name: values for name, values in recorded.items() if name in INPUTS}
    assert set(recorded) - set(inputs) <= {"model"}
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        responses = list(stub.ModelStreamInfer(iter([grpc_request(inputs)]), timeout=TIMEOUT_S))
    assert not any(response.error_message for response in responses), responses
    assert responses[-1].infer_response.parameters["triton_final_response"].bool_param
    return [outputs(response.infer_response) for response in responses]


def outputs(response) -> dict[str, object]:
    values: dict[str, object] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            assert list(output.shape) == [1], "their readers take exactly one string"
            values[output.name] = raw[4:].decode()
        elif output.datatype == "INT32":
            values[output.name] = list(struct.unpack(f"<{len(raw) // 4}i", raw))
    return values


@pytest.fixture(scope="module")
def expected(server) -> str:
    """The text of 12 greedy tokens after the recorded prompt."""
    prompt = GENAI_PERF["vllm"]["text_input"][0]
    request = {"text_input": prompt, "max_tokens": 12, "min_tokens": 12}
    return "".join(response["text_output"] for response in stream_http(server.http_url, request))


@pytest.mark.parametrize("name", GENAI_PERF)
def test_genai_perf_gets_increments_of_the_greedy_answer(server, expected, name):
    recorded = GENAI_PERF[name]
    responses = replay(server, recorded)
    assert (len(responses) == 1) == ("stream" not in recorded)
    text = "".join(response["text_output"] for response in responses)
    assert text and expected.startswith(text)
    if "deterministic" in name:
        assert text == expected
    if "return_num_output_tokens" in recorded:
        assert sum(response["num_output_tokens"][0] for response in responses) == 12


@pytest.mark.parametrize("name", OPENAI)
def test_the_openai_frontend_gets_text_and_usage(server, name):
    recorded = OPENAI[name]
    sampling = json.loads(recorded["sampling_parameters"][0])
    responses = replay(server, recorded)
    assert recorded["stream"][0] or len(responses) == 1, "it takes one response then"
    assert all({"text_output", "num_input_tokens", "num_output_tokens"} <= set(r) for r in responses)
    (num_input_tokens,) = {response["num_input_tokens"][0] for response in responses}
    num_output_tokens = sum(response["num_output_tokens"][0] for response in responses)
    assert (
        num_input_tokens > 0 and sampling.get("min_tokens", 1) <= num_output_tokens <= sampling["max_tokens"]
    )
    prompt, text = recorded["text_input"][0], "".join(response["text_output"] for response in responses)
    assert text.startswith(prompt) != recorded["exclude_input_in_output"][0]
    stop = sampling.get("stop", [])
    assert not any(word in text for word in ([stop] if isinstance(stop, str) else stop))


@pytest.mark.parametrize("name", [name for name in OPENAI if OPENAI[name]["return_logprobs"][0]])
def test_the_openai_frontend_gets_log_probs_in_vllms_shape(server, name):
    """A list with one object {id: {logprob, rank, decoded_token}} a token."""
    (response,) = replay(server, OPENAI[name])
    log_probs = json.loads(response["logprobs"])
    assert len(log_probs) == response["num_output_tokens"][0]
    wanted = json.loads(OPENAI[name]["sampling_parameters"][0])["logprobs"]
    for position in log_probs:
        assert wanted <= len(position) <= wanted + 1 and all(token.isdigit() for token in position)
        assert all(set(entry) == {"logprob", "rank", "decoded_token"} for entry in position.values())
        assert {entry["rank"] for entry in position.values()} >= set(range(1, wanted + 1))


def test_log_probs_stay_out_of_answers_that_did_not_ask(server):
    assert "logprobs" not in replay(server, OPENAI["completion"])[0]

"""Requests that must be refused, as data: what the interface refuses, and what the server refuses before it.

``REACHES_US`` goes over every transport; ``REFUSED_OVER_HTTP`` and ``REFUSED_OVER_GRPC`` record the answers
of tritonserver 2.51.0. A case stands beside a prompt of three ids unless it brings its own.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritonclient.grpc.service_pb2 import ModelInferRequest

from inkling.parameters import INPUTS, NUMPY_TYPES, STRING
from inkling.protocol import ENSEMBLE_MODEL

PROMPT = {"input_ids": [1, 2, 3]}
HTTP, STREAM, GRPC = "generate", "generate_stream", "grpc"
EVERYWHERE = (HTTP, STREAM, GRPC)


@dataclass(frozen=True)
class Case:
    """Refused by us with INVALID_ARG: HTTP 400, gRPC INVALID_ARGUMENT. The message holds all ``words``."""

    name: str
    words: tuple[str, ...]
    inputs: Mapping[str, Any] = field(default_factory=dict)  # None: leave this input of the prompt out
    parameters: Mapping[str, Any] = field(default_factory=dict)  # request parameters
    transports: tuple[str, ...] = EVERYWHERE

    def all_inputs(self) -> dict[str, Any]:
        return {name: value for name, value in {**PROMPT, **self.inputs}.items() if value is not None}


def http_body(inputs: Mapping[str, Any], parameters: Mapping[str, Any] | None = None) -> bytes:
    """The JSON of ``/generate``; bytes are sent as they are, valid UTF-8 or not."""

    def text(value: Any) -> Any:
        if isinstance(value, list):
            return [text(item) for item in value]
        return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value

    members = {name: text(value) for name, value in inputs.items()} | dict(parameters or {})
    return json.dumps(members, ensure_ascii=False).encode("utf-8", "surrogateescape")


def grpc_request(inputs: Mapping[str, Any], parameters: Mapping[str, Any] | None = None) -> ModelInferRequest:
    """The same as a ModelInferRequest with raw contents."""
    request = ModelInferRequest(model_name=ENSEMBLE_MODEL)
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        declared = INPUTS[name].type
        if declared == STRING:
            raw = b"".join(string_element(item) for item in values)
        else:
            raw = np.array(values, NUMPY_TYPES[declared]).tobytes()
        add_input(request, name, declared.removeprefix("TYPE_"), [len(values)], raw)
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    for name, value in (parameters or {}).items():
        setattr(request.parameters[name], kinds[type(value)], value)
    return request


def add_input(request: ModelInferRequest, name: str, data_type: str, shape: list[int], raw: bytes) -> None:
    data_type = "BYTES" if data_type == "STRING" else data_type
    request.inputs.add(name=name, datatype=data_type, shape=shape)
    request.raw_input_contents.append(raw)


def string_element(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<I", len(data)) + data


def _input(name: str, value: Any, *words: str, **options: Any) -> Case:
    return Case(options.pop("label", f"{name} {value!r}"[:40]), (name, *words), {name: value}, **options)


def _sampling(text: str, *words: str) -> Case:
    return Case(f"sampling {text}"[:40], ("sampling_parameters", *words), {"sampling_parameters": text})


def _parameter(name: str, value: Any, *words: str, transports: tuple[str, ...] = EVERYWHERE) -> Case:
    return Case(f"parameter {name}", (name, *words), {}, {name: value}, transports)


NAN, INF = float("nan"), float("inf")
REACHES_US = (
    # prompts
    Case("no prompt", ("text_input", "input_ids", "exactly one"), {"input_ids": None, "max_tokens": 4}),
    Case("no input at all", ("text_input", "input_ids", "exactly one"), {"input_ids": None}),
    Case("two prompts", ("text_input", "input_ids", "both"), {"text_input": "a"}),
    Case("messages beside ids", ("input_ids and messages", "both"), {"messages": "[]"}),
    Case("messages without chat tokens", ("messages need the control token <|message_system|>", "send text_input"),
         {"input_ids": None, "messages": '[{"role": "user", "content": "x"}]'}),
    Case("a role of no chat", ("messages[0].role is 'bot'", "user, assistant, tool"),
         {"input_ids": None, "messages": '[{"role": "bot", "content": "x"}]'}),
    Case("empty text", ("text_input is ''", "at least one character"), {"input_ids": None, "text_input": ""}),
    Case("broken UTF-8", ("text_input", "0xff at offset 1"), {"input_ids": None, "text_input": b"a\xffb"}),
    Case("cut UTF-8", ("text_input", "0xe6 at offset 0"), {"input_ids": None, "text_input": b"\xe6\x9d"}),
    Case("UTF-8 surrogate", ("text_input", "0xed at"), {"input_ids": None, "text_input": b"\xed\xa0\x80"}),
    _input("input_ids", [], "0 tokens", "a prompt must have 1 to"),
    _input("input_ids", [1] * 200_000, "200000 tokens", "a prompt must have 1 to", label="prompt too long"),
    _input("input_ids", [1, -1], "input_ids[1] is -1", "[0, "),
    _input("input_ids", [2**31 - 1], "input_ids[0] is 2147483647", "[0, "),
    # ranges
    _input("max_tokens", 0, "is 0", "[1, 2147483647]"),
    _input("max_tokens", -5, "is -5", "[1, 2147483647]"),
    _input("max_tokens", 2**31, "is -2147483648", "[1, ", transports=(HTTP, STREAM), label="int wraps"),
    _input("min_tokens", -1, "is -1", "[0, 2147483647]"),
    _input("min_tokens", 17, "is 17", "max_tokens", "16"),
    _input("min_length", 99, "is 99", "max_tokens", "16"),
    _input("temperature", -0.5, "is -0.5", "[0, 100]"),
    _input("temperature", 100.5, "is 100.5", "[0, 100]"),
    _input("temperature", NAN, "is nan", "[0, 100]"),
    _input("temperature", INF, "is inf", "[0, 100]"),
    _input("temperature", -INF, "is -inf", "[0, 100]"),
    _input("top_p", 0.0, "is 0.0", "(0, 1]"),
    _input("top_p", 1.5, "is 1.5", "(0, 1]"),
    _input("top_p", NAN, "is nan", "(0, 1]"),
    _input("min_p", -0.25, "is -0.25", "[0, 1]"),
    _input("min_p", INF, "is inf", "[0, 1]"),
    _input("top_k", -2, "is -2", "[-1, 2147483647]"),
    _input("num_draft_tokens", -1, "is -1", "[0, "),
    _input("num_draft_tokens", 1000, "is 1000", "[0, "),
    _input("end_id", -1, "is -1", "[0, "),
    _input("end_id", 2**31 - 1, "is 2147483647", "[0, "),
    _input("stop_token_ids", [0, -7], "stop_token_ids[1] is -7", "[0, "),
    _input("stop_token_ids", [0] * 257, "257 ids", "at most 256", label="too many stop ids"),
    _input("timeout_ms", -1, "is -1", "[0, 2147483647]"),
    _parameter("timeout", -5, "timeout is -5 us", transports=(GRPC,)),
    # stop words
    _input("stop_words", ["a", ""], "stop_words[1] is ''", "1 to 256 bytes"),
    _input("stop_words", ["x"] * 65, "65 words", "at most 64", label="too many stop words"),
    _input("stop_words", ["é" * 129], "258 bytes", "1 to 256 bytes", label="long stop word"),
    _input("stop_words", [b"ok", b"\xff"], "0xff at offset 0", label="stop word in broken UTF-8"),
    # what shapes and reports probabilities
    _input("repetition_penalty", 0.0, "is 0.0", "[0.01, 100]"),
    _input("presence_penalty", 2.5, "is 2.5", "[-2, 2]"),
    _input("frequency_penalty", NAN, "is nan", "[-2, 2]"),
    _input("bad_words", ["x", ""], "bad_words[1] is ''", "1 to 256 bytes"),
    _input("num_top_log_probs", 21, "is 21", "[0, 20]"),
    _sampling('{"logit_bias": {"x": 1}}', "logit_bias", "an object of token ids"),
    _sampling('{"logit_bias": {"7": 101}}', "logit_bias[7] is 101", "[-100, 100]"),
    _sampling('{"logit_bias": {"999999999": 1}}', "logit_bias is 999999999", "[0, "),
    _sampling('{"prompt_logprobs": true}', "prompt_logprobs is True", "an integer"),
    # features to come
    # one setting, two values
    Case("two seeds", ("seed is 1", "random_seed is 2", "give one"), {"seed": 1, "random_seed": 2}),
    Case("two temperatures", ("temperature is 0.5", "sampling_parameters.temperature is 1.0", "give one"),
         {"temperature": 0.5, "sampling_parameters": '{"temperature": 1}'}),
    Case("min_tokens twice", ("min_tokens is 1", "min_length is 2"), {"min_tokens": 1, "min_length": 2}),
    # names
    _parameter("max_token", 5, "did you mean 'max_tokens'"),
    _parameter("temprature", 0.5, "did you mean 'temperature'"),
    _parameter("stop", "x", "inside sampling_parameters"),
    _parameter("xyzzy", True, "unknown request parameter"),
    _parameter("max_tokens", 5, "send it as the input", transports=(GRPC,)),
    _sampling('{"temprature": 1}', "'temprature'", "did you mean 'temperature'"),
    _sampling('{"stream": true}', "'stream' is an input"),
    # text that the server's HTTP frontend lets through
    Case("id in broken UTF-8", ("the request's id", "0xff at offset 1"), {"id": b"a\xff"}, transports=(HTTP, STREAM)),
    Case("parameter in broken UTF-8", ("a parameter", "0xff at offset"), {"a\udcff": 1}, transports=(HTTP, STREAM)),
    # sampling_parameters
    _sampling("", "not valid JSON"),
    _sampling('{"top_k": 1', "not valid JSON"),
    _sampling("[1]", "is [1]", "JSON object"),
    _sampling('{"top_k": 1, "top_k": 2}', "'top_k' twice"),
    _sampling("[" * 60_000, "nested too deep"),
    _sampling('{"stop": "' + "x" * 70_000 + '"}', "at most 65536"),
    _sampling('{"temperature": NaN}', "NaN", "finite"),
    _sampling('{"temperature": 1e999}', "temperature is inf", "[0, 100]"),
    _sampling('{"max_tokens": 99999999999}', "max_tokens is 99999999999", "[1, 2147483647]"),
    _sampling('{"seed": 18446744073709551616}', "seed is 18446744073709551616", "18446744073709551615"),
    _sampling('{"seed": ' + "9" * 5000 + "}", "not valid JSON", "digits"),
    _sampling('{"top_k": true}', "top_k is True", "an integer"),
    _sampling('{"top_k": "five"}', "top_k is 'five'", "an integer"),
    _sampling('{"top_k": 1.5}', "top_k is 1.5", "an integer"),
    _sampling('{"ignore_eos": 1}', "ignore_eos is 1", "true or false"),
    _sampling('{"stop": [1]}', "stop is [1]", "list of strings"),
    _sampling('{"stop": ["\\ud800"]}', "stop[0]", "surrogate"),
    _sampling('{"n": 2}', "n is 2", "only 1"),
    _sampling('{"logprobs": 21}', "logprobs is 21", "[0, 20]"),
    _sampling('{"use_beam_search": true}', "use_beam_search is True", "only false"),
    _input("sampling_parameters", b"\xff", "0xff at offset 0"),
)  # fmt: skip


@dataclass(frozen=True)
class RefusedOverHttp:
    """Answered by the server before ``execute``, with its own status and words."""

    name: str
    status: int
    words: str
    body: bytes
    path: str = f"/v2/models/{ENSEMBLE_MODEL}/generate"


def _body(name: str, status: int, words: str, **members: Any) -> RefusedOverHttp:
    return RefusedOverHttp(name, status, words, json.dumps({**PROMPT, **members}).encode())


_INFER = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}
_VALID = json.dumps(PROMPT).encode()
REFUSED_OVER_HTTP = (
    RefusedOverHttp("empty body", 500, "document is empty", b""),
    RefusedOverHttp("cut JSON", 500, "failed to parse the request JSON", b'{"input_ids": [1'),
    RefusedOverHttp("JSON array", 500, "non-object", b"[]"),
    RefusedOverHttp("deep nesting", 500, "failed to parse the request JSON", b"[" * 100_000),
    RefusedOverHttp("lone surrogate", 500, "surrogate pair in string", b'{"text_input": "\\ud800"}'),
    RefusedOverHttp("key twice", 400, "already exists", b'{"text_input": "a", "text_input": "b"}'),
    RefusedOverHttp("number as prompt", 500, "non-string as string", b'{"text_input": 5}'),
    RefusedOverHttp("object as prompt", 500, "non-string as string", b'{"text_input": {"a": 1}}'),
    RefusedOverHttp("null as prompt", 500, "non-string as string", b'{"text_input": null}'),
    RefusedOverHttp("two texts", 400, "can not convert input 'text_input'", b'{"text_input": ["a", "b"]}'),
    RefusedOverHttp("nested ids", 500, "Shape does not match", b'{"input_ids": [[1, 2], [3, 4]]}'),
    _body("text as number", 500, "non-signed-integer", max_tokens="5"),
    _body("fraction as integer", 500, "non-signed-integer", max_tokens=2.5),
    _body("bool as integer", 500, "non-signed-integer", max_tokens=True),
    _body("null as integer", 500, "non-signed-integer", max_tokens=None),
    _body("two values for a scalar", 400, "can not convert input 'max_tokens'", max_tokens=[1, 2]),
    _body("text as float", 500, "non-number", temperature="hot"),
    _body("bool as float", 500, "non-number", temperature=True),
    _body("negative seed", 500, "non-unsigned-integer", seed=-1),
    _body("seed of 65 bits", 500, "non-unsigned-integer", seed=2**64),
    _body("integer as bool", 500, "non-boolean", stream=1),
    _body("text as bool", 500, "non-boolean", stream="true"),
    _body("number as stop word", 500, "non-string as string", stop_words=[5]),
    _body("object as sampling_parameters", 500, "non-string as string", sampling_parameters={"top_k": 1}),
    _body("list as unknown parameter", 400, "'xyzzy' has invalid type", xyzzy=[1]),
    _body("list of stops as parameter", 400, "'stop' has invalid type", stop=["x"]),
    _body("chat messages as list", 500, "non-string as string", messages=[{"role": "user"}]),
    RefusedOverHttp("unknown model", 404, "unknown model: 'nope'", _VALID, "/v2/models/nope/generate"),
    RefusedOverHttp("unknown version", 404, "version 7 is not found", _VALID,
                    f"/v2/models/{ENSEMBLE_MODEL}/versions/7/generate"),
    RefusedOverHttp("infer", 501, "decoupled", json.dumps(_INFER).encode(),
                    f"/v2/models/{ENSEMBLE_MODEL}/infer"),
)  # fmt: skip


@dataclass(frozen=True)
class RefusedOverGrpc:
    """``change`` spoils a valid request; the stream answers with the server's own words."""

    name: str
    words: str
    change: Callable[[ModelInferRequest], Any]

    def request(self) -> ModelInferRequest:
        request = grpc_request(PROMPT)
        self.change(request)
        return request


def _adds(
    name: str, words: str, tensor: str, data_type: str, shape: list[int], raw: bytes
) -> RefusedOverGrpc:
    return RefusedOverGrpc(name, words, lambda request: add_input(request, tensor, data_type, shape, raw))


_ONE = np.array([1], np.int32).tobytes()
REFUSED_OVER_GRPC = (
    _adds("wrong type", "data-type is 'INT64'", "max_tokens", "INT64", [1], np.array([1]).tobytes()),
    _adds("unknown type", "max_tokens", "max_tokens", "INT33", [1], _ONE),
    _adds("two values", "Expected [1], got [2]", "max_tokens", "INT32", [2], _ONE * 2),
    _adds("shape [1,1]", "Expected [1], got [1,1]", "max_tokens", "INT32", [1, 1], _ONE),
    _adds("shape []", "Expected [1], got []", "max_tokens", "INT32", [], _ONE),
    _adds("no value", "Expected [1], got [0]", "max_tokens", "INT32", [0], b""),
    _adds("negative shape", "got [-1]", "max_tokens", "INT32", [-1], _ONE),
    _adds("too few bytes", "Expected 4, got 3", "max_tokens", "INT32", [1], _ONE[:3]),
    _adds("too many bytes", "Expected 4, got 8", "max_tokens", "INT32", [1], _ONE * 2),
    _adds("ids in a batch", "Expected [-1], got [1,3]", "stop_token_ids", "INT32", [1, 3], _ONE * 3),
    _adds("two strings", "unexpected number of string elements 2", "text_input", "BYTES", [1],
          string_element("a") * 2),
    _adds("no string", "expected 1 string elements", "text_input", "BYTES", [1], b""),
    _adds("string longer than its bytes", "incomplete string data", "text_input", "BYTES", [1],
          struct.pack("<I", 50) + b"abc"),
    _adds("unknown input", "unexpected inference input 'max_token'", "max_token", "INT32", [1], _ONE),
    _adds("an input twice", "'input_ids' already exists", "input_ids", "INT32", [1], _ONE),
    RefusedOverGrpc("an input without data", "unable to find data for input tensor 'max_tokens'",
                    lambda request: request.inputs.add(name="max_tokens", datatype="INT32", shape=[1])),
    RefusedOverGrpc("unknown output", "unexpected inference output 'nope'",
                    lambda request: request.outputs.add(name="nope")),
    RefusedOverGrpc("reserved parameter", "reserved for Triton usage",
                    lambda request: setattr(request.parameters["triton_x"], "bool_param", True)),
    RefusedOverGrpc("timeout as text", "'timeout' parameter",
                    lambda request: setattr(request.parameters["timeout"], "string_param", "soon")),
    RefusedOverGrpc("unknown model", "unknown model: 'nope'",
                    lambda request: setattr(request, "model_name", "nope")),
    RefusedOverGrpc("unknown version", "version 7 is not found",
                    lambda request: setattr(request, "model_version", "7")),
)  # fmt: skip

"""Fuzzed requests over gRPC: messages whose parts do not fit each other, and bytes that are no message."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc.service_pb2 import ModelInferRequest

from inkling.parameters import BOOL, FP32, INPUTS, INT32, NUMPY_TYPES
from inkling.protocol import CONTROL, DRAFT_MODEL, HIDDEN, TARGET_MODEL
from tests.fuzz.values import (
    HURRIED,
    MESSAGES,
    RANGED,
    STREAM,
    UNARY,
    Fate,
    Fuzzed,
    Kind,
    at_bound,
    flipped,
    giant,
    outside,
    valid,
    wrong_sampling,
)
from tests.malformed import add_input, grpc_request, string_element

DATA_TYPES = (
    "BOOL",
    "INT8",
    "INT32",
    "INT64",
    "UINT64",
    "FP16",
    "FP32",
    "FP64",
    "BYTES",
    "BF16",
    "INT33",
    "",
    "int32",
)
SHAPES = ((), (0,), (2,), (-1,), (1, 1), (2**31,), (2**62, 4), (2**63 - 1,), (-(2**63),), (1,) * 100)
ONE = np.array([1], np.int32).tobytes()


def _other_input(random: Random, request: ModelInferRequest, *types: str) -> str:
    """An input the request does not have yet."""
    known = {tensor.name for tensor in request.inputs} | {"text_input", "input_ids", "messages"}
    names = [name for name, f in INPUTS.items() if name not in known and (not types or f.type in types)]
    return random.choice(names)


def _data_type(random: Random, request: ModelInferRequest) -> None:
    tensor = random.choice(request.inputs)
    tensor.datatype = random.choice([name for name in DATA_TYPES if name != tensor.datatype])


def _shape(random: Random, request: ModelInferRequest) -> None:
    """Of one input, beside the data of another number of elements; of a scalar, also with the right data."""
    tensor = random.choice(request.inputs)
    shapes = [shape for shape in SHAPES if shape != tuple(tensor.shape) and shape != (0,)]
    del tensor.shape[:]
    tensor.shape.extend(random.choice(shapes))


def _scalars(random: Random, request: ModelInferRequest) -> None:
    name, count = _other_input(random, request, INT32, FP32, BOOL), random.choice([0, 2, 1000])
    while INPUTS[name].dims != (1,):
        name = _other_input(random, request, INT32, FP32, BOOL)
    declared = INPUTS[name].type
    raw = np.zeros(count, NUMPY_TYPES[declared]).tobytes()
    add_input(request, name, declared.removeprefix("TYPE_"), [count], raw)


def _raw_size(random: Random, request: ModelInferRequest) -> None:
    at = random.choice([i for i, tensor in enumerate(request.inputs) if tensor.datatype != "BYTES"])
    raw = request.raw_input_contents[at]
    request.raw_input_contents[at] = random.choice(
        [b"", raw[:-1], raw + b"\0", raw * 2, raw + bytes(1 << 16)]
    )


def _strings(random: Random, request: ModelInferRequest) -> None:
    """Elements whose lengths do not fit the bytes, or whose number does not fit the shape."""
    one, huge = string_element("a"), b"\xff\xff\xff\xff"
    raw = random.choice([b"", one[:3], one[:-1], one + b"\0", one * 2, huge + b"a", one + huge, b"\5\0\0\0a"])
    add_input(request, random.choice(["stop_words", "bad_words"]), "STRING", [1], raw)


def _data_missing(random: Random, request: ModelInferRequest) -> None:
    """Fewer raw contents than inputs, or typed contents beside raw ones."""
    if random.random() < 0.5:
        del request.raw_input_contents[random.randrange(len(request.raw_input_contents))]
    else:
        request.inputs[0].contents.int_contents.append(1)


def _input_twice(random: Random, request: ModelInferRequest) -> None:
    at = random.randrange(len(request.inputs))
    request.inputs.append(request.inputs[at])
    request.raw_input_contents.append(request.raw_input_contents[at])


def _unknown(random: Random, request: ModelInferRequest) -> None:
    """An input or output that does not exist."""
    name = random.choice(["nope", "", "max_token", "TEXT_INPUT", "x" * 10_000, "\0", "é"])
    if random.random() < 0.5:
        add_input(request, name, "INT32", [1], ONE)
    else:
        request.outputs.add(name=random.choice([name, "text_input"]))


def _parameter(random: Random, request: ModelInferRequest) -> None:
    """A request parameter that is no setting, reserved, or of a wrong kind."""
    kind, value = random.choice(
        [
            ("bool_param", True),
            ("int64_param", -(2**63)),
            ("double_param", 1e300),
            ("string_param", "é" * 100),
        ]
    )
    name = random.choice(["nope", "", "max_tokens", "stop", "triton_x", "x" * 10_000, "timeout", "timeout"])
    if name == "timeout" and kind == "int64_param":
        value = -1
    setattr(request.parameters[name], kind, value)


def _place(random: Random, request: ModelInferRequest) -> None:
    if random.random() < 0.5:
        request.model_name = random.choice(
            ["nope", "", "spec_ensemble ", "SPEC_ENSEMBLE", "../x", "\0", "x" * 1000]
        )
    else:
        request.model_version = random.choice(["7", "-1", "x", "9" * 30, " "])


def _region(random: Random, request: ModelInferRequest) -> None:
    """Shared memory of clients, which is closed to them."""
    tensor = random.choice([request.inputs[0], request.outputs.add(name="text_output")])
    tensor.parameters["shared_memory_region"].string_param = random.choice(["nope", "", "inkling"])
    tensor.parameters["shared_memory_byte_size"].int64_param = random.choice([0, 4, -1, 2**62])


def _range(random: Random, request: ModelInferRequest) -> None:
    name = random.choice([name for name in RANGED if name not in {tensor.name for tensor in request.inputs}])
    _append(request, grpc_request({name: outside(random, name)}))


def _texts(random: Random, request: ModelInferRequest) -> None:
    name, values = random.choice(
        [
            ("sampling_parameters", [wrong_sampling(random)]),
            ("messages", random.choice(MESSAGES)),
            ("stop_words", random.choice([["a", ""], [b"\xff"], [b"\xed\xa0\x80"], [b"a\xe6\x9d"]])),
        ]
    )
    _append(request, grpc_request({name: values}))


def _append(request: ModelInferRequest, other: ModelInferRequest) -> None:
    """The inputs of another request in place of its own."""
    kept = [
        (tensor, raw)
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        if tensor.name not in {added.name for added in other.inputs}
    ]
    kept += zip(other.inputs, other.raw_input_contents, strict=True)
    del request.inputs[:], request.raw_input_contents[:]
    for tensor, raw in kept:
        request.inputs.append(tensor)
        request.raw_input_contents.append(raw)


CHANGES: dict[str, Callable[[Random, ModelInferRequest], None]] = {
    "protobuf of wrong type": _data_type,
    "protobuf of wrong shape": _shape,
    "protobuf scalars": _scalars,
    "protobuf raw size": _raw_size,
    "protobuf strings": _strings,
    "protobuf data missing": _data_missing,
    "protobuf input twice": _input_twice,
    "protobuf unknown tensor": _unknown,
    "protobuf parameter": _parameter,
    "protobuf place": _place,
    "protobuf shared memory": _region,
    "protobuf out of range": _range,
    "protobuf texts": _texts,
}


def _changed(kind: str, change: Callable[[Random, ModelInferRequest], None]) -> Kind:
    def make(random: Random) -> Fuzzed:
        request = grpc_request(valid(random))
        change(random, request)
        path = UNARY if random.random() < 0.2 else STREAM
        return Fuzzed(kind, Fate.REFUSED, path, request.SerializeToString())

    return make


def _of(kind: str, fate: Fate, inputs: Callable[[Random], dict]) -> Kind:
    return lambda r: Fuzzed(kind, fate, STREAM, grpc_request(inputs(r)).SerializeToString())


def _bytes(random: Random) -> Fuzzed:
    """A message changed as bytes: another valid one, a refused one, or none."""
    whole = grpc_request(valid(random) | HURRIED).SerializeToString()
    body = random.choice(
        [flipped(random, whole), whole[: random.randrange(len(whole))], whole * 2, random.randbytes(100), b""]
    )
    try:
        ModelInferRequest.FromString(body)
        fate = Fate.EITHER
    except DecodeError:
        fate = Fate.BROKEN
    return Fuzzed("protobuf bytes", fate, STREAM, body)


def _allowed(random: Random) -> Fuzzed:
    """What a request may carry beside its inputs, in values that clients do not send. No classification of an output
    of strings: tritonserver 2.51.0 divides by the size of its type, which is 0, and ends with SIGFPE."""
    request = grpc_request(valid(random))
    request.id = random.choice(["", "x" * 10_000, "é\0\n", json.dumps({"id": 1})])
    request.outputs.add(name=random.choice(["text_output", "seed", "prompt_logprobs"]))
    if request.outputs[0].name == "seed":
        request.outputs[0].parameters["classification"].int64_param = random.choice([1, -1, 10**9])
    if random.random() < 0.5:
        request.raw_input_contents.append(ONE)
    name, kind, value = random.choice(
        [
            ("timeout", "int64_param", 10**7),
            ("priority", "int64_param", 10**6),
            ("sequence_id", "int64_param", 5),
            ("sequence_id", "string_param", "é"),
            ("sequence_start", "bool_param", True),
            ("triton_enable_empty_final_response", "bool_param", True),
            ("triton_enable_empty_final_response", "string_param", "x"),
        ]
    )
    setattr(request.parameters[name], kind, value)
    return Fuzzed("protobuf allowed", Fate.EITHER, STREAM, request.SerializeToString())


def _private(random: Random) -> Fuzzed:
    """A private model called from outside."""
    request = ModelInferRequest(model_name=random.choice([TARGET_MODEL, DRAFT_MODEL]))
    size = random.choice([0, 1, 10, 1000])
    if random.random() < 0.7:
        add_input(request, CONTROL, "INT32", [size], ONE * size)
    if random.random() < 0.5:
        add_input(request, HIDDEN, "INT32", [1, size], ONE * size)
    return Fuzzed(
        "protobuf private", Fate.REFUSED, random.choice([UNARY, STREAM]), request.SerializeToString()
    )


GRPC_KINDS: dict[str, Kind] = {name: _changed(name, change) for name, change in CHANGES.items()} | {
    "valid protobuf": _of("valid protobuf", Fate.ANSWERED, lambda r: valid(r) | {"stream": r.random() < 0.5}),
    "protobuf at its bounds": _of("protobuf at its bounds", Fate.ANSWERED, at_bound),
    "protobuf too large": _of("protobuf too large", Fate.REFUSED, giant),
    "protobuf bytes": _bytes,
    "protobuf allowed": _allowed,
    "protobuf private": _private,
}

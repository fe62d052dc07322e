"""Fuzzed requests over HTTP: JSON that is broken, mistyped, misnamed, too much; broken framing; wrong places."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from inkling.parameters import BOOL, FP32, INPUTS, INT32, STRING, UINT64
from inkling.protocol import CONTROL, DRAFT_MODEL, ENSEMBLE_MODEL, HIDDEN, TARGET_MODEL
from tests.fuzz.values import (
    HURRIED,
    MESSAGES,
    RANGED,
    Fate,
    Fuzzed,
    Kind,
    at_bound,
    flipped,
    giant,
    nested,
    outside,
    valid,
    wrong_sampling,
)
from tests.malformed import http_body

GENERATE = f"/v2/models/{ENSEMBLE_MODEL}/generate"
WRONG_JSON: dict[str, tuple[Any, ...]] = {
    INT32: ("5", "", 2.5, 1e300, True, None, {"a": 1}, ["x"], [None], [{}]),
    UINT64: ("5", -1, 2**64, 10**400, 0.5, True, None, {}, ["x"]),
    FP32: ("hot", "", True, None, {}, ["x"], [None]),
    BOOL: (1, 0.0, "true", None, {}, ["x"]),
    STRING: (5, 0.5, True, None, {"a": 1}, [5], [None], [{}]),
}
NOT_OBJECTS = (b"", b" \n", b"[]", b'"x"', b"5", b"null", b"true", b"{", b"}", b"{}{}", b"\0", b"<html></html>",
               b"a=1&b=2", b"\xef\xbb\xbf{}", '{"text_input": "a"}'.encode("utf-16"), b"\xff" * 100)  # fmt: skip


def _json_wrong_type(random: Random) -> bytes:
    name = random.choice(sorted(INPUTS))
    return http_body(valid(random) | {name: random.choice(WRONG_JSON[INPUTS[name].type])})


def _json_wrong_range(random: Random) -> bytes:
    return http_body(valid(random) | {(name := random.choice(RANGED)): outside(random, name)})


def _json_wrong_shape(random: Random) -> bytes:
    name = random.choice([name for name, field in INPUTS.items() if field.dims == (1,)])
    value = {STRING: "1", BOOL: True, FP32: 0.5}.get(INPUTS[name].type, 1)
    return http_body(valid(random) | {name: [value] * random.choice([0, 2, 3, 1000])})


def _json_wrong_name(random: Random) -> bytes:
    near = random.choice(sorted(INPUTS)) + random.choice(["s", "_", " ", "\0", "é"])
    name = random.choice([near, near.upper(), "", "text_output", "stop", "logit_bias", "x" * 65_536])
    return http_body(valid(random) | {name: random.choice([1, 0.5, "a", True, [1], None, {}])})


def _json_key_twice(random: Random) -> bytes:
    inputs = valid(random)
    name = random.choice(sorted(inputs))
    return http_body(inputs)[:-1] + b"," + http_body({name: inputs[name]})[1:]


def _json_prompts(random: Random) -> bytes:
    inputs = {name: value for name, value in valid(random).items() if name not in ("text_input", "input_ids")}
    two = {"text_input": "a", "input_ids": [1]}
    chat = {"messages": random.choice([*MESSAGES, nested(random)])}
    return http_body(inputs | random.choice([{}, two, chat, {"text_input": ""}, {"input_ids": []}]))


def _json_wrong_text(random: Random) -> bytes:
    """Invalid UTF-8 and lone surrogates, raw and escaped, in every place that has text."""
    text = random.choice(
        [b"\xff", b"a\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\\ud800", b"\\udc00x", b"\\uZ"]
    )
    inputs = valid(random) | random.choice(
        [{"stop_words": ["~"]}, {"bad_words": ["a", "~"]}, {"id": "~"}, {"~": 1}]
    )
    if "text_input" in inputs and random.random() < 0.5:
        inputs["text_input"] = "a ~"
    return http_body(inputs).replace(b"~", text)


def _json_nested(random: Random) -> bytes:
    name = random.choice([*sorted(INPUTS), "xyzzy"])
    return http_body(valid(random) | {name: "~"}).replace(b'"~"', nested(random).encode())


def _json_big_number(random: Random) -> bytes:
    name = random.choice([name for name, f in INPUTS.items() if f.type in (INT32, UINT64, FP32)])
    number = random.choice(
        ["1e400", "-1e400", "9" * 400, str(2**63), str(-(2**63) - 1), "99999999999", "1e-400", "-0"]
    )
    return http_body(valid(random) | HURRIED | {name: "~"}).replace(b'"~"', number.encode())


def _json_flipped(random: Random) -> bytes:
    return flipped(random, http_body(valid(random) | HURRIED))


def _json_cut(random: Random) -> bytes:
    body = http_body(valid(random))
    return body[: random.randrange(len(body))]


def _infer_body(random: Random) -> bytes:
    """KServe's form, which no decoupled model takes over HTTP."""
    size = random.choice([1, 2, -1, 2**40, 2**63])
    tensor = {
        "name": random.choice(["text_input", "nope", ""]),
        "shape": [size],
        "datatype": "BYTES",
        "data": ["a"],
    }
    body = json.dumps(
        {"inputs": [tensor] * random.randint(0, 2), "outputs": random.choice([[], [{}], 5])}
    ).encode()
    return random.choice([body, flipped(random, body), body[: random.randrange(len(body))]])


def _private(random: Random) -> Fuzzed:
    """A private model called from outside, in all that its inputs allow and more."""
    model = random.choice([TARGET_MODEL, DRAFT_MODEL])
    size = random.choice([0, 1, 10, 1000])
    control = {
        "name": CONTROL,
        "shape": [size],
        "datatype": "INT32",
        "data": [random.randrange(-9, 9)] * size,
    }
    hidden = {"name": HIDDEN, "shape": [1, size], "datatype": "INT32", "data": [1] * size}
    inputs = random.choice([[], [control], [hidden], [control, hidden], [control | {"shape": [size + 1]}]])
    call = random.choice(["infer", "generate", "generate_stream"])
    whole = {"inputs": inputs} if call == "infer" else {tensor["name"]: tensor["data"] for tensor in inputs}
    return Fuzzed("private model", Fate.REFUSED, f"/v2/models/{model}/{call}", json.dumps(whole).encode())


def _place(random: Random) -> Fuzzed:
    """A valid body under a wrong method, model, version or path."""
    model = random.choice(["nope", "%00", "spec_ensemble%20", "..", "x" * 1000, "%ff", ENSEMBLE_MODEL])
    version = random.choice(
        ["/versions/7", "/versions/-1", "/versions/x", "/versions/" + "9" * 30, "/versions/"]
    )
    call = random.choice(["generate", "generate_stream", "infer", "nope", "generate/x", ""])
    path = f"/v2/models/{model}{version}/{call}"
    path, method = random.choice(
        [(path, "POST"), (GENERATE, random.choice(["GET", "PUT", "DELETE", "PATCH", "NOPE"]))]
    )
    return Fuzzed("place", Fate.REFUSED, path, http_body(valid(random)), method)


def _framed(random: Random) -> Fuzzed:
    """A valid body under wrong headers. One that is longer than said leaves a rest that is no request."""
    body = http_body(valid(random))
    size = len(body)
    cut, more = random.randrange(1, size), size + random.choice([1, 1000, 10**7])
    fate, header, value = random.choice(
        [
            (Fate.REFUSED, "Content-Length", str(cut)),
            (Fate.BROKEN, "Content-Length", str(more)),
            (Fate.BROKEN, "Content-Length", random.choice(["-1", "abc", "", "0", str(2**64), "1e3", "+5"])),
            (Fate.BROKEN, "Transfer-Encoding", "chunked"),
            (Fate.REFUSED, "Content-Encoding", random.choice(["gzip", "deflate", "nope", "gzip, gzip"])),
            (
                Fate.EITHER,
                "Inference-Header-Content-Length",
                random.choice(["-1", "abc", str(more), str(cut)]),
            ),
            (
                Fate.EITHER,
                "Content-Type",
                random.choice(["text/plain", "", "application/x-protobuf", "x" * 4000]),
            ),
        ]
    )
    return Fuzzed("framed", fate, GENERATE, body, headers=((header, value),), ends=fate is Fate.BROKEN)


def _public(kind: str, fate: Fate, body: Callable[[Random], bytes]) -> Kind:
    def make(random: Random) -> Fuzzed:
        return Fuzzed(kind, fate, GENERATE + random.choice(["", "_stream"]), body(random))

    return make


JSON_KINDS: dict[str, tuple[Fate, Callable[[Random], bytes]]] = {
    "valid JSON": (Fate.ANSWERED, lambda r: http_body(valid(r))),
    "JSON at its bounds": (Fate.ANSWERED, lambda r: http_body(at_bound(r))),
    "JSON changed at random": (Fate.EITHER, _json_flipped),
    "JSON number too big": (Fate.EITHER, _json_big_number),
    "JSON cut": (Fate.REFUSED, _json_cut),
    "JSON not an object": (Fate.REFUSED, lambda r: r.choice(NOT_OBJECTS)),
    "JSON of wrong type": (Fate.REFUSED, _json_wrong_type),
    "JSON out of range": (Fate.REFUSED, _json_wrong_range),
    "JSON of wrong shape": (Fate.REFUSED, _json_wrong_shape),
    "JSON with wrong name": (Fate.REFUSED, _json_wrong_name),
    "JSON key twice": (Fate.REFUSED, _json_key_twice),
    "JSON prompts": (Fate.REFUSED, _json_prompts),
    "JSON with wrong text": (Fate.REFUSED, _json_wrong_text),
    "JSON nested": (Fate.EITHER, _json_nested),  # the server takes one value in any number of lists for that value
    "JSON too large": (Fate.REFUSED, lambda r: http_body(giant(r))),
    "JSON sampling_parameters": (
        Fate.REFUSED, lambda r: http_body({"input_ids": [1], "sampling_parameters": wrong_sampling(r)})
    ),
}  # fmt: skip
HTTP_KINDS: dict[str, Kind] = {name: _public(name, *how) for name, how in JSON_KINDS.items()} | {
    "infer": lambda r: Fuzzed("infer", Fate.REFUSED, f"/v2/models/{ENSEMBLE_MODEL}/infer", _infer_body(r)),
    "private model": _private,
    "place": _place,
    "framed": _framed,
}

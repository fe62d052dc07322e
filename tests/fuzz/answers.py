"""What may answer a fuzzed request, and what of it is a fault."""

from __future__ import annotations

import re
from typing import NamedTuple

from inkling.parameters import INPUTS
from tests.fuzz.values import Fate, Fuzzed

# Beside HTTP and gRPC codes: no answer; none in time; an error on a gRPC stream, which has no code.
CLOSED, LATE, ON_STREAM = "closed", "late", "on the stream"
REFUSED = (400, 404, 405, "INVALID_ARGUMENT", "NOT_FOUND", ON_STREAM)


class Answer(NamedTuple):
    """``status``: of HTTP or gRPC, or one of the above. ``is_whole``: a complete answer of the model."""

    status: int | str
    text: str
    is_whole: bool = False


# How our own refusals begin: INVALID_ARG, which generate gives as 400 and a gRPC stream without a code.
OURS = (
    rf"(an id of )?({'|'.join(INPUTS)})\b",
    "(unknown )?request parameter ",
    "none of text_input",
    "the request's (timeout|id) ",
    r"AccessError: inkling_\w+ is private",
)
# Words of tritonserver 2.51.0, which sees every request first.
ITS_OWN = (
    r"(\[request id: .*\] )?"
    r"(inference input '.*' data-type is|unexpected shape for input|All input dimensions should be specified"
    r"|expected (number of inputs between )?\d+ |unexpected number of string elements|incomplete string "
    r"|input byte size mismatch|input '.*' already exists)",
    "contents field must not be specified when using raw_input_contents",
    "unable to find data for input tensor",
    "unexpected inference (input|output) ",
    "Unable to find shared memory region",
    "invalid value( type)? for '(classification|timeout|triton_enable_empty_final_response)' parameter",
    "failed to get model version from specified version string",
    "invalid model version specified",
    "parameter keys starting with 'triton_' are reserved",
    "The schema can not convert input '.*' to tensor",
    "Unsupported content-encoding",
    "Request for unknown model",
    "parameter '.*' has invalid type",
    "unexpected key not found in generate request",
    "Not Found$",
    "Method Not Allowed$",
)


class ServerFault(NamedTuple):
    """An answer of class 5xx, or gRPC's counterpart, that tritonserver 2.51.0 gives before our code sees a request."""

    status: int | str
    words: str  # a pattern
    reason: str


SERVER_FAULTS = (
    ServerFault(500, "failed to parse the request JSON buffer", "a body that is not JSON"),
    ServerFault(500, "attempt to get members for non-object", "a body that is another value than an object"),
    ServerFault(500, "Unable to parse 'data': attempt to access JSON non-", "a value of another type"),
    ServerFault(
        500, "Unable to parse JSON bytes array: attempt to access JSON non-string", "the same of a text"
    ),
    ServerFault(500, "Unable to parse 'data': Shape does not match", "a list in a list"),
    ServerFault(500, "parameter key '.*' was not found in the JSON", "an unknown name with a NUL in it"),
    ServerFault(501, "HTTP end point doesn't support models with decoupled", "infer has one response"),
    ServerFault(
        "UNIMPLEMENTED", "ModelInfer RPC doesn't support models with decoupled", "so has the unary call"
    ),
)


def fault(request: Fuzzed, answer: Answer) -> str:
    """What is wrong with the answer; empty: nothing."""
    if answer.is_whole:
        return "" if request.fate in (Fate.ANSWERED, Fate.EITHER) else "answered as if it were valid"
    if request.fate is Fate.ANSWERED:
        return "valid, and not answered"
    if answer.status == CLOSED:
        return "" if request.fate is Fate.BROKEN else "no answer"
    if answer.status in REFUSED and any(re.match(words, answer.text) for words in (*OURS, *ITS_OWN)):
        return ""
    known = any(row.status == answer.status and re.match(row.words, answer.text) for row in SERVER_FAULTS)
    return "" if known else "an answer that is in no table"

"""Fuzzed requests: what a valid one holds, and what may be wrong with a value, whatever carries it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any

from inkling.parameters import (
    FP32,
    INPUTS,
    INT32,
    KEYS,
    MAX_BIASES,
    MAX_IDS,
    MAX_JSON_BYTES,
    MAX_WORD_BYTES,
    MAX_WORDS,
    STRING,
)

VOCAB, CONTEXT, NUM_DRAFTS = 4096, 4096, 4  # of a server with the demo checkpoint
SERVICE = "/inference.GRPCInferenceService/"
UNARY, STREAM = SERVICE + "ModelInfer", SERVICE + "ModelStreamInfer"


class Fate(Enum):
    ANSWERED = "valid: it gets its answer"
    REFUSED = "malformed by construction"
    EITHER = "changed at random: valid by chance, or refused"
    BROKEN = "not a whole request: refused, or its connection or stream ends without a word"


@dataclass(frozen=True)
class Fuzzed:
    """One request. ``path``: of HTTP, or of a gRPC call, whose ``body`` is the serialized message."""

    kind: str
    fate: Fate
    path: str
    body: bytes
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()  # Content-Length is of the body unless it stands here
    ends: bool = False  # the client closes its sending side after the body

    @property
    def is_grpc(self) -> bool:
        return self.path in (UNARY, STREAM)


Kind = Callable[[Random], Fuzzed]
TEXTS = (
    "def quicksort(values):",
    "a",
    "import os\n",
    "class Stack:\n    def push",
    "é 日本 \U0001f600",
    "\0 \x7f",
)
SETTINGS: dict[str, Callable[[Random], Any]] = {
    "temperature": lambda r: r.choice([0, 0.5, 1, 100]),
    "top_k": lambda r: r.choice([-1, 0, 1, 40, 2**31 - 1]),
    "top_p": lambda r: r.choice([0.01, 0.9, 1]),
    "min_p": lambda r: r.choice([0, 0.1, 1]),
    "repetition_penalty": lambda r: r.choice([0.01, 1.1, 100]),
    "presence_penalty": lambda r: r.uniform(-2, 2),
    "frequency_penalty": lambda r: r.uniform(-2, 2),
    "bad_words": lambda r: r.sample(["x", "return", "é", " self"], r.randint(1, 4)),
    "seed": lambda r: r.choice([0, 1, 2**63, 2**64 - 1]),
    "min_tokens": lambda r: r.randint(0, 1),
    "stop_words": lambda r: r.sample(["\n", "self", "日"], r.randint(1, 3)),
    "stop_token_ids": lambda r: [r.randrange(VOCAB) for _ in range(r.randint(1, 8))],
    "end_id": lambda r: r.randrange(VOCAB),
    "timeout_ms": lambda r: r.choice([0, 60_000]),
    "num_draft_tokens": lambda r: r.randint(0, NUM_DRAFTS),
    "priority": lambda r: r.choice([-(2**31), 0, 2**31 - 1]),
    "num_top_log_probs": lambda r: r.randint(0, 20),
    "exclude_input_in_output": lambda r: r.random() < 0.5,
} | {name: lambda r: r.random() < 0.5 for name in INPUTS if name.startswith(("return_", "ignore_eos"))}
SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_k": "5", "top_p": "0.9", "stop": ["x"], "stop_token_ids": [1, 2], "seed": 2**64 - 1,
    "logit_bias": {"7": 1.5, "9": -100}, "logprobs": 2, "prompt_logprobs": 1, "skip_special_tokens": False,
    "n": 1, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "min_p": None, "ignore_eos": "true",
}  # fmt: skip


def valid(random: Random) -> dict[str, Any]:
    ids = [random.randrange(VOCAB) for _ in range(random.randint(1, 12))]
    prompt = {"text_input": random.choice(TEXTS)} if random.random() < 0.5 else {"input_ids": ids}
    names = random.sample(sorted(SETTINGS), random.randint(0, 4))
    return prompt | {"max_tokens": random.randint(1, 6)} | {name: SETTINGS[name](random) for name in names}


HURRIED = {"timeout_ms": 1000}  # where max_tokens may become anything


def sampling(random: Random) -> dict[str, Any]:
    return {name: SAMPLING[name] for name in random.sample(sorted(SAMPLING), random.randint(1, 6))}


def outside(random: Random, name: str) -> Any:
    """A value of the input's own type that no request may have."""
    field = INPUTS[name]
    if name in ("input_ids", "stop_token_ids", "end_id"):
        token = random.choice([-1, VOCAB, 2**31 - 1, -(2**31)])
        if name == "end_id":
            return token
        most = CONTEXT - 1 if name == "input_ids" else MAX_IDS
        return random.choice([[1] * random.randint(0, 3) + [token], [1] * (most + 1)])
    if field.type == STRING:
        return random.choice([["a", ""], ["x"] * (MAX_WORDS + 1), ["é" * MAX_WORD_BYTES], ["a", b"\xff"]])
    if field.type == FP32:
        return random.choice([float("nan"), float("inf"), float("-inf"), field.low - 0.5, field.high + 0.5])
    high = NUM_DRAFTS + 1 if name == "num_draft_tokens" else field.high + 1
    low = random.choice([field.low - 1, -(2**31), random.randrange(-(2**31), int(field.low))])
    return random.choice([low, high]) if high < 2**31 else low


RANGED = [name for name, f in INPUTS.items() if f.type in (INT32, FP32) and name != "priority"]
RANGED += ["stop_words", "bad_words"]


def flipped(random: Random, data: bytes) -> bytes:
    """Bytes changed, put in, taken out or moved."""
    data = bytearray(data)
    for _ in range(random.randint(1, 8)):
        at = random.randrange(len(data) + 1)
        change = random.randrange(4)
        if change == 0 and at < len(data):
            data[at] ^= 1 << random.randrange(8)
        elif change == 1:
            data[at:at] = random.choice([random.randbytes(3), b'"', b"{", b"]", b",", b"\0", b"1e9", b"null"])
        elif change == 2:
            del data[at : at + random.randint(1, 4)]
        else:
            start = random.randrange(len(data) + 1)
            data[at:at] = data[start : start + random.randint(1, 16)]
    return bytes(data)


def nested(random: Random) -> str:
    """Two deep at least, where one list may stand; Python reads about 1,000."""
    depth = random.choice([2, 50, random.randint(900, 1100), 20_000])
    opener, closer = random.choice([("[", "]"), ('{"a":', "}")])
    return opener * depth + random.choice(["1", ""]) + closer * random.choice([depth, depth, depth - 1, 0])


def wrong_sampling(random: Random) -> str | bytes:
    """Texts of sampling_parameters that are refused."""
    text = json.dumps(sampling(random))
    key = random.choice(sorted(set(KEYS) - {"stop", "stop_words", "bad_words", "reasoning_effort"}))
    return random.choice(
        [
            lambda: text[: random.randrange(len(text))],
            lambda: json.dumps({key: random.choice(["x", "1x", "", {"a": 1}, [[1]], ["x"], 1e400, -1e400])}),
            lambda: json.dumps({"seed": -1, "top_k": random.choice([10**20, -2, True, 0.5, "9" * 70])}),
            lambda: f'{{"{key}": {nested(random)}}}',
            lambda: f'{{"stop": {nested(random)}}}',
            lambda: nested(random) if random.random() < 0.5 else f'{{"zz": {nested(random)}}}',
            lambda: f'{{"n": 1, "{key}": 1, "{key}": 1}}',
            lambda: f'{{"temperature": {random.choice(["NaN", "-Infinity", "1e999", "9" * 5000, "-0.1"])}}}',
            lambda: json.dumps({random.choice(["", "tempo", "\ud800", "x" * 60_000, "stream"]): 1}),
            lambda: json.dumps({"stop": random.choice([["\ud800"], "\udfff", [1], {"a": "b"}, [""] * 2])}),
            lambda: json.dumps(
                {"logit_bias": random.choice([{"-1": 1}, {"07": 1, "7": 1}, {"4096": 1}, {"7": "x"}])}
            ),
            lambda: json.dumps({"logit_bias": {str(i): 1 for i in range(MAX_BIASES + 1)}}),
            lambda: json.dumps({"reasoning_effort": random.choice(["high", 2, [], {}])}),
            lambda: text + " " * (MAX_JSON_BYTES + 1 - len(text)),
            lambda: b'{"stop": "\xff"}',
        ]
    )()


MESSAGES = (
    '[{"role": "user", "content": "x"}]',
    "[]",
    "[",
    "{}",
    '[{"role": "bot"}]',
    '[{"role": {}}]',
    '"',
    "",
)
GIANTS: dict[str, tuple[int, Callable[[int], Any]]] = {  # largest size, and a value of a size
    "input_ids": (1 << 20, lambda n: [1] * n),
    "text_input": (1 << 22, lambda n: "a" * n),
    "messages": (1 << 22, lambda n: '[{"role": "user", "content": "' + "a" * n + '"}]'),
    "stop_words": (1 << 16, lambda n: ["x"] * n),
    "bad_words": (1 << 20, lambda n: ["x" * n]),
    "stop_token_ids": (1 << 18, lambda n: [1] * n),
    "sampling_parameters": (1 << 20, lambda n: '{"stop": "' + "x" * n + '"}'),
}


def giant(random: Random) -> dict[str, Any]:
    """Lists and texts beyond their bounds, up to megabytes; the prompt of others is small."""
    name = random.choice(sorted(GIANTS))
    largest, value = GIANTS[name]
    size = random.choice([CONTEXT * 17, 1 << 17, largest])  # no demo token has 17 bytes
    prompt = {} if name in ("input_ids", "text_input", "messages") else {"input_ids": [1]}
    return prompt | {name: value(size)}


def at_bound(random: Random) -> dict[str, Any]:
    """As much as a request may have, of one thing."""
    full = random.choice(
        [
            {"stop_words": ["x" * MAX_WORD_BYTES] * MAX_WORDS},
            {"bad_words": [f"{i}" for i in range(MAX_WORDS)]},
            {"stop_token_ids": [1] * MAX_IDS},
            {"sampling_parameters": "{}" + " " * (MAX_JSON_BYTES - 2)},
            {"sampling_parameters": json.dumps({"logit_bias": {str(i): 1 for i in range(MAX_BIASES)}})},
            {"max_tokens": 2**31 - 1, "timeout_ms": 1},
            {"input_ids": [1] * (CONTEXT - 1)},
            {"sampling_parameters": json.dumps(sampling(random))},
        ]
    )
    return {"input_ids": [1], "max_tokens": 2} | full

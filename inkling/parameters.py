"""The settings a request may carry: names, types, ranges, and how a value is read from a tensor or from JSON.

``FIELDS`` is the one table. ``spec_ensemble/config.pbtxt`` declares the same inputs (a test holds them
equal), and ``sampling_parameters`` takes the ``sampling`` ones by any of their names, numbers also as
strings. Names are those of the TensorRT-LLM tensors and of vLLM's sampling parameters.

A field with ``neutral`` values belongs to a feature that this version does not have. It is declared so that a
client that always sends it at its neutral value works; any other value is refused by name.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from inkling.errors import RequestError

INT32_MAX = 2**31 - 1
MAX_WORDS = 64  # stop words of one request, and bad words
MAX_WORD_BYTES = 256  # of one word, in UTF-8
MAX_IDS = 256  # stop ids of one request
MAX_ELEMENTS = 4096  # of any list, before a tighter bound of its own
MAX_PROMPT_IDS = 1 << 20  # before the deployment's own context
MAX_JSON_BYTES = 1 << 16  # of sampling_parameters
MAX_LOG_PROBS = 20  # likeliest tokens at one position
MAX_BIASES = 1024  # ids of one request's logit_bias

INT32, UINT64, FP32, BOOL, STRING = "TYPE_INT32", "TYPE_UINT64", "TYPE_FP32", "TYPE_BOOL", "TYPE_STRING"
ANY_JSON = ""  # a key of sampling_parameters that is checked elsewhere
BIAS = "logit_bias"  # a JSON object {id: bias}, read as a tuple of (id, bias) in ascending order of ids
NUMPY_TYPES = {INT32: np.int32, UINT64: np.uint64, FP32: np.float32, BOOL: np.bool_, STRING: np.object_}

Value = bool | int | float | str | tuple[str, ...] | tuple[int, ...] | object


@dataclass(frozen=True)
class Field:
    name: str
    type: str  # Triton data type
    dims: tuple[int, ...] = (1,)
    low: float = 0
    high: float = INT32_MAX
    above: bool = False  # ``low`` itself is outside
    absent: str = ""  # what happens without it, for the message
    also: tuple[str, ...] = ()  # further inputs with the same meaning
    keys: tuple[str, ...] = ()  # further names in sampling_parameters
    tensor: bool = True  # declared as an input
    sampling: bool = True  # taken in sampling_parameters
    neutral: tuple[object, ...] = ()  # the only values this version takes; empty: all in range

    @property
    def range(self) -> str:
        return f"{'(' if self.above else '['}{self.low}, {self.high}]"


def _flag(name: str, **options) -> Field:
    return Field(name, BOOL, absent=options.pop("absent", "false"), **options)


FIELDS = (
    # prompt: exactly one
    Field("text_input", STRING, sampling=False),
    Field("input_ids", INT32, (-1,), sampling=False),
    Field("messages", STRING, sampling=False),
    # sampling
    Field("temperature", FP32, low=0, high=100, absent="greedy"),
    Field("top_k", INT32, low=-1, absent="off, as 0 and -1"),
    Field("top_p", FP32, low=0, high=1, above=True, absent="off, as 1"),
    Field("min_p", FP32, low=0, high=1, absent="off, as 0"),
    Field("repetition_penalty", FP32, low=0.01, high=100, absent="off, as 1"),
    Field("presence_penalty", FP32, low=-2, high=2, absent="off, as 0"),
    Field("frequency_penalty", FP32, low=-2, high=2, absent="off, as 0"),
    Field("logit_bias", BIAS, low=-100, high=100, absent="none", tensor=False),
    Field("bad_words", STRING, (-1,), absent="none"),
    Field("seed", UINT64, high=2**64 - 1, absent="drawn and returned", also=("random_seed",)),
    # where the answer ends
    Field("max_tokens", INT32, low=1, absent="16"),
    Field("min_tokens", INT32, absent="0", also=("min_length",)),
    Field("stop_words", STRING, (-1,), keys=("stop",), absent="none"),
    Field("stop_token_ids", INT32, (-1,), absent="none"),
    Field("end_id", INT32, absent="the checkpoint's end ids alone; ignore_eos turns those off"),
    _flag("ignore_eos"),
    Field("timeout_ms", INT32, absent="none, as 0", sampling=False),
    # how it is computed and sent
    Field("num_draft_tokens", INT32, absent="the deployment's"),
    Field("priority", INT32, low=-(2**31), absent="0; larger goes first", sampling=False),
    _flag("stream", sampling=False),
    _flag("exclude_input_in_output", absent="true", sampling=False),
    _flag("skip_special_tokens", absent="true", tensor=False),
    _flag("return_finish_reason", sampling=False),
    _flag("return_num_input_tokens", sampling=False),
    _flag("return_num_output_tokens", sampling=False),
    _flag("return_output_ids", sampling=False),
    _flag("return_perf_metrics", sampling=False),
    _flag("return_log_probs", sampling=False),
    Field("num_top_log_probs", INT32, high=MAX_LOG_PROBS, absent="none, as 0", sampling=False),
    _flag("return_logprobs", sampling=False),
    _flag("return_cumulative_logprob", sampling=False),
    Field("logprobs", INT32, high=MAX_LOG_PROBS, absent="none", tensor=False),
    Field("prompt_logprobs", INT32, high=MAX_LOG_PROBS, absent="none", tensor=False),
    # features to come: neutral values only
    # chat, with messages
    Field("reasoning_effort", ANY_JSON, tensor=False),  # checked with them
    # one answer a request, by sampling
    Field("n", INT32, tensor=False, neutral=(1,)),
    Field("best_of", INT32, tensor=False, neutral=(1,)),
    _flag("use_beam_search", tensor=False, neutral=(False,)),
    Field("length_penalty", FP32, tensor=False, neutral=(1.0,)),
    _flag("early_stopping", tensor=False, neutral=(False,)),
    _flag("detokenize", tensor=False, neutral=(True,)),
)

SAMPLING_PARAMETERS = "sampling_parameters"
INPUTS: dict[str, Field] = {name: f for f in FIELDS if f.tensor for name in (f.name, *f.also)}
INPUTS[SAMPLING_PARAMETERS] = Field(SAMPLING_PARAMETERS, STRING, sampling=False)
KEYS: dict[str, Field] = {name: f for f in FIELDS if f.sampling for name in (f.name, *f.also, *f.keys)}


def from_tensor(name: str, array: np.ndarray) -> Value:
    """The value of input ``name``. Raises RequestError on an unknown name, a wrong type, shape or value."""
    field = INPUTS.get(name)
    if field is None:
        raise RequestError(f"unknown input {shown(name)}{nearest(name, INPUTS)}")
    if array.dtype != NUMPY_TYPES[field.type]:
        raise RequestError(f"{name} has type {array.dtype}; it must be {field.type.removeprefix('TYPE_')}")
    if array.ndim != 1 or (field.dims == (1,) and array.shape != (1,)):
        raise RequestError(f"{name} has shape {list(array.shape)}; it must be {list(field.dims)}")
    if array.size > (MAX_PROMPT_IDS if field.name == "input_ids" else MAX_ELEMENTS):
        bound = MAX_PROMPT_IDS if field.name == "input_ids" else MAX_ELEMENTS
        raise RequestError(f"{name} has {array.size} elements; at most {bound} are allowed")
    if field.type == STRING:
        texts = tuple(_decode(name, element) for element in array)
        return texts[0] if field.dims == (1,) else _check_words(field, name, texts)
    if field.dims == (-1,):
        return tuple(array.tolist())
    if field.type == FP32:
        return _check(field, name, float(str(array[0])))  # the shortest decimal: what the client wrote
    return _check(field, name, array[0].item())


def from_json(key: str, value: object) -> Value:
    """The value of a ``sampling_parameters`` key; None when it is null. Raises RequestError."""
    name = f"{SAMPLING_PARAMETERS}.{key}"
    field = KEYS.get(key)
    if field is None and key in INPUTS:
        raise RequestError(f"{name}: {key!r} is an input of its own, not a key of {SAMPLING_PARAMETERS}")
    if field is None:
        hint = nearest(key, KEYS) or f"; known are {', '.join(KEYS)}"
        raise RequestError(f"{SAMPLING_PARAMETERS} has the unknown key {shown(key)}{hint}")
    if value is None:
        return None
    if field.type == BIAS:
        return _read_bias(field, name, value)
    if field.type == ANY_JSON:
        return value
    if field.type == STRING:
        return _check_words(field, name, _strings(name, value))
    if field.dims == (-1,):
        return tuple(_number(field, name, item) for item in _list(name, value))
    if field.type == BOOL:
        return _check(field, name, _boolean(name, value))
    return _check(field, name, _number(field, name, value))


def load_json(
    text: str, name: str = SAMPLING_PARAMETERS, kind: type = dict, max_chars: int = MAX_JSON_BYTES
) -> Any:
    """The object (or the list, as ``kind`` says) in the JSON text of ``name``; no key twice, no NaN, no
    Infinity. Raises RequestError."""
    if len(text) > max_chars:
        raise RequestError(f"{name} has {len(text)} characters; at most {max_chars} are allowed")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise RequestError(f"{name} has the key {shown(twice)} twice; give it once")
        return values

    def constant(word: str) -> None:
        raise RequestError(f"{name} contains {word}; JSON numbers must be finite")

    try:
        values = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except RecursionError as error:
        raise RequestError(f"{name} is nested too deep; flatten it") from error
    except RequestError:
        raise
    except ValueError as error:  # also an integer of more digits than Python converts
        raise RequestError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(values, kind):
        rule = "a JSON object, such as {}" if kind is dict else "a JSON list"
        raise RequestError(f"{name} is {shown(values)}; it must be {rule}")
    return values


def shown(value: object) -> str:
    """A value for a message: short, and free of lone surrogates."""
    if isinstance(value, str) and len(value) > 80:
        value = value[:60] + "..." + value[-12:]
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python converts
        text = "a number of more digits than can be read"
    return text if len(text) <= 90 else text[:60] + "..." + text[-12:]


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known one that it resembles, if any."""
    close = difflib.get_close_matches(name.lower()[:80], sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def not_utf8(name: str, error: UnicodeDecodeError) -> RequestError:
    byte = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
    return RequestError(f"{name} is not valid UTF-8 at {byte}; encode text as UTF-8")


def check_id(name: str, token: int, vocab_size: int) -> None:
    """Raises RequestError when the id is outside [0, vocab_size)."""
    if not 0 <= token < vocab_size:
        bound = f"token ids of this checkpoint are in [0, {vocab_size - 1}]"
        raise RequestError(f"{name} is {shown(token)}; {bound}")


def check_ids(name: str, ids: tuple[int, ...], vocab_size: int) -> None:
    """``check_id`` for the first id that is outside, if any."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        index = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        check_id(f"{name}[{index}]", ids[index], vocab_size)


def _check(field: Field, name: str, value: Value) -> Value:
    if field.neutral:
        # compare types too: true is not 1 here
        if not any(type(value) is type(only) and value == only for only in field.neutral):
            only = json.dumps(field.neutral[0])
            raise RequestError(f"{name} is {shown(value)}; this version takes only {only}: leave it out")
        return value
    if field.type in (INT32, UINT64, FP32, BIAS):
        inside = field.low < value <= field.high if field.above else field.low <= value <= field.high
        if not inside:  # NaN too
            kind = "an integer" if field.type in (INT32, UINT64) else "a finite number"
            raise RequestError(
                f"{name} is {shown(value)}; it must be {kind} in {field.range} (absent: {field.absent})"
            )
    if field.type in (FP32, BIAS):  # JSON doubles become what a tensor would have carried
        rounded = float(np.float32(value))
        if field.above and rounded <= field.low:
            raise RequestError(
                f"{name} is {shown(value)}, which is {rounded} in FP32; it must be in {field.range}"
            )
        return rounded
    return value


def _check_words(field: Field, name: str, words: tuple[str, ...]) -> tuple[str, ...]:
    if words == ("",):  # clients send one empty word for none
        words = ()
    if field.neutral:
        return _check(field, name, words)
    if len(words) > MAX_WORDS:
        raise RequestError(f"{name} has {len(words)} words; at most {MAX_WORDS} are allowed")
    for index, word in enumerate(words):
        try:
            size = len(word.encode())
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{name}[{index}] is {shown(word)}; it must not hold a lone surrogate"
            ) from error
        if not 1 <= size <= MAX_WORD_BYTES:
            rule = f"a word must have 1 to {MAX_WORD_BYTES} bytes"
            raise RequestError(f"{name}[{index}] is {shown(word)}, {size} bytes; {rule}")
    return words


def _read_bias(field: Field, name: str, value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or not all(re.fullmatch(r"\d{1,10}", key, re.ASCII) for key in value):
        raise RequestError(
            f'{name} is {shown(value)}; it must be an object of token ids and biases, {{"17": -1.5}}'
        )
    if len(value) > MAX_BIASES:
        raise RequestError(f"{name} has {len(value)} ids; at most {MAX_BIASES} are allowed")
    pairs = []
    for key, item in value.items():
        member = f"{name}[{key}]"
        pairs.append((int(key), _check(field, member, _number(field, member, item))))
    if len({token for token, _ in pairs}) < len(pairs):
        raise RequestError(f"{name} is {shown(value)}; it names an id twice, once with leading zeros")
    return tuple(sorted(pairs))


def _decode(name: str, element: bytes | str) -> str:
    if isinstance(element, str):
        return element
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(name, error) from error


def _list(name: str, value: object) -> list:
    if not isinstance(value, list):
        raise RequestError(f"{name} is {shown(value)}; it must be a list of integers")
    return value


def _strings(name: str, value: object) -> tuple[str, ...]:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise RequestError(f"{name} is {shown(value)}; it must be a string or a list of strings")
    return tuple(words)


def _boolean(name: str, value: object) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {shown(value)}; it must be true or false")
    return value


def _number(field: Field, name: str, value: object) -> int | float:
    """A JSON number, or a string that holds one. A bool is not a number."""
    integer = field.type in (INT32, UINT64)
    kind = "an integer" if integer else "a number"
    if isinstance(value, str):
        pattern = r"[+-]?\d+" if integer else r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
        if len(value) > 64 or not re.fullmatch(pattern, value, re.ASCII):
            raise RequestError(f"{name} is {shown(value)}; it must be {kind}")
        value = int(value) if integer else float(value)
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)):
        raise RequestError(f"{name} is {shown(value)}; it must be {kind}")
    if integer:
        return value
    try:
        return float(value)
    except OverflowError:  # an integer beyond double
        return math.inf if value > 0 else -math.inf

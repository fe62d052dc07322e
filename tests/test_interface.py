"""What a request may carry, where the bounds are, and what a refusal says."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inkling.errors import RequestError
from inkling.interface import ASKED_BY, OUTPUTS, InterfaceContext, parse_request
from inkling.log_prob_outputs import LOG_PROBS_ASKED_BY
from inkling.parameters import FIELDS, INPUTS, KEYS, NUMPY_TYPES, STRING

EOS = 255


def byte_tokenizer() -> Tokenizer:
    """One token a byte: a prompt of n bytes has n tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


CONTEXT = InterfaceContext(byte_tokenizer(), 256, frozenset({EOS}), max_context=64, num_draft_tokens=3)
NO_TOKENIZER = InterfaceContext(None, 256, frozenset({EOS}), max_context=64, num_draft_tokens=3)


def tensor(name: str, value: object) -> np.ndarray:
    field = INPUTS[name]
    if field.type == STRING:
        words = value if isinstance(value, list) else [value]
        words = [word.encode() if isinstance(word, str) else word for word in words]
        array = np.empty(len(words), np.object_)
        array[:] = words
        return array
    return np.atleast_1d(np.asarray(value, NUMPY_TYPES[field.type]))


def parse(parameters: dict | None = None, timeout_us: int = 0, context=CONTEXT, sampling=None, **inputs):
    inputs.setdefault("text_input", "ab")
    if sampling is not None:
        inputs["sampling_parameters"] = sampling if isinstance(sampling, str) else json.dumps(sampling)
    tensors = {name: tensor(name, value) for name, value in inputs.items() if value is not None}
    return parse_request(tensors, parameters or {}, timeout_us, context)


def refused(*words: str, **request) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**request)
    assert caught.value.code == "INVALID_ARG"
    for word in words:
        assert word in str(caught.value)


def test_a_bare_prompt_gets_the_defaults():
    parsed = parse()
    request = parsed.request
    assert len(request.prompt_ids) == 2
    assert (request.sampling.temperature, request.sampling.top_k) == (0.0, 0)
    assert (request.sampling.top_p, request.sampling.min_p) == (1.0, 0.0)
    assert 0 <= parsed.seed < 2**53
    assert (request.stop.max_tokens, request.stop.min_tokens) == (16, 0)
    assert request.stop.stop_ids == {EOS} and request.stop.stop_words == ()
    assert (request.num_draft_tokens, request.timeout_us, request.priority) == (3, 0, 0)
    assert (parsed.stream, parsed.prompt_text, parsed.wanted) == (False, "", frozenset())


def test_every_setting_arrives_as_an_input():
    parsed = parse(
        max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.25, min_p=0.125, top_k=7, seed=2**64 - 1,
        stop_words=["x", "yz"], stop_token_ids=[3, 4], end_id=5, ignore_eos=True, num_draft_tokens=1,
        stream=True, exclude_input_in_output=False, timeout_ms=20,
    )  # fmt: skip
    request = parsed.request
    assert request.sampling.temperature == 0.5 and request.sampling.top_k == 7
    assert request.sampling.top_p == 0.25 and request.sampling.min_p == 0.125
    assert parsed.seed == 2**64 - 1
    assert request.stop.max_tokens == 9 and request.stop.min_tokens == 2
    assert request.stop.stop_ids == {3, 4, 5} and request.stop.stop_words == ("x", "yz")
    assert request.num_draft_tokens == 1 and request.timeout_us == 20_000
    assert parsed.stream and parsed.prompt_text == "ab"


def test_the_same_settings_in_sampling_parameters_give_the_same_request():
    inputs = dict(max_tokens=9, min_tokens=2, temperature=0.7, top_p=0.9, min_p=0.1, top_k=7, seed=5)
    inputs |= dict(stop_token_ids=[3, 4], end_id=5, ignore_eos=True, num_draft_tokens=1)
    as_inputs = parse(stop_words=["x"], **inputs).request
    assert parse(sampling=inputs | {"stop": ["x"]}).request == as_inputs
    strings = {key: str(value) for key, value in inputs.items() if key != "stop_token_ids"}
    assert parse(sampling=strings | {"stop": "x", "stop_token_ids": ["3", 4]}).request == as_inputs
    assert (
        parse(sampling=inputs, stop_words=["x"], **inputs).request == as_inputs
    )  # twice the same is no conflict


def test_null_means_not_given_and_neutral_values_pass():
    sampling = {key: None for key in KEYS}
    assert parse(sampling=sampling, seed=1).request == parse(seed=1).request
    neutral = {f.name: f.neutral[-1] for f in FIELDS if f.sampling and f.neutral}
    assert len(neutral) == 6
    assert parse(sampling=neutral, seed=1).request == parse(seed=1).request


@pytest.mark.parametrize("field", [f for f in FIELDS if f.neutral], ids=lambda f: f.name)
def test_a_feature_to_come_is_refused_by_name(field):
    other = {"TYPE_BOOL": lambda: not field.neutral[0], "TYPE_STRING": lambda: ["x"]}
    value = other.get(field.type, lambda: 2)()
    if field.tensor:
        refused(field.name, "this version takes only", **{field.name: value})
    if field.sampling:
        refused(field.name, "this version takes only", sampling={field.name: value})


BOUNDS = [  # field, inside, outside; a step beyond each bound
    ("temperature", [0.0, 1e-3, 100.0], [-1e-6, 100.001, math.nan, math.inf, -math.inf]),
    ("top_p", [1e-6, 1.0], [0.0, -0.5, 1.001, math.nan, math.inf]),
    ("min_p", [0.0, 1.0], [-1e-6, 1.001, math.nan, math.inf]),
    ("top_k", [-1, 0, 1, 2**31 - 1], [-2, -(2**31)]),
    ("max_tokens", [1, 62, 2**31 - 1], [0, -1, -(2**31)]),
    ("num_draft_tokens", [0, 3], [-1, 4]),
    ("end_id", [0, 255], [-1, 256]),
    ("timeout_ms", [0, 2**31 - 1], [-1]),
]


@pytest.mark.parametrize("name, inside, outside", BOUNDS, ids=[name for name, _, _ in BOUNDS])
def test_bounds_hold_for_inputs_and_sampling_parameters(name, inside, outside):
    for value in inside:
        parse(**{name: value})
        if name in KEYS:
            parse(sampling={name: value})
    for value in outside:
        shown = str(value)[:4] if math.isfinite(value) else str(value)
        refused(name, shown, "in (0, 1]" if name == "top_p" else "in [", **{name: value})
        if name in KEYS and math.isfinite(value):
            refused(f"sampling_parameters.{name}", sampling={name: value})


def test_integers_beyond_32_bits_are_caught_in_sampling_parameters():
    for key in ("max_tokens", "min_tokens", "top_k"):
        refused(f"sampling_parameters.{key} is 99999999999", "2147483647", sampling={key: 99999999999})
    refused("sampling_parameters.seed is 18446744073709551616", sampling={"seed": 2**64})
    refused("sampling_parameters.seed is -1", "18446744073709551615", sampling={"seed": -1})
    refused("not valid JSON", "digits", sampling='{"seed": ' + "9" * 5000 + "}")
    refused("temperature is inf", "[0, 100]", sampling='{"temperature": 1e999}')
    refused("temperature", "[0, 100]", sampling='{"temperature": ' + "9" * 400 + "}")


def test_a_prompt_leaves_room_for_one_token():
    assert parse(text_input="a" * 63).request.stop.max_tokens == 1
    assert parse(text_input="a" * 60, min_tokens=10).request.stop == parse(
        text_input="a" * 60, max_tokens=16, min_tokens=4).request.stop  # fmt: skip
    refused("text_input has 64 tokens", "1 to 63", text_input="a" * 64)
    refused("text_input has 1000000 bytes", "63 tokens", text_input="a" * 1_000_000)
    assert len(parse(text_input=None, input_ids=[1] * 63).request.prompt_ids) == 63
    refused("input_ids has 64 tokens", "1 to 63", text_input=None, input_ids=[1] * 64)
    refused("input_ids has 0 tokens", "1 to 63", text_input=None, input_ids=[])
    refused("text_input is ''", "at least one character", text_input="")


def test_exactly_one_prompt():
    refused("none of text_input, input_ids, messages is given", "exactly one", text_input=None)
    refused("text_input and input_ids are both given", input_ids=[1])
    refused("text_input and messages are both given", messages="[]")
    refused("messages is '[]'", "send it as the input", parameters={"messages": "[]"})


def test_ids_are_inside_the_vocabulary():
    refused("input_ids[1] is 256", "[0, 255]", text_input=None, input_ids=[0, 256])
    refused("input_ids[0] is -1", "[0, 255]", text_input=None, input_ids=[-1])
    refused("stop_token_ids[2] is 300", "[0, 255]", stop_token_ids=[1, 2, 300])
    refused(
        "sampling_parameters.stop_token_ids[0] is 99999999999", sampling={"stop_token_ids": [99999999999]}
    )
    refused("stop_token_ids has 257 ids", "at most 256", stop_token_ids=[1] * 257)


def test_without_a_tokenizer_ids_work_and_text_is_refused():
    parsed = parse(text_input=None, input_ids=[1, 2], context=NO_TOKENIZER, exclude_input_in_output=False)
    assert parsed.request.prompt_ids == (1, 2) and parsed.prompt_text == ""
    parsed.assembler.append(5)
    assert parsed.assembler.finish() == ""
    refused("text_input is 'ab'", "tokenizer.json", "send input_ids", context=NO_TOKENIZER)
    refused("stop_words is ('x',)", "tokenizer.json", "send stop_token_ids", text_input=None, input_ids=[1],
            stop_words=["x"], context=NO_TOKENIZER)  # fmt: skip


def test_min_tokens_is_at_most_max_tokens():
    refused("min_tokens is 17", "max_tokens", "16 when absent", min_tokens=17)
    refused("min_length is 5", "which is 4", min_length=5, max_tokens=4)
    assert parse(min_tokens=4, max_tokens=4).request.stop.min_tokens == 4


def test_a_setting_given_twice_must_be_the_same():
    for first, second in (("seed", "random_seed"), ("min_tokens", "min_length")):
        refused(f"{first} is 3", f"{second} is 4", "give one of them", **{first: 3, second: 4})
        parse(**{first: 3, second: 3})
    refused(
        "temperature is 0.5",
        "sampling_parameters.temperature is 0.25",
        temperature=0.5,
        sampling={"temperature": 0.25},
    )
    parse(temperature=0.7, sampling={"temperature": 0.7})  # equal in FP32
    refused(
        "sampling_parameters.stop",
        "sampling_parameters.stop_words",
        sampling={"stop": "a", "stop_words": ["b"]},
    )


@pytest.mark.parametrize(
    "name, value", [("max_token", 5), ("temprature", 1.0), ("stop_word", "x"), ("returnlogprobs", True)]
)
def test_an_unknown_name_is_refused_with_the_nearest(name, value):
    best = {"max_token": "max_tokens", "temprature": "temperature", "stop_word": "stop_words"}
    refused(name, f"did you mean {best.get(name, 'return_logprobs')!r}", parameters={name: value})
    if name in best:
        refused(name, f"did you mean {best[name]!r}", sampling={name: value})


def test_names_in_the_wrong_place_say_where_they_belong():
    parse(parameters={"id": "7", "triton_enable_empty_final_response": True})
    refused("request parameter max_tokens is 5", "send it as the input", parameters={"max_tokens": 5})
    refused("request parameter stop is 'x'", "inside sampling_parameters", parameters={"stop": "x"})
    refused("'stream' is an input of its own", sampling={"stream": True})
    refused("unknown request parameter 'zzzz'", "metadata", parameters={"zzzz": 1})
    refused("unknown key 'zzzz'", "known are temperature, top_k", sampling={"zzzz": 1})
    with pytest.raises(RequestError, match="unknown input 'max_token'; did you mean 'max_tokens'"):
        parse_request({"max_token": np.array([1], np.int32)}, {}, 0, CONTEXT)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", ["not valid JSON"]),
        ("{", ["not valid JSON"]),
        ("[]", ["is []", "JSON object"]),
        ("null", ["is None", "JSON object"]),
        ('"temperature"', ["JSON object"]),
        ('{"top_k": 1, "top_k": 1}', ["'top_k' twice"]),
        ('{"top_k": {"a": 1, "a": 2}}', ["'a' twice"]),
        ('{"temperature": NaN}', ["NaN", "finite"]),
        ('{"temperature": -Infinity}', ["-Infinity", "finite"]),
        ("[" * 100_000, ["at most 65536"]),
        ("[" * 60_000, ["nested too deep"]),
        ('{"temperature": "hot"}', ["temperature is 'hot'", "a number"]),
        ('{"temperature": "nan"}', ["temperature is 'nan'", "a number"]),
        ('{"temperature": true}', ["temperature is True", "a number"]),
        ('{"temperature": [1]}', ["temperature is [1]", "a number"]),
        ('{"top_k": 1.0}', ["top_k is 1.0", "an integer"]),
        ('{"top_k": "1.5"}', ["top_k is '1.5'", "an integer"]),
        ('{"top_k": "1_0"}', ["top_k is '1_0'", "an integer"]),
        ('{"top_k": "\u0661"}', ["top_k", "an integer"]),
        ('{"top_k": false}', ["top_k is False", "an integer"]),
        ('{"max_tokens": {}}', ["max_tokens is {}", "an integer"]),
        ('{"ignore_eos": 1}', ["ignore_eos is 1", "true or false"]),
        ('{"ignore_eos": "yes"}', ["ignore_eos is 'yes'", "true or false"]),
        ('{"stop": 5}', ["stop is 5", "list of strings"]),
        ('{"stop": ["a", 5]}', ["stop is ['a', 5]", "list of strings"]),
        ('{"stop": ["a", ""]}', ["stop[1] is ''", "1 to 256 bytes"]),
        ('{"stop": ["\\ud800"]}', ["stop[0]", "surrogate"]),
        ('{"stop_token_ids": 5}', ["stop_token_ids is 5", "list of integers"]),
        ('{"stop_token_ids": [true]}', ["stop_token_ids is True", "an integer"]),
        ('{"\\ud800": 1}', ["unknown key", "ud800"]),
        ('{"n": 2}', ["n is 2", "only 1"]),
        ('{"n": true}', ["n is True", "an integer"]),
        ('{"logprobs": 21}', ["logprobs is 21", "[0, 20]"]),
        ('{"top_p": 1e-60}', ["top_p is 1e-60", "FP32"]),
    ],
)  # fmt: skip
def test_malformed_sampling_parameters_are_refused(text, words):
    refused("sampling_parameters", *words, sampling=text)


def test_messages_can_be_sent_in_any_encoding():
    for sampling in (
        '{"\\ud800": 1}',
        '{"stop": ["\\ud800"]}',
        '{"top_k": "\\udfff"}',
        '{"seed": ["\\ud800"]}',
    ):
        with pytest.raises(RequestError) as caught:
            parse(sampling=sampling)
        str(caught.value).encode()
    with pytest.raises(RequestError) as caught:
        parse(sampling={"stop": ["x" * 60_000]})
    assert len(str(caught.value)) < 300


def test_broken_utf8_is_refused_with_its_place():
    refused("text_input is not valid UTF-8", "0xff at offset 1", text_input=b"a\xff")
    refused(
        "text_input is not valid UTF-8", "0xed at offset 0", text_input=b"\xed\xa0\x80"
    )  # a lone surrogate
    refused("stop_words is not valid UTF-8", "0xc3 at offset 0", stop_words=[b"ok", b"\xc3"])
    with pytest.raises(RequestError, match="sampling_parameters is not valid UTF-8"):
        parse_request({"sampling_parameters": tensor("sampling_parameters", b"\xff")}, {}, 0, CONTEXT)


def test_stop_words_are_bounded_and_one_empty_word_is_none():
    assert parse(stop_words=[""]).request.stop.stop_words == ()
    assert parse(stop_words=[]).request.stop.stop_words == ()
    assert len(parse(stop_words=[str(i) for i in range(64)]).request.stop.stop_words) == 64
    refused("stop_words has 65 words", "at most 64", stop_words=["x"] * 65)
    parse(stop_words=["é" * 128])
    refused("stop_words[0]", "258 bytes", "1 to 256", stop_words=["é" * 129])


@pytest.mark.parametrize(
    "name, array, words",
    [
        ("max_tokens", np.array([1, 2], np.int32), ["shape [2]", "[1]"]),
        ("max_tokens", np.array([[1]], np.int32), ["shape [1, 1]", "[1]"]),
        ("max_tokens", np.array(1, np.int32), ["shape []", "[1]"]),
        ("max_tokens", np.array([], np.int32), ["shape [0]", "[1]"]),
        ("max_tokens", np.array([1], np.int64), ["type int64", "INT32"]),
        ("temperature", np.array([1], np.float64), ["type float64", "FP32"]),
        ("stream", np.array([1], np.uint8), ["type uint8", "BOOL"]),
        ("text_input", np.array([b"a", b"b"], np.object_), ["shape [2]", "[1]"]),
        ("stop_words", np.array([[b"a"]], np.object_), ["shape [1, 1]", "[-1]"]),
        ("stop_token_ids", np.array([[1]], np.int32), ["shape [1, 1]", "[-1]"]),
    ],
)
def test_wrong_types_and_shapes_are_refused(name, array, words):
    tensors = {"text_input": tensor("text_input", "a"), name: array}
    with pytest.raises(RequestError) as caught:
        parse_request(tensors, {}, 0, CONTEXT)
    for word in [name, *words]:
        assert word in str(caught.value)


def test_the_sooner_deadline_holds():
    assert parse(timeout_us=5_000).request.timeout_us == 5_000
    assert parse(timeout_us=5_000, timeout_ms=3).request.timeout_us == 3_000
    assert parse(timeout_us=5_000, timeout_ms=9).request.timeout_us == 5_000
    assert parse(timeout_ms=9).request.timeout_us == 9_000
    refused("timeout is -5 us", "0 (none) or more", timeout_us=2**64 - 5)


def test_flags_ask_for_outputs():
    for flag, outputs in ASKED_BY.items():
        assert parse(**{flag: True}).wanted == set(outputs)
        assert parse(**{flag: False}).wanted == frozenset()
    assert parse(text_input=None, input_ids=[1]).wanted == {"output_ids"}
    optional = {
        name for asked in (ASKED_BY, LOG_PROBS_ASKED_BY) for outputs in asked.values() for name in outputs
    }
    assert optional == set(OUTPUTS) - {"text_output", "seed"}


def test_the_prompt_stands_before_the_answer_on_request():
    ids = parse(text_input="é!").request.prompt_ids
    assert parse(text_input="é!", exclude_input_in_output=False).prompt_text == "é!"
    assert parse(text_input="é!", exclude_input_in_output=True).prompt_text == ""
    assert parse(text_input=None, input_ids=list(ids), exclude_input_in_output=False).prompt_text == "é!"


def test_a_drawn_seed_is_drawn_anew():
    assert len({parse().seed for _ in range(20)}) == 20


def test_eos_and_stop_ids_have_no_text():
    text = parse(text_input=None, input_ids=[1], stop_token_ids=[40], ignore_eos=True).assembler
    assert not any([text.append(token_id) for token_id in (41, 40, EOS, 42)])
    assert text.finish() == CONTEXT.tokenizer.decode([41, 42])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(KEYS)), JSON, max_size=4))
def test_any_json_is_a_request_or_a_refusal_and_nothing_else(values):
    try:
        request = parse(sampling=json.dumps(values)).request
    except RequestError as error:
        assert "sampling_parameters" in str(error)
        return
    assert 0 <= request.sampling.temperature <= 100 and 0 < request.sampling.top_p <= 1
    assert 1 <= request.stop.max_tokens <= 62 and 0 <= request.stop.min_tokens <= request.stop.max_tokens
    assert 0 <= request.sampling.seed < 2**64

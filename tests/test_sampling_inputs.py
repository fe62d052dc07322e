"""What a request may say about the probabilities of tokens: penalties, bias, bad words, log probs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from inkling.interface import InterfaceContext
from inkling.parameters import KEYS
from tests.test_interface import CONTEXT, NO_TOKENIZER, parse, refused


def test_settings_that_shape_logits_arrive_from_either_side():
    as_inputs = parse(repetition_penalty=1.25, presence_penalty=-0.5, frequency_penalty=2.0, bad_words=["ab"],
                      seed=1).request.sampling  # fmt: skip
    both = {"repetition_penalty": 1.25, "presence_penalty": "-0.5", "frequency_penalty": 2, "bad_words": "ab"}
    assert parse(sampling=both, seed=1).request.sampling == as_inputs
    assert (as_inputs.repetition_penalty, as_inputs.presence_penalty) == (1.25, -0.5)
    bias = parse(sampling={"logit_bias": {"12": 1, "3": "-100", "255": 0.1}}).request.sampling.logit_bias
    assert bias == ((3, -100.0), (12, 1.0), (255, float(np.float32(0.1))))
    refused(
        "logit_bias has 1025 ids", "at most 1024", sampling={"logit_bias": {str(i): 0 for i in range(1025)}}
    )


def test_bad_words_are_banned_at_the_beginning_and_after_a_space():
    def ids(text: str) -> tuple[int, ...]:
        return tuple(CONTEXT.tokenizer.encode(text).ids)

    assert parse(bad_words=["ab", " ab", "c"]).request.sampling.bad_words == (
        ids("ab"), ids(" ab"), ids("c"), ids(" c"),
    )  # fmt: skip
    assert parse(bad_words=["\n"]).request.sampling.bad_words == (ids("\n"),)
    assert parse(bad_words=[""]).request.sampling.bad_words == ()
    refused("bad_words is ('x',)", "tokenizer.json", text_input=None, input_ids=[1], bad_words=["x"],
            context=NO_TOKENIZER)  # fmt: skip
    refused("bad_words has 65 words", "at most 64", bad_words=["x"] * 65)


def test_bad_words_leave_a_token_to_draw():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    context = InterfaceContext(tokenizer, 2, frozenset({1}), max_context=64, num_draft_tokens=0)
    parse(text_input="a", bad_words=["a"], context=context)
    refused("bad_words", "all 2 tokens", text_input="a", bad_words=["a", "b"], context=context)
    refused("bad_words", "all 2 tokens", text_input="a", bad_words=["a"], min_tokens=1, context=context)


@pytest.mark.parametrize(
    "inputs, sampling, wanted, log_probs, prompt_log_probs",
    [
        ({"return_log_probs": True}, {}, {"output_log_probs", "cum_log_probs"}, 1, 0),
        ({"num_top_log_probs": 3}, {}, {"top_log_probs"}, 4, 0),
        ({"num_top_log_probs": 0}, {}, set(), 0, 0),
        ({"return_logprobs": True}, {}, {"logprobs"}, 0, 0),  # null, as the vLLM backend answers
        ({"return_logprobs": True}, {"logprobs": 0}, {"logprobs"}, 1, 0),
        (
            {"return_logprobs": True, "num_top_log_probs": 2},
            {"logprobs": 5},
            {"logprobs", "top_log_probs"},
            6,
            0,
        ),
        ({}, {"logprobs": 5}, set(), 0, 0),
        ({"return_cumulative_logprob": True}, {}, {"cumulative_logprob"}, 1, 0),
        ({}, {"prompt_logprobs": 0}, {"prompt_logprobs"}, 0, 1),
        ({}, {"prompt_logprobs": 2}, {"prompt_logprobs"}, 0, 3),
    ],
)
def test_log_probs_are_computed_where_an_output_needs_them(
    inputs, sampling, wanted, log_probs, prompt_log_probs
):
    parsed = parse(sampling=sampling, **inputs)
    assert parsed.log_probs.wanted == wanted
    assert (parsed.request.log_probs, parsed.request.prompt_log_probs) == (log_probs, prompt_log_probs)


BOUNDS = [  # field, inside, outside; a step beyond each bound
    ("repetition_penalty", [0.01, 1.0, 100.0], [0.0, -1.0, 100.5, math.nan, math.inf]),
    ("presence_penalty", [-2.0, 2.0], [-2.01, 2.01, math.nan]),
    ("frequency_penalty", [-2.0, 2.0], [-2.01, 2.01, -math.inf]),
    ("num_top_log_probs", [0, 20], [-1, 21]),
]


@pytest.mark.parametrize("name, inside, outside", BOUNDS, ids=[name for name, _, _ in BOUNDS])
def test_bounds_hold_for_inputs_and_sampling_parameters(name, inside, outside):
    for value in inside:
        parse(**{name: value})
        if name in KEYS:
            parse(sampling={name: value})
    for value in outside:
        refused(name, str(value)[:4], "in [", **{name: value})
        if name in KEYS and math.isfinite(value):
            refused(f"sampling_parameters.{name}", sampling={name: value})


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"logprobs": 21}', ["logprobs is 21", "[0, 20]"]),
        ('{"logprobs": true}', ["logprobs is True", "an integer"]),
        ('{"prompt_logprobs": -1}', ["prompt_logprobs is -1", "[0, 20]"]),
        ('{"logit_bias": [1]}', ["logit_bias is [1]", "an object of token ids"]),
        ('{"logit_bias": {"a": 1}}', ["logit_bias is {'a': 1}", "an object of token ids"]),
        ('{"logit_bias": {"-1": 1}}', ["logit_bias is {'-1': 1}", "an object of token ids"]),
        ('{"logit_bias": {"256": 1}}', ["an id of sampling_parameters.logit_bias is 256", "[0, 255]"]),
        ('{"logit_bias": {"7": 100.5}}', ["logit_bias[7] is 100.5", "[-100, 100]"]),
        ('{"logit_bias": {"7": "x"}}', ["logit_bias[7] is 'x'", "a number"]),
        ('{"logit_bias": {"7": 1, "07": 1}}', ["logit_bias", "twice"]),
        ('{"bad_words": ["a", ""]}', ["bad_words[1] is ''", "1 to 256 bytes"]),
        ('{"repetition_penalty": 0}', ["repetition_penalty is 0", "[0.01, 100]"]),
    ],
)  # fmt: skip
def test_malformed_sampling_parameters_are_refused(text, words):
    refused("sampling_parameters", *words, sampling=text)

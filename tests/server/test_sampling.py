"""Every setting that shapes or reports probabilities in one request, through the real server."""

from __future__ import annotations

import json

import numpy as np
import pytest

from inkling.client import stream
from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from inkling.text import load_tokenizer
from tests.in_process import LocalModels, generate
from tests.test_promise import DEMO

pytestmark = pytest.mark.server
PROMPT = "def add(a, b):"
MAX_TOKENS = 24


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_one_request_with_all_settings_is_answered_as_in_process(start_server, scheme: str) -> None:
    models = LocalModels(DEMO, max_context=256, threads=1)
    tokenizer = load_tokenizer(DEMO)
    inputs = {
        "text_input": PROMPT,
        "max_tokens": MAX_TOKENS,
        "min_tokens": 6,
        "temperature": 0.8,
        "seed": 11,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "bad_words": ["return", "self"],
        "return_log_probs": True,
        "num_top_log_probs": 2,
        "return_logprobs": True,
        "return_cumulative_logprob": True,
        "return_output_ids": True,
        "sampling_parameters": json.dumps(
            {"logit_bias": {"5": 1.5, "9": -100}, "logprobs": 3, "prompt_logprobs": 1}
        ),
    }
    bad_words = tuple(tuple(tokenizer.encode(text).ids) for text in ("return", " return", "self", " self"))
    sampling = SamplingParams(
        temperature=0.8,
        seed=11,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((5, 1.5), (9, -100.0)),
        bad_words=bad_words,
    )
    prompt = tuple(tokenizer.encode(PROMPT).ids)
    rules = StopRules(MAX_TOKENS, 6, frozenset(models.deployment.config.eos_token_ids))
    request = GenerateRequest(prompt, sampling, rules, log_probs=4, prompt_log_probs=2)
    (reply,) = generate(models.engine(), [request])
    expected = [scored for chunk in reply.chunks for scored in chunk.log_probs]

    server = start_server(DEMO, max_context=256, threads=1)
    url = f"grpc://{server.grpc_url}" if scheme == "grpc" else f"http://{server.http_url}"
    for num_drafts in (0, models.num_depths):
        responses = list(stream(url, {**inputs, "num_draft_tokens": num_drafts}))
        assert [token for r in responses for token in r["output_ids"]] == reply.ids
        log_probs = [value for r in responses for value in r["output_log_probs"]]
        assert np.float32(log_probs).tolist() == [scored.log_prob for scored in expected]
        assert all(len(r["output_log_probs"]) == len(r["output_ids"]) for r in responses)
        total = np.float32(reply.chunks[-1].cum_log_prob)
        assert (
            np.float32(responses[-1]["cum_log_probs"])
            == np.float32(responses[-1]["cumulative_logprob"])
            == total
        )
        top = [row for r in responses for row in json.loads(r["top_log_probs"])]
        assert top == [{str(i): value for i, value in scored.top[:2]} for scored in expected]
        rows = [row for r in responses for row in json.loads(r["logprobs"])]
        for row, scored in zip(rows, expected, strict=True):
            entry = row[str(scored.token)]
            assert (entry["logprob"], entry["rank"]) == (scored.log_prob, scored.rank)
            assert entry["decoded_token"] == tokenizer.decode([scored.token], skip_special_tokens=False)
            assert set(row) == {str(scored.token), *(str(i) for i, _ in scored.top)}
        assert ["prompt_logprobs" in r for r in responses] == [True] + [False] * (len(responses) - 1)
        first, *others = json.loads(responses[0]["prompt_logprobs"])
        assert first is None and len(others) == len(prompt) - 1
        given = [row[str(token)]["logprob"] for row, token in zip(others, prompt[1:], strict=True)]
        assert given == [scored.log_prob for scored in reply.chunks[0].prompt_log_probs]

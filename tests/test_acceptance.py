"""The demo checkpoint's own depths, through the engine, on text it was not trained on."""

from __future__ import annotations

import json

import pytest

from inkling.engine.request import GenerateRequest, StopRules
from inkling.text import load_tokenizer
from tests.in_process import LocalModels, generate
from tests.test_promise import DEMO

MAX_TOKENS = 64


@pytest.fixture(scope="module")
def models() -> LocalModels:
    return LocalModels(DEMO, max_context=512, max_running_sequences=40, threads=1)


def accepted_length(models: LocalModels, num_drafts: int) -> float:
    tokenizer = load_tokenizer(DEMO)
    prompts = json.loads((DEMO.parent / "prompts.json").read_text())
    requests = [
        GenerateRequest(
            tuple(tokenizer.encode(p["text"]).ids),
            stop=StopRules(max_tokens=MAX_TOKENS),
            num_draft_tokens=num_drafts,
        )
        for p in prompts
    ]
    assert len(requests) == 40
    last = [reply.chunks[-1] for reply in generate(models.engine(), requests)]
    tokens = len(requests) * MAX_TOKENS
    return tokens / (tokens - sum(chunk.total_accepted_draft_tokens for chunk in last))


def test_three_drafts_reach_an_accepted_length_of_2_8(models: LocalModels) -> None:
    assert accepted_length(models, 3) >= 2.8

"""What the soak asks: short prompts under settings of many kinds, each with its right tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from random import Random
from typing import Any

from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from inkling.text import load_tokenizer
from tests.in_process import LocalModels, generate
from tests.malformed import (
    REACHES_US,
    REFUSED_OVER_GRPC,
    REFUSED_OVER_HTTP,
    Case,
    RefusedOverGrpc,
    RefusedOverHttp,
)
from tests.qa.conftest import THREADS
from tests.server.conftest import ROOT

MAX_TOKENS = 8
PREFIX_BLOCK = 64  # positions; a third of the questions begin with the same ones
NUM_QUESTIONS = 96
SAMPLING = (
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {},
    {"temperature": 1.0, "top_k": 20},
    {"repetition_penalty": 1.3},
    {"temperature": 0.7, "min_p": 0.05},
)


@dataclass(frozen=True)
class Question:
    inputs: dict[str, Any]
    ids: list[int]  # of the right answer


def questions(checkpoint: Path, random: Random) -> list[Question]:
    """Answered by the target alone, in this process, without drafts."""
    tokenizer = load_tokenizer(checkpoint)
    texts = [entry["text"] for entry in json.loads((ROOT / "demo" / "prompts.json").read_text())]
    rows = [tokenizer.encode(text).ids for text in texts]
    shared = rows[0][: PREFIX_BLOCK + 8]  # a block is found by the ids behind it, too
    asked: list[tuple[dict[str, Any], GenerateRequest]] = []
    for number in range(NUM_QUESTIONS):
        prompt = random.choice(rows)[: random.randint(1, 16)]
        if number % 3 == 0:
            prompt = shared + prompt
        sampling = SAMPLING[number % len(SAMPLING)]
        if "temperature" in sampling:
            sampling = sampling | {"seed": random.getrandbits(64)}
        max_tokens = random.randint(1, MAX_TOKENS)
        inputs = {"input_ids": prompt, "max_tokens": max_tokens, "ignore_eos": True, **sampling}
        if number % 8 == 0:
            inputs["num_draft_tokens"] = random.randint(0, 2)
        request = GenerateRequest(tuple(prompt), SamplingParams(**sampling), StopRules(max_tokens))
        asked.append((inputs, request))
    models = LocalModels(checkpoint, threads=int(THREADS))
    replies = generate(models.engine(), [request for _, request in asked])
    return [Question(inputs, reply.ids) for (inputs, _), reply in zip(asked, replies, strict=True)]


def unique_prompt(random: Random, vocab_size: int) -> list[int]:
    """Longer than a block of the prefix cache: it is kept until others need its pages."""
    return random.choices(range(1, vocab_size), k=random.randint(PREFIX_BLOCK + 1, PREFIX_BLOCK + 16))


def malformed() -> Iterator[tuple[str, Case | RefusedOverHttp | RefusedOverGrpc]]:
    """For ever: a transport, and what is refused over it. Empty: the case knows."""
    over = [(transport, case) for case in REACHES_US for transport in case.transports]
    return cycle(chain(over, (("", case) for case in (*REFUSED_OVER_HTTP, *REFUSED_OVER_GRPC))))

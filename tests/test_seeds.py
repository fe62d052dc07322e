"""A seed decides an answer, and nothing else does: not drafts, and not the requests beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from inkling.testing import write_random_checkpoint
from tests.engine.scripted import References, ScriptedDraft
from tests.in_process import GENERATION, LocalModels, generate

SEEDS = (0, 1, 2, 2**32, 2**63 + 5, 2**64 - 1)
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> LocalModels:
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(directory, seed=3)
    return LocalModels(directory, max_context=256, max_running_sequences=16, threads=1)


def request_of(seed: int, num_drafts: int = 0, prompt: tuple[int, ...] = (5, 9, 200, 17)) -> GenerateRequest:
    return GenerateRequest(prompt, SamplingParams(1.2, seed=seed), StopRules(MAX_TOKENS), num_drafts)


def alone(models: LocalModels, request: GenerateRequest) -> list[int]:
    return generate(models.engine(), [request])[0].ids


def true_draft(
    models: LocalModels, requests: list[GenerateRequest], answers: list[list[int]], probability: float
):
    return ScriptedDraft(
        models.deployment.layout,
        References(zip(requests, answers, strict=True)),
        vocab_size=models.deployment.config.vocab_size,
        num_depths=models.num_depths,
        probability=probability,
        generation=GENERATION,
    )


@pytest.mark.parametrize("probability", [0.0, 0.7, 1.0])
def test_a_seed_is_heeded_under_drafting(models: LocalModels, probability: float):
    requests = [request_of(seed, models.num_depths) for seed in SEEDS]
    expected = [alone(models, request_of(seed)) for seed in SEEDS]
    assert len({tuple(ids) for ids in expected}) == len(SEEDS), "every seed has its own answer"
    draft = true_draft(models, requests, expected, probability)
    drafted = [generate(models.engine(draft), [request])[0] for request in requests]
    assert [reply.ids for reply in drafted] == expected
    accepted = [reply.chunks[-1].total_accepted_draft_tokens for reply in drafted]
    assert (max(accepted) == 0) == (probability == 0)


@pytest.mark.parametrize("trial", range(2))
def test_a_seeded_request_is_not_changed_by_its_neighbours(models: LocalModels, trial: int):
    random = Random(trial)
    request = request_of(7, models.num_depths)
    neighbours = [
        request_of(
            random.choice((7, random.getrandbits(64))),  # some share its seed
            random.randint(0, models.num_depths),
            tuple(random.randrange(251) for _ in range(random.randint(1, 40))),
        )
        for _ in range(10)
    ]
    neighbours += [replace(request, num_draft_tokens=n) for n in (0, 1)]  # its twins
    expected = alone(models, request_of(7))
    others = [alone(models, replace(n, num_draft_tokens=0)) for n in neighbours]
    crowd = [*neighbours, request]
    order = random.sample(range(len(crowd)), len(crowd))
    draft = true_draft(models, crowd, [*others, expected], 0.7)
    engine = models.engine(
        draft, max_prompt_chunk=random.choice((3, 64)), max_running_sequences=random.choice((3, 16))
    )
    replies = dict(zip(order, generate(engine, [crowd[i] for i in order], random), strict=True))
    assert replies[len(neighbours)].ids == expected
    assert [replies[i].ids for i in range(len(neighbours))] == others
    assert others[-1] == others[-2] == expected
    assert engine.verified[models.num_depths, models.num_depths] > 0

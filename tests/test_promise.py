"""Speculation never changes the answer: the headline of the product.

The reference of every request is the target alone: no drafts, nobody else in the batch, the prompt in one chunk.
Each request then runs again in at least four configurations, half of them with a scripted draft, because random
checkpoints accept nothing of their own depths. A run must return the same token ids.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest

from inkling.config import AttentionGeometry
from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from inkling.testing import tiny_config, write_random_checkpoint
from tests.engine.scripted import References, ScriptedDraft
from tests.in_process import GENERATION, LocalModels, generate

DEMO = Path(__file__).parents[1] / "demo" / "checkpoint"
NUM_REQUESTS = 100  # of each checkpoint
GROUP = 16  # requests that run together
UNLIMITED = 1 << 20
CHUNKS = (1, 7, 64, UNLIMITED)
ARRIVALS = ("alone", "together", "random")  # batch of 1, of 16, and requests that come and go
SETTINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.0, top_k=20, seed=2),
    SamplingParams(temperature=1.3, top_p=0.9, seed=2**63 + 5),
    SamplingParams(temperature=0.9, min_p=0.05, seed=4),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, seed=5),
)
CHECKPOINTS = {
    "demo": None,
    "tiny": tiny_config(),
    "narrow": tiny_config(
        hidden_size=48,
        num_layers=3,
        vocab_size=131,
        padded_vocab_size=136,
        full=AttentionGeometry(6, 3, 8, 10, None),
        local=AttentionGeometry(4, 1, 16, 6, 6),
        layer_is_local=(False, True, True),
        layer_is_dense=(False, False, False),
        mtp_depths=4,
        mtp_is_local=(True, True, False, True),
        num_experts_per_token=3,
    ),
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalModels:
    config = CHECKPOINTS[request.param]
    directory = DEMO
    if config is not None:
        directory = tmp_path_factory.mktemp(request.param)
        write_random_checkpoint(directory, config, seed=11)
    return LocalModels(directory, max_context=512, max_running_sequences=GROUP, threads=1)


def random_requests(random: Random, models: LocalModels) -> list[GenerateRequest]:
    """Prompts of 1..400 tokens with each of 1..N+2 several times, answers of up to 48."""
    config = models.deployment.config
    short = list(range(1, models.num_depths + 3)) * 4
    lengths = short + [
        random.randint(1, 400 if random.random() < 0.25 else 60) for _ in range(NUM_REQUESTS - len(short))
    ]
    random.shuffle(lengths)
    return [
        GenerateRequest(
            tuple(random.randrange(config.vocab_size) for _ in range(length)),
            SETTINGS[i % len(SETTINGS)],
            StopRules(max_tokens=random.randint(1, 48), stop_ids=frozenset(config.eos_token_ids)),
        )
        for i, length in enumerate(lengths)
    ]


def configurations(random: Random, num_depths: int, count: int) -> list[tuple[int, str, int]]:
    """``count`` triples (N, arrivals, chunk) in which every pair of values of two of them occurs."""
    pairs = list(product(range(num_depths + 1), CHUNKS))
    triples = [(n, ARRIVALS[(i + i // len(CHUNKS)) % 3], chunk) for i, (n, chunk) in enumerate(pairs)]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        everything = {(t[i], t[j]) for t in product(range(num_depths + 1), ARRIVALS, CHUNKS)}
        assert {(t[i], t[j]) for t in triples} == everything, "a pair of values does not occur"
    more = max(8, count - len(triples))  # with all depths, so that every acceptance count occurs often
    return triples + [(num_depths, random.choice(ARRIVALS), random.choice(CHUNKS)) for _ in range(more)]


def test_every_configuration_returns_the_tokens_of_the_target_alone(models: LocalModels) -> None:
    random = Random(20261130)
    requests = random_requests(random, models)
    expected = [generate(models.engine(), [request])[0].ids for request in requests]
    references = References(zip(requests, expected, strict=True))

    runs, differing, verified = Counter(), [], Counter()
    order: list[int] = []
    triples = configurations(random, models.num_depths, count=-(-4 * NUM_REQUESTS // GROUP))
    for index, (n, arrival, chunk) in enumerate(triples):
        while len(order) < GROUP:
            order += random.sample(range(NUM_REQUESTS), NUM_REQUESTS)
        group, order = order[:GROUP], order[GROUP:]
        draft = None
        if index % 2 or index >= len(triples) - 6:
            draft = models.scripted_draft(references, seed=index)
        engine = models.engine(
            draft, max_running_sequences=1 if arrival == "alone" else GROUP, max_prompt_chunk=chunk
        )
        drafted = [replace(requests[i], num_draft_tokens=n) for i in group]
        replies = generate(engine, drafted, Random(index) if arrival == "random" else None)
        differing += [
            (i, n, arrival, chunk) for i, r in zip(group, replies, strict=True) if r.ids != expected[i]
        ]
        runs.update(group)
        verified += engine.verified
    assert not differing
    assert min(runs[i] for i in range(NUM_REQUESTS)) >= 4
    for accepted in range(models.num_depths + 1):
        assert verified[models.num_depths, accepted] >= 50, verified


def test_an_automatic_draft_length_returns_the_tokens_of_the_target_alone(models: LocalModels) -> None:
    """Lengths change by the step and depths are given up, with the model's own depths and with scripted ones."""
    random = Random(7)
    requests = random_requests(random, models)[:48]
    expected = [generate(models.engine(), [request])[0].ids for request in requests]
    references = References(zip(requests, expected, strict=True))
    drafted = [replace(request, num_draft_tokens=models.num_depths) for request in requests]
    for index, probability in enumerate((None, 0.0, 0.5, 0.95)):
        draft = None
        if probability is not None:
            draft = ScriptedDraft(
                models.deployment.layout,
                references,
                vocab_size=models.deployment.config.vocab_size,
                num_depths=models.num_depths,
                probability=probability,
                seed=index,
                generation=GENERATION,
            )
        engine = models.engine(draft, auto_draft_length=True)
        replies = generate(engine, drafted, Random(index) if index % 2 else None)
        assert [reply.ids for reply in replies] == expected
        assert len({num_drafts for num_drafts, _ in engine.verified}) > 1, "one length only"

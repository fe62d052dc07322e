"""Whole answers of three tokens through the engine, over a target whose logits are a table: their distribution is
the product of the three rows' shaped and filtered softmax, whatever was drafted."""

from __future__ import annotations

from collections import Counter
from itertools import product
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from inkling.engine.loop import Engine
from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from inkling.engine.scheduler import EngineLimits
from inkling.protocol import DraftStep, unpack
from inkling.testing import tiny_config, write_random_checkpoint
from tests.in_process import SESSION, LocalModels, generate
from tests.kernels.test_penalties import pooled
from tests.kernels.test_sampling import chi_square_p_value, filtered_softmax
from tests.model.stepping import new_target
from tests.test_shaped_sampling import shaped

VOCAB = 5
PROMPT = (1, 3, 3)
NUM_ANSWERS = 20_000
GROUP = 500  # answers drawn at a time
STOP = 4  # an id that min_tokens holds back
SETTINGS: dict[str, dict] = {
    "all penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.6, "frequency_penalty": 0.8},
    "rewarded repeats": {"frequency_penalty": -1.0, "temperature": 1.4},
    "repetition with top_p": {"repetition_penalty": 0.7, "top_p": 0.9},
    "bias with min_p": {"logit_bias": ((0, 1.0), (2, -1.5)), "min_p": 0.05},
    "bad words with top_k": {"bad_words": ((0, 0), (2,), (1, 3, 4)), "top_k": 4},
    "minimum with presence": {"presence_penalty": 1.2, "min_tokens": 2},
}


class TableModel:
    """Logits after an id are a row of a table; states carry the id."""

    def __init__(self, table: Tensor):
        self.table = table

    def hidden(self, ids: Tensor, cache: object, batch: object) -> Tensor:
        return ids[:, None].float()

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return self.table[hidden[rows, 0].long()]


class RandomDraft:
    def __init__(self) -> None:
        self.random = Random(1)

    def step(self, control: np.ndarray, hidden: object) -> np.ndarray:
        count = int(unpack(DraftStep, control).segments[:, 7].sum())
        return np.array([self.random.randrange(VOCAB) for _ in range(count)], np.int32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> LocalModels:
    directory = tmp_path_factory.mktemp("checkpoint")
    config = tiny_config(vocab_size=VOCAB, padded_vocab_size=8, num_layers=1, layer_is_local=(False,),
                         layer_is_dense=(True,))  # fmt: skip
    write_random_checkpoint(directory, config, dtype=torch.float32)
    return LocalModels(directory, max_context=32, max_running_sequences=64, threads=1)


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_follow_the_product_of_their_rows(models: LocalModels, name: str) -> None:
    setting = dict(SETTINGS[name])
    rules = StopRules(
        3, setting.pop("min_tokens", 0), frozenset({STOP}) if "minimum" in name else frozenset()
    )
    table = 1.2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4))
    deployment = models.deployment
    target = new_target(models, deployment.layout)
    target.model = TableModel(table)
    limits = EngineLimits(32, 64, 512, GROUP, models.num_depths)
    engine = Engine(limits, deployment.layout, target, RandomDraft(), SESSION)

    counts: Counter = Counter()
    for start in range(0, NUM_ANSWERS, GROUP):
        requests = [
            GenerateRequest(PROMPT, SamplingParams(**{"temperature": 1.0, "seed": seed} | setting), rules,
                            num_draft_tokens=seed % 2 * models.num_depths)
            for seed in range(start, start + GROUP)
        ]  # fmt: skip
        counts.update(tuple(reply.ids) for reply in generate(engine, requests))
    prob = distribution(table.numpy(), requests[0])
    assert set(counts) <= set(prob)
    answers = sorted(prob)
    observed = torch.tensor([counts[answer] for answer in answers])
    expected = torch.tensor([prob[answer] for answer in answers], dtype=torch.float64)
    assert chi_square_p_value(*pooled(observed, expected)) > 1e-4


def distribution(table: np.ndarray, request: GenerateRequest) -> dict[tuple[int, ...], float]:
    """Answers with a probability above 0, row by row from the definitions."""
    s = request.sampling
    filters = {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "min_p": s.min_p}
    rows: dict[tuple[int, ...], list[float]] = {}
    prob: dict[tuple[int, ...], float] = {}
    for whole in product(range(VOCAB), repeat=3):
        p, answer = 1.0, []
        for token in whole:
            key = tuple(answer)
            if key not in rows:
                logits = table[(*request.prompt_ids, *answer)[-1]]
                rows[key] = filtered_softmax(
                    torch.from_numpy(shaped(logits, request, answer)), **filters
                ).tolist()
            p *= rows[key][token]
            answer.append(token)
            if token in request.stop.stop_ids:
                break
        if p > 0:
            prob[tuple(answer)] = p
    return prob

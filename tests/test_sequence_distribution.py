"""Whole answers of three tokens through the engine, over models whose logits are a table: their distribution is
the product of the three rows' shaped and filtered softmax, whatever was drafted.

The depths are the real ones but for their logits, so they draw with the target's own noise, as in serving: were an
acceptance to favour a token, the counts of the answers would show it.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest
import torch
from torch import Tensor

from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from inkling.engine.scheduler import EngineLimits
from inkling.testing import tiny_config, write_random_checkpoint
from tests.in_process import SESSION, CountingEngine, LocalModels, generate
from tests.kernels.test_penalties import pooled
from tests.kernels.test_sampling import chi_square_p_value, filtered_softmax
from tests.model.stepping import new_draft, new_target
from tests.test_shaped_sampling import shaped

VOCAB = 5
LENGTH = 3
PROMPT = (1, 3, 3)
SLOTS = 250
GROUP = 4 * SLOTS  # answers drawn at a time
STOP = 4  # an id that min_tokens holds back, and that ends an answer after them
SETTINGS: dict[str, dict] = {  # six that `make test` runs
    "all penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.6, "frequency_penalty": 0.8},
    "rewarded repeats": {"frequency_penalty": -1.0, "temperature": 1.4},
    "repetition with top_p": {"repetition_penalty": 0.7, "top_p": 0.9},
    "bias with min_p": {"logit_bias": ((0, 1.0), (2, -1.5)), "min_p": 0.05},
    "bad words with top_k": {"bad_words": ((0, 0), (2,), (1, 3, 4)), "top_k": 4},
    "minimum with presence": {"presence_penalty": 1.2, "min_tokens": 2},
}
EACH: dict[str, dict] = {
    "temperature": {"temperature": 1.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.85},
    "min_p": {"min_p": 0.12},
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": -0.7},
    "bias": {"logit_bias": ((0, 0.9), (2, -1.1))},
    "bad words": {"bad_words": ((0, 0), (3, 1), (2, 1, 4))},
    "min_tokens": {"min_tokens": 2},
}
PAIRS = {f"{a} and {b}": EACH[a] | EACH[b] for a, b in combinations(EACH, 2)}


class TableModel:
    """Logits after an id are a row of a table; states carry the id."""

    def __init__(self, tables: list[Tensor], hidden_size: int):
        self.tables = tables
        self.width = hidden_size

    def hidden(self, ids: Tensor, cache: object, batch: object) -> Tensor:
        self.table = self.tables[0]
        return ids[:, None].float().expand(-1, self.width)

    def depth(self, k: int, states: Tensor, ids: Tensor, cache: object, batch: object) -> Tensor:
        self.table = self.tables[k]
        return ids[:, None].float().expand(-1, self.width)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return self.table[hidden[rows, 0].long()]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> LocalModels:
    directory = tmp_path_factory.mktemp("checkpoint")
    config = tiny_config(hidden_size=16, vocab_size=VOCAB, padded_vocab_size=8, num_layers=1,
                         layer_is_local=(False,), layer_is_dense=(True,))  # fmt: skip
    write_random_checkpoint(directory, config, dtype=torch.float32)
    return LocalModels(directory, max_context=32, max_running_sequences=SLOTS, threads=1)


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_follow_the_product_of_their_rows(models: LocalModels, name: str) -> None:
    check_answers(models, SETTINGS[name], 20_000)


@pytest.mark.soak
@pytest.mark.timeout(3600)  # seconds; a shared machine takes its time
@pytest.mark.parametrize("name", PAIRS)
def test_answers_under_every_pair_of_settings_follow_the_product_of_their_rows(
    models: LocalModels, name: str
) -> None:
    check_answers(models, PAIRS[name], 100_000)


def check_answers(models: LocalModels, setting: dict, num_answers: int) -> None:
    """Draws with the seeds 0, 1, 2 ...; every fourth answer is undrafted, every other one goes on after LENGTH tokens,
    so that windows of two drafts end there, too."""
    stop_ids = frozenset({STOP} if "min_tokens" in setting else ())
    rules = [StopRules(LENGTH + more, setting.get("min_tokens", 0), stop_ids) for more in (0, 1)]
    values = {"temperature": 1.0} | {key: value for key, value in setting.items() if key != "min_tokens"}
    generator = torch.Generator().manual_seed(4)
    table, *errors = 1.2 * torch.randn(1 + models.num_depths, VOCAB, VOCAB, generator=generator)
    layout, depths = models.deployment.layout, models.num_depths
    target, draft = new_target(models, layout), new_draft(models, layout)
    width = models.deployment.config.hidden_size
    target.model = TableModel([table], width)
    draft.model = TableModel([table + 1.2 * error for error in errors], width)
    engine = CountingEngine(EngineLimits(32, SLOTS, 4 * SLOTS, GROUP, depths), layout, target, draft, SESSION)
    engine.verified = Counter()

    counts: Counter = Counter()
    for start in range(0, num_answers, GROUP):
        requests = [
            GenerateRequest(
                PROMPT, SamplingParams(seed=seed, **values), rules[seed % 2], depths if seed % 4 else 0
            )
            for seed in range(start, start + GROUP)
        ]
        counts.update(tuple(reply.ids[:LENGTH]) for reply in generate(engine, requests))
    prob = distribution(table.numpy(), requests[0])
    assert set(counts) <= set(prob)
    answers = sorted(prob)
    observed = torch.tensor([counts[answer] for answer in answers])
    expected = torch.tensor([prob[answer] for answer in answers], dtype=torch.float64)
    assert chi_square_p_value(*pooled(observed, expected)) > 1e-4
    verified = Counter(accepted for _, accepted in engine.verified.elements())
    assert min(verified[accepted] for accepted in range(LENGTH)) > num_answers // 100, verified


def distribution(table: np.ndarray, request: GenerateRequest) -> dict[tuple[int, ...], float]:
    """Answers with a probability above 0, row by row from the definitions."""
    s = request.sampling
    filters = {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "min_p": s.min_p}
    rows: dict[tuple[int, ...], list[float]] = {}
    prob: dict[tuple[int, ...], float] = {}
    for whole in product(range(VOCAB), repeat=LENGTH):
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

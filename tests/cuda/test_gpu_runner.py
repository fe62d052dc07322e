"""The promise on a GPU: the demo checkpoint through the engine over the CUDA runners, with graphs and without.

The bodies are those of the CPU's tests. ``-k eager`` and ``-k graphs`` may run at the same time.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from inkling.text import load_tokenizer
from tests.in_process import LocalModels, generate
from tests.test_acceptance import test_three_drafts_reach_an_accepted_length_of_2_8  # noqa: F401
from tests.test_prefix_promise import (
    BLOCK,
    test_a_hit_at_every_boundary_gives_the_bits_of_a_whole_prompt,  # noqa: F401
    test_hits_and_preemptions_return_the_tokens_of_the_target_alone,  # noqa: F401
)
from tests.test_promise import (
    DEMO,
    test_an_automatic_draft_length_returns_the_tokens_of_the_target_alone,  # noqa: F401
    test_every_configuration_returns_the_tokens_of_the_target_alone,  # noqa: F401
)
from tests.test_traffic import CUT, check_traffic
from tests.traffic import MAX_CONTEXT, SLOTS

pytestmark = pytest.mark.gpu
PREFIXES = {"prefix_block": BLOCK, "prefix_cache": "on"}


def _models(device: str, graphs: bool, **settings: object) -> LocalModels:
    from tests.cuda.cuda_models import CudaModels

    models = CudaModels(DEMO, device, max_running_sequences=SLOTS, threads=1, **PREFIXES, **settings)
    if graphs:
        models.capture(_print_summary)
    return models


def _print_summary(line: str) -> None:
    if " graphs in " in line:
        print(line, flush=True)


@pytest.fixture(scope="module", params=["eager", "graphs"])
def models(request: pytest.FixtureRequest, device: str) -> LocalModels:
    return _models(device, request.param == "graphs", max_context=512)


@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_random_traffic_gets_the_answers_of_requests_alone(device: str, mode: str) -> None:
    check_traffic("demo", _models(device, mode == "graphs", max_context=MAX_CONTEXT), CUT["demo"])


def held_out(count: int, **options: object) -> list[GenerateRequest]:
    tokenizer = load_tokenizer(DEMO)
    texts = [prompt["text"] for prompt in json.loads((DEMO.parent / "prompts.json").read_text())[:count]]
    return [GenerateRequest(tuple(tokenizer.encode(text).ids), **options) for text in texts]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_graphs_change_no_bit_of_what_a_step_returns(device: str, temperature: float) -> None:
    from inkling.model.cuda_graphs import StepGraphs
    from tests.cuda.cuda_models import recorded

    models = _models(device, True, max_context=512)
    requests = [
        replace(request, sampling=SamplingParams(temperature, top_k=(i % 3) * 20, seed=i), log_probs=i % 2)
        for i, request in enumerate(held_out(24, stop=StopRules(40), num_draft_tokens=models.num_depths))
    ]
    graphed = recorded(models, requests)
    with models.with_graphs(StepGraphs):
        eager = recorded(models, requests)
    assert len(graphed) == len(eager) > 100
    for number, (a, b) in enumerate(zip(graphed, eager, strict=True)):
        assert torch.equal(a, b), f"result {number} of {len(eager)}"


def test_states_are_those_of_the_cpu(models: LocalModels) -> None:
    """Teacher-forced on text: log probs of the prompt's tokens, bf16 against fp32."""
    on_cpu = LocalModels(DEMO, max_context=512, max_running_sequences=4, threads=1)
    requests = held_out(4, stop=StopRules(1), prompt_log_probs=1)
    values = [
        np.array([p.log_prob for r in generate(m.engine(), requests) for p in r.chunks[-1].prompt_log_probs])
        for m in (models, on_cpu)
    ]
    difference = np.abs(values[0] - values[1])
    print(
        f"log probs of {len(difference)} tokens differ by {difference.mean():.4f}, at most {difference.max():.4f}"
    )
    assert difference.mean() < 0.05 and len(difference) > 100


def test_sampled_drafts_are_accepted_as_often_as_on_the_cpu(models: LocalModels) -> None:
    """Target and draft share their noise: without it, or at other positions, far fewer would stand."""
    requests = [
        replace(request, sampling=SamplingParams(0.8, top_p=(1.0, 0.9)[i % 2], seed=i))
        for i, request in enumerate(held_out(24, stop=StopRules(40), num_draft_tokens=3))
    ]
    accepted = []
    for served in (models, LocalModels(DEMO, max_context=512, max_running_sequences=24, threads=1)):
        engine = served.engine()
        generate(engine, requests)
        steps = sum(engine.verified.values())
        accepted.append(sum(stood * times for (_, stood), times in engine.verified.items()) / steps)
    print(f"accepted drafts a step: {accepted[0]:.3f}, on the CPU {accepted[1]:.3f}")
    assert accepted[0] > 0.95 * accepted[1]

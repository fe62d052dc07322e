"""The promise through the real server: three processes, BLS, both transports, requests that come and go."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from inkling.client import stream
from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from tests.in_process import LocalModels, generate
from tests.test_promise import DEMO, SETTINGS

pytestmark = pytest.mark.server
NUM_REQUESTS = 100
CLIENTS = 8
THREADS = 1  # part of the promise: the reference is computed with as many


def random_request(random: Random, models: LocalModels, i: int) -> GenerateRequest:
    config = models.deployment.config
    short = list(range(1, models.num_depths + 3))
    length = short[i] if i < len(short) else random.randint(1, 400 if random.random() < 0.2 else 60)
    return GenerateRequest(
        tuple(random.randrange(config.vocab_size) for _ in range(length)),
        SETTINGS[i % len(SETTINGS)],
        StopRules(max_tokens=random.randint(1, 48), stop_ids=frozenset(config.eos_token_ids)),
    )


def held_out_request(random: Random, models: LocalModels, prompt: list[int], i: int) -> GenerateRequest:
    """Real text: its drafts are accepted."""
    rules = StopRules(
        max_tokens=random.randint(8, 48), stop_ids=frozenset(models.deployment.config.eos_token_ids)
    )
    return GenerateRequest(tuple(prompt), SETTINGS[i % len(SETTINGS)], rules)


def inputs(request: GenerateRequest, num_drafts: int) -> dict[str, object]:
    sampling: SamplingParams = request.sampling
    return {
        "input_ids": list(request.prompt_ids),
        "max_tokens": request.stop.max_tokens,
        "num_draft_tokens": num_drafts,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "return_perf_metrics": True,
    }


@pytest.mark.parametrize(
    ("max_prompt_chunk", "transport"),
    [(0, "ring"), (7, "dlpack")],
    ids=["whole prompts, mapped ring", "chunks of 7, tensors through the server"],
)
def test_the_server_returns_the_tokens_of_the_target_alone(
    start_server, max_prompt_chunk: int, transport: str
) -> None:
    from inkling.text import load_tokenizer

    models = LocalModels(DEMO, max_context=512, threads=THREADS)
    tokenizer = load_tokenizer(DEMO)
    random = Random(max_prompt_chunk)
    prompts = json.loads((DEMO.parent / "prompts.json").read_text())
    texts = [tokenizer.encode(p["text"]).ids for p in prompts][: NUM_REQUESTS // 4]
    requests = [held_out_request(random, models, prompt, i) for i, prompt in enumerate(texts)]
    requests += [random_request(random, models, i) for i in range(NUM_REQUESTS // 2 - len(texts))]
    expected = [generate(models.engine(), [request])[0].ids for request in requests]

    server = start_server(
        DEMO,
        max_context=512,
        threads=THREADS,
        draft_length="fixed",
        max_prompt_chunk=max_prompt_chunk,
        hidden_transport=transport,
    )
    urls = (f"grpc://{server.grpc_url}", f"http://{server.http_url}")
    calls = [(urls[i % 2], inputs(r, random.randint(0, models.num_depths))) for i, r in enumerate(requests)]

    def run(call: tuple[str, dict[str, object]]) -> tuple[list[int], int]:
        responses = list(stream(*call))
        return [t for r in responses for t in r["output_ids"]], responses[-1]["total_accepted_draft_tokens"]

    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(run, calls))
    differing = [i for i, (ids, _) in enumerate(answers) if ids != expected[i]]
    assert not differing
    assert sum(accepted for _, accepted in answers) > 50, "drafts of real text were not accepted"

"""Penalties, bias, bad words and log probs through the engine: the answer of the target alone, recomputed in float64
from its own logits, and the same tokens and bits for every number of drafts, batch and chunk."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations
from random import Random

import numpy as np
import pytest
import torch

from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from inkling.protocol import SlotOptions
from inkling.testing import tiny_config, write_random_checkpoint
from kernels.sampling import gumbel_noise
from tests.engine.scripted import References, ScriptedDraft
from tests.in_process import GENERATION, LocalModels, generate
from tests.model.stepping import TargetSteps, new_target

SLOTS = 32
DEPTHS = 8
NUM_TOKENS = 20
SETTINGS: dict[str, dict] = {
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -1.2},  # negative: repeats are wanted, so counts grow
    "bias": {"logit_bias": ((3, 2.5), (7, -100.0), (11, 1.0))},
    "bad words": {"bad_words": ((3,), (5, 6), (11, 11), (2, 9, 4))},
}
SHAPES = SETTINGS | {f"{a} and {b}": SETTINGS[a] | SETTINGS[b] for a, b in combinations(SETTINGS, 2)}
SHAPES["all"] = {key: value for setting in SETTINGS.values() for key, value in setting.items()}
FILTERS: dict[str, dict] = {  # the depths apply these, too
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
}
SEEDED = SETTINGS | FILTERS | {"minimum": {}}  # "minimum": min_tokens before stop ids
SEEDED["all"] = SHAPES["all"] | FILTERS["top_k"] | FILTERS["top_p"] | FILTERS["min_p"]
SEEDED["all and minimum"] = SEEDED["all"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> LocalModels:
    """A vocabulary of 20 ids: repeats and bad words are met all the time."""
    directory = tmp_path_factory.mktemp("checkpoint")
    config = tiny_config(
        vocab_size=20,
        padded_vocab_size=24,
        num_layers=2,
        layer_is_local=(True, False),
        layer_is_dense=(True, False),
        mtp_depths=DEPTHS,
        mtp_is_local=(True,) * DEPTHS,
    )
    write_random_checkpoint(directory, config, seed=5, dtype=torch.float32)
    return LocalModels(directory, max_context=128, max_running_sequences=SLOTS, threads=1)


def request_of(random: Random, shape: dict, **options) -> GenerateRequest:
    prompt = tuple(random.randrange(20) for _ in range(random.randint(1, 9)))
    sampling = SamplingParams(
        temperature=random.choice((0.0, 0.8, 1.2)), seed=random.getrandbits(64), **shape
    )
    rules = StopRules(NUM_TOKENS, random.choice((0, 0, 6)), frozenset(random.sample(range(20), 1)))
    return GenerateRequest(prompt, sampling, rules, **options)


def scripted(models: LocalModels, references: References, seed: int = 0) -> ScriptedDraft:
    return ScriptedDraft(
        models.deployment.layout,
        references,
        vocab_size=20,
        num_depths=DEPTHS,
        probability=0.9,
        seed=seed,
        generation=GENERATION,
    )


def logits_of(models: LocalModels, ids: list[int]) -> np.ndarray:
    """The model's own logits [T, V'] after each of ``ids``."""
    layout = models.deployment.layout
    steps = TargetSteps(new_target(models, layout), layout)
    steps.open(SlotOptions(0, 0), len(ids), len(ids))
    with torch.inference_mode():
        return models.target.model.logits(steps.prompt(0, ids, [len(ids)]), torch.arange(len(ids))).numpy()


def shaped(logits: np.ndarray, request: GenerateRequest, output: list[int]) -> np.ndarray:
    """One row by the definitions, in float64, with no knowledge of windows."""
    s, x = request.sampling, logits.astype(np.float64)
    for token in {*request.prompt_ids, *output}:
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= s.presence_penalty + count * s.frequency_penalty
    for token, bias in s.logit_bias:
        x[token] += bias
    for *prefix, last in s.bad_words:
        if output[len(output) - len(prefix) :] == prefix:
            x[last] = -np.inf
    if len(output) < request.stop.min_tokens:
        x[list(request.stop.stop_ids)] = -np.inf
    return x


def check_by_definition(models: LocalModels, request: GenerateRequest, ids: list[int]) -> None:
    logits = logits_of(models, [*request.prompt_ids, *ids])
    num_prompt = len(request.prompt_ids)
    for i, token in enumerate(ids):
        x = shaped(logits[num_prompt - 1 + i], request, ids[:i])
        if request.sampling.temperature:
            seed = torch.tensor([np.uint64(request.sampling.seed).astype(np.int64)])
            noise = gumbel_noise(seed, torch.tensor([num_prompt + i]), len(x))[0].double().numpy()
            x = x / request.sampling.temperature + noise
        assert x[token] >= x.max() - 1e-4, (i, token, int(x.argmax()))


@pytest.mark.parametrize("name", SHAPES)
def test_every_number_of_drafts_draws_what_the_definitions_say(models: LocalModels, name: str) -> None:
    random = Random(name)
    requests = [request_of(random, SHAPES[name]) for _ in range(16)]
    expected = [reply.ids for reply in generate(models.engine(), requests)]
    assert [generate(models.engine(), [r])[0].ids for r in requests[:4]] == expected[:4]
    plain = [replace(r, sampling=replace(SamplingParams(), temperature=r.sampling.temperature,
                                         seed=r.sampling.seed)) for r in requests]  # fmt: skip
    assert [reply.ids for reply in generate(models.engine(), plain)] != expected, "the setting does nothing"
    for request, ids in zip(requests, expected, strict=True):
        check_by_definition(models, request, ids)
    references = References(zip(requests, expected, strict=True))
    verified: Counter = Counter()
    for n in range(DEPTHS + 1):
        for draft in (scripted(models, references, n), None)[: 1 + (name in SETTINGS and n in (1, DEPTHS))]:
            drafted = [replace(request, num_draft_tokens=n) for request in requests]
            engine = models.engine(draft, max_prompt_chunk=random.choice((1, 3, 64)))
            replies = generate(engine, drafted, Random(n))
            assert [reply.ids for reply in replies] == expected, n
            verified += engine.verified
    assert all(sum(verified[n, a] for n in range(a, DEPTHS + 1)) > 1 for a in range(DEPTHS + 1)), verified


@pytest.mark.parametrize(
    "every_n", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one N", "every N"]
)
@pytest.mark.parametrize("name", SEEDED)
def test_a_thousand_seeds_draw_the_same_tokens_with_any_drafts(
    models: LocalModels, name: str, every_n: bool
) -> None:
    random = Random(len(name))
    # a first token, a window of all drafts, the token behind it
    rules = StopRules(
        DEPTHS + 2, 3 if "minimum" in name else 0, frozenset({4, 9} if "minimum" in name else ())
    )
    requests = [
        GenerateRequest(
            (random.randrange(20), random.randrange(20)),
            SamplingParams(**{"temperature": 1.0, "seed": seed} | SEEDED[name]),
            rules,
        )
        for seed in range(1000)
    ]
    expected = [reply.ids for reply in generate(models.engine(max_queued_requests=1000), requests)]
    draft = scripted(models, References(zip(requests, expected, strict=True)))
    verified: Counter = Counter()
    for shift in range(DEPTHS if every_n else 1):  # 0 drafts are the reference
        drafted = [replace(r, num_draft_tokens=1 + (i + shift) % DEPTHS) for i, r in enumerate(requests)]
        engine = models.engine(draft, max_queued_requests=1000)
        assert [reply.ids for reply in generate(engine, drafted)] == expected
        verified += engine.verified
    assert all(verified[n, a] for n in range(1, DEPTHS + 1) for a in range(n + 1)), verified


def test_histories_survive_a_lost_step(models: LocalModels) -> None:
    random = Random(8)
    requests = [
        request_of(random, SHAPES[name]) for name in ("all", "repetition", "bad words", "frequency") * 2
    ]
    expected = [reply.ids for reply in generate(models.engine(), requests)]
    draft = scripted(models, References(zip(requests, expected, strict=True)))
    drafted = [replace(request, num_draft_tokens=DEPTHS) for request in requests]
    for gap in range(1, 12):
        engine, steps = models.engine(draft, max_prompt_chunk=3), 0
        run_target = engine._run_target

        def lossy(plan, pages, run_target=run_target, gap=gap):
            nonlocal steps
            steps += 1
            if steps == gap:
                models.target.slots.last_step = -1
                for rules in models.target.rules._slots.values():  # what was kept is worth nothing
                    if rules.counts is not None:
                        rules.counts = rules.counts + 7
            return run_target(plan, pages)

        engine._run_target = lossy
        assert [reply.ids for reply in generate(engine, drafted)] == expected, gap


def scores_of(reply) -> tuple[list, list, float]:
    given = [scored for chunk in reply.chunks for scored in chunk.log_probs]
    prompts = [chunk.prompt_log_probs for chunk in reply.chunks if chunk.prompt_log_probs is not None]
    return given, prompts, reply.chunks[-1].cum_log_prob


def test_log_probs_are_those_of_the_raw_logits_and_the_same_bits_in_every_run(models: LocalModels) -> None:
    random = Random(3)
    requests = [
        request_of(random, SHAPES["all"] if i % 2 else {}, log_probs=i % 4, prompt_log_probs=i % 3)
        for i in range(24)
    ]
    replies = [generate(models.engine(), [request])[0] for request in requests]
    expected = [(reply.ids, *scores_of(reply)) for reply in replies]
    for request, (ids, given, prompts, total) in zip(requests, expected, strict=True):
        logits = torch.from_numpy(logits_of(models, [*request.prompt_ids, *ids])).double()
        log_probs = logits.log_softmax(1)
        num_prompt = len(request.prompt_ids)
        assert [scored.token for scored in given] == (ids if request.log_probs else [])
        assert total == sum(scored.log_prob for scored in given)
        rows = [(num_prompt - 1 + i, request.log_probs, scored) for i, scored in enumerate(given)]
        assert len(prompts) == bool(request.prompt_log_probs)
        if prompts:
            assert [scored.token for scored in prompts[0]] == list(request.prompt_ids[1:])
            rows += [(i, request.prompt_log_probs, scored) for i, scored in enumerate(prompts[0])]
        for row, wanted, scored in rows:
            assert abs(scored.log_prob - log_probs[row, scored.token]) < 1e-5
            order = sorted(range(20), key=lambda i, row=row: (-logits[row, i], i))
            assert [token for token, _ in scored.top] == order[: wanted - 1]
            assert order[scored.rank - 1] == scored.token
    references = References((r, ids) for r, (ids, *_) in zip(requests, expected, strict=True))
    for n in range(DEPTHS + 1):
        for chunk in (1, 4, 64):
            draft = scripted(models, references, n) if chunk != 4 else None
            engine = models.engine(draft, max_prompt_chunk=chunk, max_tokens_per_step=32)
            drafted = [replace(request, num_draft_tokens=n) for request in requests]
            for (ids, *scores), reply in zip(expected, generate(engine, drafted, Random(n)), strict=True):
                assert reply.ids == ids and list(scores_of(reply)) == scores, (
                    n,
                    chunk,
                )  # equal floats: equal bits


def test_log_probs_end_with_the_cut(models: LocalModels) -> None:
    """Drafts that were accepted beyond a stop have log probs in the target's answer and none in ours."""
    random = Random(12)
    requests = [request_of(random, {}, log_probs=2) for _ in range(40)]
    expected = [reply.ids for reply in generate(models.engine(), requests)]
    endless = [replace(r, stop=StopRules(NUM_TOKENS + 5)) for r in requests]
    beyond = [reply.ids for reply in generate(models.engine(), endless)]
    draft = scripted(models, References(zip(requests, beyond, strict=True)))
    draft.probability = 1.0
    replies = generate(models.engine(draft), [replace(r, num_draft_tokens=DEPTHS) for r in requests])
    assert [reply.ids for reply in replies] == expected
    for reply in replies:
        given, _, total = scores_of(reply)
        assert [scored.token for scored in given] == reply.ids
        assert total == sum(scored.log_prob for scored in given)


def test_bad_words_never_appear_and_minimum_holds(models: LocalModels) -> None:
    random = Random(6)
    requests = [request_of(random, SHAPES["bad words"], num_draft_tokens=3) for _ in range(60)]
    for request, reply in zip(requests, generate(models.engine(), requests), strict=True):
        for word in request.sampling.bad_words:
            n = len(word)
            assert all(tuple(reply.ids[i : i + n]) != word for i in range(len(reply.ids)))
        assert len(reply.ids) >= request.stop.min_tokens

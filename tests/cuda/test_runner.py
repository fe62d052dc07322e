"""The CUDA runners on a small checkpoint: the CPU's states, and the same tokens whatever is drafted, batched or cut.

In the interpreter a step takes seconds, so there are few; ``test_gpu_runner`` has the many.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from inkling.config import AttentionGeometry
from inkling.engine.log_probs import TokenLogProb
from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from inkling.errors import GenerationError, StepGapError
from inkling.protocol import DraftStep, SlotOptions, TargetStep
from inkling.testing import tiny_config, write_random_checkpoint
from tests.engine.harness import RecordedReply
from tests.engine.scripted import References
from tests.in_process import LocalModels, generate
from tests.model.stepping import DraftSteps, Run, TargetSteps, readable

SMALL = tiny_config(
    num_layers=2,
    vocab_size=61,
    padded_vocab_size=64,
    full=AttentionGeometry(2, 1, 16, 24, None),
    local=AttentionGeometry(4, 2, 16, 11, 11),
    layer_is_local=(False, True),
    layer_is_dense=(True, False),
    num_experts=4,
    mtp_depths=2,
    mtp_is_local=(True, False),
)
SETTINGS = {"max_context": 64, "max_running_sequences": 4, "max_tokens_per_step": 32, "threads": 1}
NEAR = 0.03  # of the norm: bf16 against fp32 through two layers
IDS = [5, 17, 3, 44, 60, 8, 21, 33, 2, 50, 11, 29, 7, 36, 41, 19]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small")
    write_random_checkpoint(directory, SMALL, seed=3)
    return directory


@pytest.fixture(scope="module")
def models(checkpoint: Path, device: str):
    from tests.cuda.cuda_models import CudaModels

    return CudaModels(checkpoint, device, **SETTINGS)


@pytest.fixture(scope="module")
def on_cpu(checkpoint: Path) -> LocalModels:
    return LocalModels(checkpoint, **SETTINGS)


def assert_near(got: Tensor, expected: Tensor, bound: float = NEAR) -> None:
    got = got.float().cpu()
    assert (got - expected).norm() <= bound * expected.norm(), (got - expected).norm() / expected.norm()


def steps_of(models: LocalModels, *slots: int) -> TargetSteps:
    steps = TargetSteps(models.target, models.deployment.layout)
    for slot in slots:
        steps.open(SlotOptions(slot, 2), max_positions=40, max_chunk=32)
    return steps


def test_states_are_those_of_the_cpu_and_stay_until_the_next_step_but_one(models, on_cpu):
    passes = [
        (Run(0, 0, IDS[:9], 1),),
        (Run(0, 9, IDS[9:12], 3), Run(1, 0, IDS[4:11], 1)),  # a verified window beside a prompt
        (Run(1, 7, IDS[:2], 2), Run(0, 10, IDS[12:13], 1)),  # short segments alone; position 10 written anew
    ]
    steps, expected = steps_of(models, 0, 1), steps_of(on_cpu, 0, 1)
    kept: list[tuple[Tensor, Tensor]] = []
    for runs in passes:
        got, wanted = steps.step(*runs), expected.step(*runs)
        for (states, _), (true, _) in zip(got, wanted, strict=True):
            assert_near(states, true)
        if kept:
            assert torch.equal(*kept.pop())
        kept.append((got[0][0], got[0][0].clone()))


def fill_and_draft(models: LocalModels, hidden: Tensor) -> tuple[list[Tensor], list[int]]:
    """A prompt's window of a greedy and of a sampled slot, then a long and a short one that reach back into the rings
    and draw; -> readable caches and the drafts."""
    runner, layout = models.draft, models.deployment.layout
    steps, ids = DraftSteps(runner, layout), (IDS * 4)[:50]
    for slot, temperature in ((1, 0.0), (2, 1.5)):
        steps.open(SlotOptions(slot, 2, temperature, seed=2**63 + 5), max_positions=50, max_chunk=32)
        steps.fill(slot, hidden[:9], ids, end=9, depths=2)
    drafts: list[int] = []
    for first, start, end in ((7, 9, 44), (43, 44, 46)):  # 35 new states go once around a ring of 33
        updates: list[int] = []
        segments = [(0, 0, 0, 1, 0, 0, 0, 0, 0)]
        for slot in (1, 2):
            steps.pages[slot].cover(first, end, slot, updates)
            segments.append((slot, 1, start, end - start, first, end, 2, 2, end - first))
        known = ids[first + 1 : end + 1] * 2
        states = hidden[start - 1 : end].contiguous()
        drafts += runner.step(steps.control(DraftStep, updates, segments, known), states).tolist()
    caches = [
        cache for slot in (1, 2) for cache in readable(runner.cache, runner.slots.tables, layout, slot, 46)
    ]
    return caches, drafts


def test_depths_have_the_caches_and_the_drafts_of_the_cpu(models, on_cpu, device):
    hidden = torch.randn(46, SMALL.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    caches, drafts = fill_and_draft(models, hidden.to(device))
    expected, true_drafts = fill_and_draft(on_cpu, hidden.float())
    assert drafts == true_drafts and len(drafts) == 8 and drafts[:2] != drafts[2:4]
    for got, wanted in zip(caches, expected, strict=True):
        assert_near(got, wanted)
    ring_rows = models.draft.ring_rows
    for slot in (1, 2):
        kept = models.draft.ring[slot * ring_rows :][:ring_rows].cpu()
        assert all(torch.equal(kept[entry % ring_rows], hidden[entry]) for entry in range(13, 46))


def scored(reply: RecordedReply) -> list[TokenLogProb]:
    return [entry for chunk in reply.chunks for entry in chunk.log_probs]


def test_drafts_chunks_and_company_change_no_token_and_no_log_prob(models):
    stop = StopRules(max_tokens=4)
    requests = [
        GenerateRequest(tuple(IDS[:7]), SamplingParams(), stop),
        GenerateRequest(tuple(IDS[3:5]), SamplingParams(temperature=1.2, top_k=20, top_p=0.95, seed=7), stop),
        GenerateRequest(
            tuple(IDS[5:13]),
            SamplingParams(
                repetition_penalty=1.4, frequency_penalty=0.3, logit_bias=((9, 1.5),), bad_words=((3,),)
            ),
            replace(stop, min_tokens=2, stop_ids=frozenset((1,))),
            log_probs=3,
        ),
    ]
    together = generate(models.engine(), requests)
    expected = [reply.ids for reply in together]
    drafted = [replace(request, num_draft_tokens=2) for request in requests]
    scripted = models.scripted_draft(References(zip(requests, expected, strict=True)), seed=1)
    engine = models.engine(scripted, max_prompt_chunk=5)
    replies = generate(engine, drafted, Random(2))
    assert [reply.ids for reply in replies] == expected
    assert any(accepted for _, accepted in engine.verified), engine.verified
    assert scored(replies[2]) == scored(together[2]) and len(scored(together[2])) == 4
    alone = [generate(models.engine(), [request])[0] for request in drafted[1:]]  # by the depths themselves
    assert [reply.ids for reply in alone] == expected[1:] and scored(alone[1]) == scored(together[2])


# rows of padding hold what memory held before
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_the_sizes_of_graphs_change_no_bit_of_what_a_step_returns(models, monkeypatch):
    """Three sequences, then two, then one run in the size of four."""
    from tests.cuda.cuda_models import PaddedRuns, recorded

    sampling = SamplingParams(temperature=0.9, min_p=0.02, seed=3)
    requests = [
        GenerateRequest(
            tuple(IDS[:n]), sampling if n == 3 else SamplingParams(), StopRules(n + 2), num_draft_tokens=2
        )
        for n in (3, 1, 2)
    ]
    exact = recorded(models, requests)
    for runner in (models.target, models.draft):
        monkeypatch.setattr(runner, "_sequence_sizes", [4])
    with models.with_graphs(PaddedRuns):
        padded = recorded(models, requests)
    assert len(exact) == len(padded) >= 12
    assert all(torch.equal(a, b) for a, b in zip(exact, padded, strict=True))


def test_a_foreign_generation_and_a_gap_are_refused(models):
    steps = steps_of(models, 3)
    words = steps.control(TargetStep, [], [(3, 0, 1, 1)], [5])
    foreign, gap = words.copy(), words.copy()
    foreign[9] += 1  # magic, 8 words of key, generation, step, previous step
    gap[11] += 1
    for message, error in ((foreign, GenerationError), (gap, StepGapError)):
        with pytest.raises(error):
            models.target.step(message)


def test_prompts_run_while_no_slot_is_open_change_no_token(checkpoint, device, models):
    """What serving compiles before its first request leaves nothing behind but the null page."""
    from tests.cuda.cuda_models import CudaModels

    warm = CudaModels(checkpoint, device, **SETTINGS | {"max_tokens_per_step": 17})
    sizes: list[int] = []
    run_layers = warm.target._run_layers
    warm.target._run_layers = lambda batch, num_rows: (sizes.append(num_rows), run_layers(batch, num_rows))
    chains: list[int] = []
    run_chain, most = warm.draft._run_chain, warm.draft.passes.max_rows  # its rings lend 4 x 33 rows
    warm.draft.passes.max_rows = 17
    warm.draft._run_chain = lambda key, *rest: (chains.append(key.rows), run_chain(key, *rest))
    with torch.inference_mode():
        warm.target.warm_prompts()
        warm.draft.warm_prompts()
    warm.draft.passes.max_rows = most
    assert max(chains) == 17 and not warm.draft.ring.any()
    assert max(sizes) == 17 and len(sizes) == len(set(sizes)) > 1, sizes
    request = GenerateRequest(tuple(IDS[:6]), SamplingParams(), StopRules(3), num_draft_tokens=2)
    assert generate(warm.engine(), [request])[0].ids == generate(models.engine(), [request])[0].ids

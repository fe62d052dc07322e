"""The cases that broke the lossless claim of other engines, each by its name, on the real runners.

Named elsewhere, on scripted models that check every page, id and window:
    stale drafts near the context limit, and a prefix with another continuation: tests/engine/test_prefix_cache.py
    zero accepted used as an index, and tokens past a stop: tests/engine/test_stop_law.py
    seeds ignored under drafting, and a seeded request changed by its neighbours: tests/test_seeds.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from inkling.config import AttentionGeometry
from inkling.engine.loop import Engine
from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from inkling.engine.scheduler import EngineLimits, Scheduler
from inkling.engine.sequence import Sequence
from inkling.protocol import SlotOptions
from inkling.testing import tiny_config, write_random_checkpoint
from tests.engine.harness import Letters, RecordedReply
from tests.engine.scripted import References, ScriptedDraft
from tests.in_process import GENERATION, SESSION, CountingEngine, LocalModels, generate
from tests.model.stepping import DraftSteps, TargetSteps, new_draft, new_target, readable, same_bits
from tests.model.test_depths import ChosenDrafts

DEPTHS = 3
VOCAB = 61
CONTEXT = 3200
BLOCK = 64  # of prefix reuse
LONG = 3000  # tokens of the long answer
SLOTS = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> LocalModels:
    """Two layers and three depths, one of each kind of attention at least."""
    directory = tmp_path_factory.mktemp("checkpoint")
    config = tiny_config(
        hidden_size=32,
        num_layers=2,
        vocab_size=VOCAB,
        padded_vocab_size=64,
        full=AttentionGeometry(2, 1, 16, 24, None),
        local=AttentionGeometry(2, 1, 16, 11, 11),
        layer_is_local=(True, False),
        layer_is_dense=(True, False),
        mtp_depths=DEPTHS,
        mtp_is_local=(True, False, True),
    )
    write_random_checkpoint(directory, config, seed=21, dtype=torch.float32)
    return LocalModels(
        directory, max_context=CONTEXT, max_running_sequences=SLOTS, threads=1, prefix_block=BLOCK
    )


def prompt_of(random: Random, length: int) -> tuple[int, ...]:
    return tuple(random.randrange(VOCAB) for _ in range(length))


def scripted(models: LocalModels, answers: list, probability: float, seed: int = 0) -> ScriptedDraft:
    """Drafts of ``answers``, (request, tokens) pairs: each the true token with ``probability``, else a wrong one."""
    return ScriptedDraft(models.deployment.layout, References(answers), vocab_size=VOCAB, num_depths=DEPTHS,
                         probability=probability, seed=seed, generation=GENERATION)  # fmt: skip


class Watched:
    """An engine over the real depths, whose proposals ``choose(sequence, position, drawn)`` replaces; each step
    verifies a random number of them. Caches can be compared with those of a run from scratch."""

    def __init__(self, models: LocalModels, choose: Callable[[Sequence, int, int], int], **limits: int):
        deployment = models.deployment
        self.models, self.layout = models, deployment.layout
        self.target = new_target(models, self.layout)
        self.draft = new_draft(models, self.layout, ChosenDrafts, choose=choose)
        bounds = replace(EngineLimits.of(deployment.settings, deployment.max_context, DEPTHS), **limits)
        self.engine = CountingEngine(bounds, self.layout, self.target, self.draft, SESSION)
        self.engine.verified = Counter()
        scheduler, random = self.engine.scheduler, Random(3)
        self.draft.scheduler = scheduler
        scheduler.draft_length = lambda sequence: random.randint(
            0, Scheduler.draft_length(scheduler, sequence)
        )

    def submit(self, request: GenerateRequest) -> RecordedReply:
        reply = RecordedReply()
        self.engine.submit(request, reply)
        return reply

    def step(self) -> bool:
        self.draft.computed.clear()
        return self.engine.step()

    def caches(self, sequence: Sequence) -> list[Tensor]:
        """What the next window of every depth reads."""
        slots, window = self.draft.slots, sequence.window
        return readable(self.draft.cache, slots.tables, self.layout, sequence.slot, window.final, DEPTHS)

    def from_scratch(self, ids: list[int], end: int) -> list[Tensor]:
        """The same, of one target pass and one window over the committed ``ids``."""
        target = TargetSteps(new_target(self.models, self.layout), self.layout)
        draft = DraftSteps(new_draft(self.models, self.layout), self.layout)
        for steps in (target, draft):
            steps.open(SlotOptions(0, DEPTHS), end, end)
        draft.fill(0, target.prompt(0, ids[:end], [end]), ids, end, DEPTHS)
        return readable(draft.runner.cache, draft.runner.slots.tables, self.layout, 0, end, DEPTHS)

    def check_caches(self, sequence: Sequence) -> None:
        final = sequence.window.final
        assert same_bits(self.caches(sequence), self.from_scratch(sequence.ids, final)), (
            f"entries below {final}"
        )


class TrueOrWrong:
    """The token of ``answers`` (by prompt) with ``probability``, else another one."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], probability: float):
        self.answers, self.probability, self.random = answers, probability, Random(9)

    def __call__(self, sequence: Sequence, position: int, drawn: int) -> int:
        prompt = sequence.request.prompt_ids
        index = position - len(prompt)
        answer = self.answers[prompt]
        true = answer[index] if index < len(answer) else drawn
        return (
            true
            if self.random.random() < self.probability
            else (true + self.random.randrange(1, VOCAB)) % VOCAB
        )


def test_acceptance_decaying_under_load_the_depths_are_as_new_after_3000_tokens(models: LocalModels) -> None:
    """Beside the long answer short ones come and go. Whatever fell before, the caches hold no trace of it."""
    random = Random(1)
    long = GenerateRequest(prompt_of(random, 7), SamplingParams(1.0, seed=1), StopRules(LONG + 60), DEPTHS)
    short = [
        GenerateRequest(prompt_of(random, random.randint(2, 40)), SamplingParams(1.0, seed=2 + i),
                        StopRules(random.randint(3, 60)), random.randint(0, DEPTHS))
        for i in range(60)
    ]  # fmt: skip
    requests = [long, *short]
    undrafted = [replace(request, num_draft_tokens=0) for request in requests]
    plain = models.engine(prefix_block=0, max_tokens_per_step=64)
    answers = [reply.ids for reply in generate(plain, undrafted)]
    by_prompt = {request.prompt_ids: ids for request, ids in zip(requests, answers, strict=True)}

    watched = Watched(models, TrueOrWrong(by_prompt, 0.75), prefix_block=0)
    watched.submit(long)
    waiting, checked = list(short), 0
    replies = []
    while watched.step():
        if waiting and random.random() < 0.05:
            replies.append((waiting[0], watched.submit(waiting.pop(0))))
        sequence = next((s for s in watched.engine.scheduler.running if s.request is long), None)
        if sequence is not None and (sequence.num_emitted >= (1000, 2000, LONG, 1 << 30)[checked]):
            assert len(sequence.ids) - sequence.window.final <= 64, "the depths lag behind"
            watched.check_caches(sequence)
            assert [*long.prompt_ids, *answers[0]][: len(sequence.ids)] == sequence.ids
            checked += 1
    watched.engine.sender.send_ready()
    assert checked == 3 and not waiting
    assert all(reply.ids == by_prompt[request.prompt_ids] for request, reply in replies)
    verified = watched.engine.verified
    assert all(verified[n, a] > 20 for n in range(1, DEPTHS + 1) for a in range(n + 1)), verified


def test_zero_accepted_used_as_an_index_would_leave_a_wrong_state(models: LocalModels) -> None:
    """Nothing ever stands: each step keeps its first row and no other."""
    random = Random(2)
    requests = [
        GenerateRequest(prompt_of(random, n), SamplingParams(0.9, seed=n), StopRules(40), DEPTHS)
        for n in (1, 2, 9)
    ]
    answers = [r.ids for r in generate(models.engine(), [replace(r, num_draft_tokens=0) for r in requests])]
    by_prompt = {request.prompt_ids: ids for request, ids in zip(requests, answers, strict=True)}
    watched = Watched(models, TrueOrWrong(by_prompt, 0.0))
    replies, steps = [watched.submit(request) for request in requests], 0
    while watched.step():
        steps += 1
        for sequence in watched.engine.scheduler.running if steps % 5 == 0 else ():
            watched.check_caches(sequence)
    watched.engine.sender.send_ready()
    # 40 tokens; the last step leaves no work
    assert steps == 39 and [reply.ids for reply in replies] == answers
    assert {accepted for _, accepted in watched.engine.verified} == {0}
    assert all(reply.chunks[-1].total_accepted_draft_tokens == 0 for reply in replies)


def serve_and_compare(watched: Watched, request: GenerateRequest, expected: list[int]) -> int:
    """Serves ``request`` alone, with its depths' caches compared after every step; the length of its hit."""
    prefixes = watched.engine.scheduler.prefixes
    before, num_compared = prefixes.num_hit_positions, 0
    reply = watched.submit(request)
    while watched.step():
        for sequence in watched.engine.scheduler.running:
            if any(
                c.sequence is sequence for c in watched.draft.computed
            ):  # else its pages may not be there yet
                watched.check_caches(sequence)
                num_compared += 1
    watched.engine.sender.send_ready()
    watched.engine.scheduler.check_integrity()
    assert reply.ids == expected and num_compared
    return prefixes.num_hit_positions - before


def test_stale_drafts_near_the_context_limit_are_reused_by_nobody(models: LocalModels) -> None:
    """Answers that end at the limit draft less and less; a later prompt that goes on from them takes their blocks."""
    context, random = 2 * BLOCK + 8, Random(3)
    plain = models.engine(prefix_block=0, max_context=context)
    hits = []
    for length in (BLOCK + 40, 2 * BLOCK - 6, 2 * BLOCK - 1, 2 * BLOCK + 3):
        sampling = SamplingParams(1.0, seed=length)
        first = GenerateRequest(prompt_of(random, length), sampling, StopRules(200), DEPTHS)
        answer = generate(plain, [replace(first, num_draft_tokens=0)])[0]
        assert length + len(answer.ids) == context and answer.finish_reason == "length"
        follow_up = replace(
            first, prompt_ids=(*first.prompt_ids, *answer.ids)[: context - 4], stop=StopRules(9)
        )
        rest = generate(plain, [replace(follow_up, num_draft_tokens=0)])[0].ids
        watched = Watched(models, TrueOrWrong({first.prompt_ids: answer.ids, follow_up.prompt_ids: rest}, 0.6),
                          max_context=context)  # fmt: skip
        assert serve_and_compare(watched, first, answer.ids) == 0
        hits.append(serve_and_compare(watched, follow_up, rest))
    # the last block counts only where a window of all depths ended near its end
    assert set(hits) == {BLOCK, 2 * BLOCK}


def test_reuse_of_a_prefix_whose_pages_hold_another_continuation_changes_no_depth(
    models: LocalModels,
) -> None:
    """Entries before a block's end have used ids behind it; who goes on otherwise must not read them."""
    random = Random(4)
    trunk = prompt_of(random, BLOCK + 20)
    for common in range(BLOCK - 1, BLOCK + DEPTHS + 2):
        other = (*trunk[:common], (trunk[common] + 1) % VOCAB, *prompt_of(random, 6))
        requests = [
            GenerateRequest(p, SamplingParams(1.0, seed=4), StopRules(6), DEPTHS) for p in (trunk, other)
        ]
        undrafted = [replace(request, num_draft_tokens=0) for request in requests]
        answers = [generate(models.engine(prefix_block=0), [request])[0].ids for request in undrafted]
        by_prompt = {request.prompt_ids: ids for request, ids in zip(requests, answers, strict=True)}
        watched = Watched(models, TrueOrWrong(by_prompt, 0.6))
        hits = [serve_and_compare(watched, r, ids) for r, ids in zip(requests, answers, strict=True)]
        assert hits == [0, BLOCK if common >= BLOCK + DEPTHS else 0]


class ConstantLogits:
    """2.0, 1.7, 1.4 ... for the ids 0, 1, 2 ..., after any id."""

    def hidden(self, ids: Tensor, cache: object, batch: object) -> Tensor:
        return torch.zeros(len(ids), 1)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return (2.0 - 0.3 * torch.arange(VOCAB)).expand(len(rows), -1)


SHAPED_BY_HAND = {  # what greedy decoding says, worked out on paper
    "frequency": ({"frequency_penalty": 0.5}, [0, 1, 0, 2, 1, 3, 0, 2, 4, 1, 3]),
    "presence": ({"presence_penalty": 1.0}, [0, 1, 2, 3, 0, 0, 0, 0, 0]),
    "repetition": ({"repetition_penalty": 2.0}, [0, 1, 2, 3, 0, 0, 0, 0, 0]),
    "bad words": ({"bad_words": ((0, 0), (0, 1, 0))}, [0, 1, 1, 0, 1, 1, 0, 1, 1]),
}


@pytest.mark.parametrize("name", SHAPED_BY_HAND)
def test_penalty_applied_to_the_whole_window_would_change_every_row(models: LocalModels, name: str) -> None:
    """Each row counts the drafts before it: not none, and not those behind it."""
    setting, expected = SHAPED_BY_HAND[name]
    request = GenerateRequest((60, 59), SamplingParams(**setting), StopRules(len(expected)))
    target = new_target(models, models.deployment.layout)
    target.model = ConstantLogits()
    limits = EngineLimits(CONTEXT, SLOTS, 64, 100, DEPTHS)
    seen: Counter = Counter()
    for n in range(DEPTHS + 1):
        for probability in (1.0, 0.6, 0.0):
            draft = scripted(models, [(request, expected)], probability, seed=n)
            engine = CountingEngine(limits, models.deployment.layout, target, draft, SESSION)
            engine.verified = Counter()
            assert generate(engine, [replace(request, num_draft_tokens=n)])[0].ids == expected, (
                n,
                probability,
            )
            seen += engine.verified
    assert all(seen[n, a] for n in range(1, DEPTHS + 1) for a in (0, n)), seen


def count_cut(engine: Engine) -> list[int]:
    """Per step and sequence, accepted tokens beyond the cut: filled as ``engine`` runs."""
    beyond: list[int] = []
    commit = engine._commit

    def counting(plan: list) -> None:
        commit(plan)
        beyond.extend(len(s.tokens) - len(s.emitted) for s in plan if len(s.tokens) > len(s.emitted))

    engine._commit = counting
    return beyond


def log_probs_of(reply: RecordedReply) -> list:
    return [scored for chunk in reply.chunks for scored in chunk.log_probs]


@pytest.mark.parametrize("by", ["stop id", "stop word", "max_tokens"])
def test_tokens_and_log_probs_past_a_stop_never_leave_the_engine(models: LocalModels, by: str) -> None:
    random, num_beyond = Random(6), 0
    for seed in range(20):
        whole = GenerateRequest(
            prompt_of(random, 5), SamplingParams(1.0, seed=seed), StopRules(30), log_probs=3
        )
        said = generate(models.engine(), [whole])[0]
        fresh = [i for i in range(2, 26) if said.ids[i] not in said.ids[:i]]
        cut = random.choice(fresh)  # the last token of the answer
        rules = {"stop id": StopRules(30, stop_ids=frozenset({said.ids[cut]})), "stop word": StopRules(30),
                 "max_tokens": StopRules(cut + 1)}[by]  # fmt: skip
        for n in range(DEPTHS + 1):
            engine = models.engine(scripted(models, [(whole, said.ids)], 1.0))  # they go on behind the cut
            beyond, reply = count_cut(engine), RecordedReply()
            letters = Letters(stop_after=cut + 1) if by == "stop word" else None
            engine.submit(
                replace(whole, stop=rules, num_draft_tokens=n), reply, letters, stream=bool(seed % 2)
            )
            while engine.step():
                engine.sender.send_ready()
            engine.sender.send_ready()
            num_beyond += sum(beyond)
            assert reply.ids == said.ids[: cut + 1]
            assert log_probs_of(reply) == log_probs_of(said)[: cut + 1]
            last = reply.chunks[-1]
            assert last.cum_log_prob == sum(scored.log_prob for scored in log_probs_of(reply))
            assert last.finish_reason == ("length" if by == "max_tokens" else "stop")
            assert last.total_accepted_draft_tokens < len(reply.ids)
    assert (num_beyond > 20) == (by != "max_tokens"), num_beyond  # no step drafts beyond max_tokens

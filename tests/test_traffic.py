"""The promise under load: random requests in short memory, each with the answer it gets alone, undrafted, uncached.

Answers and log probs are compared bit for bit; of a request that its client gave up, what it got is compared with
the beginning. The references run in batches without drafts and prefix cache, one in twenty of them alone.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, replace
from random import Random
from types import MethodType

import pytest
import torch

from inkling.engine.log_probs import TokenLogProb
from inkling.engine.request import GenerateRequest, StopRules
from inkling.engine.sequence import Phase, Sequence
from inkling.errors import CancelledError
from inkling.testing import tiny_config, write_random_checkpoint
from inkling.text import TextAssembler
from tests.engine.harness import RecordedReply
from tests.engine.scripted import References, ScriptedDraft
from tests.in_process import GENERATION, CountingEngine, LocalModels
from tests.traffic import BLOCK, CANCEL_POINTS, DEMO, MAX_CONTEXT, SLOTS, Case, Session, Source, random_cases

SEED = 20261130
CUT = {"demo": 350, "random": 510}  # requests; together at most 3 minutes
WHOLE = {"demo": 5000, "random": 5000}
ALONE = 20  # one request in so many is referenced alone
MIN_PREEMPTED, MIN_HITS = 0.05, 0.2  # of the requests
MAX_STEPS = 20_000  # of one session


@pytest.fixture(scope="module", params=CUT)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, LocalModels]:
    directory = DEMO
    if (
        request.param == "random"
    ):  # few ids: penalties and bad words are met all the time; windows below N + page
        config = tiny_config(
            vocab_size=61,
            padded_vocab_size=64,
            mtp_depths=6,
            mtp_is_local=(True, False, True, True, False, True),
        )
        directory = tmp_path_factory.mktemp(request.param)
        write_random_checkpoint(directory, config, seed=13, dtype=torch.float32)
    models = LocalModels(
        directory,
        max_context=MAX_CONTEXT,
        max_running_sequences=SLOTS,
        threads=1,
        prefix_block=BLOCK,
        prefix_cache="on",
    )
    return request.param, models


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    finish_reason: str
    text: str
    log_probs: list[tuple]
    prompt_log_probs: list[tuple]
    cum_log_prob: bytes

    @classmethod
    def of(cls, reply: RecordedReply) -> Answer:
        prompts = [c.prompt_log_probs for c in reply.chunks if c.prompt_log_probs is not None]
        assert len(prompts) <= 1
        return cls(
            reply.ids,
            reply.finish_reason,
            reply.text,
            [bits(scored) for chunk in reply.chunks for scored in chunk.log_probs],
            [bits(scored) for scored in prompts[0]] if prompts else [],
            struct.pack("d", reply.chunks[-1].cum_log_prob),
        )


def bits(scored: TokenLogProb) -> tuple:
    values = [scored.log_prob, *(value for _, value in scored.top)]
    return (
        scored.token,
        scored.rank,
        [token for token, _ in scored.top],
        struct.pack(f"{len(values)}d", *values),
    )


def differing(expected: list, given: list, is_whole: bool) -> int:
    """Places at which they differ; one that was cut short must begin as ``expected`` does."""
    missing = len(expected) - len(given)
    return sum(a != b for a, b in zip(expected, given, strict=False)) + max(missing * is_whole, -missing)


class Client:
    """One case on its way through an engine."""

    def __init__(self, case: Case):
        self.case = case
        self.reply = RecordedReply()
        self.sequence: Sequence | None = None
        self.was_preempted = self.has_hit = self.has_cancelled = False

    def submit(self, engine: CountingEngine, source: Source) -> None:
        request = self.case.request
        assembler = None
        if source.tokenizer is not None:
            stop = request.stop
            assembler = TextAssembler(
                source.tokenizer, stop.stop_words, source.eos | stop.stop_ids, min_tokens=stop.min_tokens
            )
        self.sequence = engine.submit(request, self.reply, assembler, stream=self.case.stream)

    def is_at(self, point: str) -> bool:
        sequence = self.sequence
        running, prompt = sequence.phase is Phase.RUNNING, sequence.num_uncomputed > 1
        return {
            "waiting": sequence.phase is Phase.WAITING,
            "preempted": sequence.phase is Phase.WAITING and self.was_preempted,
            "prompt": running and prompt and sequence.num_computed > 0,
            "decoding": running and not prompt,
            "drafted": running and bool(sequence.drafts),
            "drafting": running and not prompt and sequence.window is not None,
        }[point]

    def may_leave(self, engine: CountingEngine, is_drafting: bool) -> None:
        case = self.case
        if not case.cancel_at or self.has_cancelled or (case.cancel_at == "drafting") != is_drafting:
            return
        if self.is_at(case.cancel_at) and (case.cancel_at in ("waiting", "prompt") or self._has_emitted()):
            self.has_cancelled = True
            if case.is_polled:
                self.reply.cancelled = True
            else:
                engine.cancel(self.sequence)

    def _has_emitted(self) -> bool:
        return self.sequence.num_emitted >= self.case.cancel_after


class Observer:
    """Notes which requests were preempted and which found their prefix, and lets clients go between the calls."""

    def __init__(self, engine: CountingEngine, clients: list[Client]):
        self.clients = clients
        prefixes, scheduler = engine.scheduler.prefixes, engine.scheduler
        self._started, self._requeue, self._run_draft = prefixes.started, scheduler.requeue, engine._run_draft
        prefixes.started = self.started
        scheduler.requeue = self.requeue
        engine._run_draft = MethodType(self.run_draft, engine)

    def client(self, sequence: Sequence) -> Client:
        return next(client for client in self.clients if client.sequence is sequence)

    def started(self, sequence: Sequence) -> None:
        client = self.client(sequence)
        client.has_hit |= sequence.num_computed > 0 and not client.was_preempted
        self._started(sequence)

    def requeue(self, preempted: list[Sequence]) -> None:
        for sequence in preempted:
            self.client(sequence).was_preempted = True
        self._requeue(preempted)

    def run_draft(self, engine: CountingEngine, plan: list, hidden: object) -> None:
        for client in self.clients:
            if client.sequence is not None and not client.reply.finished:
                client.may_leave(engine, is_drafting=True)
        self._run_draft(plan, hidden)


def serve(
    engine: CountingEngine, source: Source, cases: list[Case], arrivals: float, random: Random
) -> list[Client]:
    """Random arrivals, ``arrivals`` a step in the mean; pages are checked after every step."""
    clients = [Client(case) for case in cases]
    waiting = clients[::-1]
    Observer(engine, clients)
    for _ in range(MAX_STEPS):
        while waiting and random.random() < arrivals / (1 + arrivals):
            waiting.pop().submit(engine, source)
        for client in clients:
            if client.sequence is not None and not client.reply.finished:
                client.may_leave(engine, is_drafting=False)
        engine.sender.poll_all()
        more = engine.step()
        engine.scheduler.check_integrity()
        engine.sender.send_ready()
        if not (more or waiting):
            break
    check_all_is_free(engine)
    return clients


def check_all_is_free(engine: CountingEngine) -> None:
    scheduler = engine.scheduler
    assert not scheduler.has_work and not engine._open and engine.sender.num_open == 0
    scheduler.prefixes.clear()
    scheduler.check_integrity()
    for pools in scheduler.allocator.pools.values():
        for pool in pools:
            assert sorted(pool.free) == list(range(1, pool.num_usable + 1)), pool.name
    assert len(scheduler._free_slots) == engine.limits.max_running_sequences


def undrafted(
    models: LocalModels, source: Source, requests: list[GenerateRequest], slots: int = SLOTS
) -> list[Answer]:
    """Answers without drafts, prefix cache and chunks, all of them begun at once."""
    engine = models.engine(prefix_block=0, max_running_sequences=slots, max_queued_requests=1000)
    clients = [Client(Case(replace(r, num_draft_tokens=0, priority=0), stream=False)) for r in requests]
    for client in clients:
        client.submit(engine, source)
    while engine.step():
        pass
    engine.sender.send_ready()
    for client in clients:
        assert client.reply.error is None, client.reply.error
    return [Answer.of(client.reply) for client in clients]


def references(models: LocalModels, source: Source, cases: list[Case], first: int) -> list[Answer]:
    """``first``: number of the first case in the whole run."""
    alone = [i for i in range(len(cases)) if (first + i) % ALONE == 0]
    batched = [i for i in range(len(cases)) if (first + i) % ALONE]
    answers = dict(zip(batched, undrafted(models, source, [cases[i].request for i in batched]), strict=True))
    for i in alone:
        answers[i] = undrafted(models, source, [cases[i].request], slots=1)[0]
    return [answers[i] for i in range(len(cases))]


def continuations(
    models: LocalModels, source: Source, cases: list[Case], expected: list[Answer]
) -> References:
    """What a perfect draft would propose. It knows of no stops: it goes on beyond them."""
    answers = [answer.ids for answer in expected]
    stopped = [
        i
        for i, (case, answer) in enumerate(zip(cases, expected, strict=True))
        if answer.finish_reason == "stop" and not case.request.stop.min_tokens
    ]
    endless = [replace(cases[i].request, stop=StopRules(cases[i].request.stop.max_tokens)) for i in stopped]
    for i, answer in zip(stopped, undrafted(models, source, endless), strict=True):
        assert answer.ids[: len(answers[i])] == answers[i]
        answers[i] = answer.ids
    return References((case.request, ids) for case, ids in zip(cases, answers, strict=True))


class Tally(Counter):
    """Counts over sessions, and the first differences in words."""

    def __init__(self) -> None:
        super().__init__()
        self.differences: list[str] = []
        self.verified: Counter[int] = Counter()  # accepted drafts of a verification -> times

    def add(self, session: Session, number: int, client: Client, expected: Answer) -> None:
        case, reply = client.case, client.reply
        is_cut = isinstance(reply.error, CancelledError)
        if reply.error is not None and not is_cut:
            raise AssertionError(f"session {number}: {reply.error!r} ({case}; {session})")
        assert client.has_cancelled or not is_cut, f"session {number}: ended by nobody ({case})"
        given, kept = Answer.of(reply), client.sequence.ids[client.sequence.num_prompt_tokens :]
        tokens = max(differing(expected.ids, ids, not is_cut) for ids in (given.ids, kept))
        scores = differing(expected.log_probs, given.log_probs, not is_cut)
        if not is_cut or given.ids:
            scores += differing(expected.prompt_log_probs, given.prompt_log_probs, True)
        if is_cut:
            others = int(not expected.text.startswith(given.text))
        else:
            ends = (expected.finish_reason, expected.text) != (given.finish_reason, given.text)
            others, scores = int(ends), scores + (expected.cum_log_prob != given.cum_log_prob)
        if tokens or scores or others:
            what = f"{tokens} tokens, {scores} log probs, {others} reasons or texts"
            self.differences.append(f"session {number}: {what} of {case}: {given} for {expected}; {session}")
        self.update(
            requests=1, preempted=client.was_preempted, hits=client.has_hit, cancelled=is_cut,
            tokens=len(kept), log_probs=len(given.log_probs) + len(given.prompt_log_probs),
            differing_tokens=tokens, differing_log_probs=scores, differing_others=others,
            scripted=session.scripted, drafted=client.sequence.total_draft_tokens > 0,
            stopped=given.finish_reason == "stop",
        )  # fmt: skip
        if is_cut:
            self[f"cancelled while {case.cancel_at}"] += 1

    def share(self, name: str) -> float:
        return self[name] / self["requests"]

    def __str__(self) -> str:
        shares = [f"{name} {self.share(name):.1%}" for name in ("preempted", "hits", "cancelled", "scripted")]
        counts = [f"{name} {count}" for name, count in sorted(self.items())]
        accepted = ", ".join(f"{n}: {count}" for n, count in sorted(self.verified.items()))
        return f"{'; '.join(shares)}\n{', '.join(counts)}\naccepted drafts of a verification: {accepted}"


def run_session(
    models: LocalModels, source: Source, session: Session, number: int, tally: Tally, count: int
) -> None:
    random = Random(session.seed)
    cases = random_cases(random, source, count, session.growing)
    expected = references(models, source, cases, first=tally["requests"])
    draft = None
    if session.scripted:
        draft = ScriptedDraft(
            models.deployment.layout,
            continuations(models, source, cases, expected),
            vocab_size=source.vocab_size,
            num_depths=models.num_depths,
            probability=session.acceptance,
            seed=session.seed,
            generation=GENERATION,
        )
    engine = session.engine(models, draft)
    if session.scripted:
        draft.true_ids = lambda slot: next(s.ids for s in engine.scheduler.running if s.slot == slot)
    clients = serve(engine, source, cases, session.arrivals, random)
    for client, answer in zip(clients, expected, strict=True):
        tally.add(session, number, client, answer)
    first = tally["requests"] - count
    tally.update(
        sessions=1,
        alone=sum(i % ALONE == 0 for i in range(first, tally["requests"])),
        preemptions=engine.scheduler.num_preemptions,
        hits_with_resumptions=engine.scheduler.prefixes.num_hits,
    )
    for (_, accepted), times in engine.verified.items():
        tally.verified[accepted] += times


def check_traffic(name: str, models: LocalModels, num_requests: int) -> None:
    source, tally = Source(models), Tally()
    while tally["requests"] < num_requests:
        number = tally["sessions"]
        session = Session.random(number, SEED)
        count = min(session.num_cases, num_requests - tally["requests"])
        run_session(models, source, session, number, tally, count)
        print(
            f"{name}: {tally['requests']} of {num_requests}, {len(tally.differences)} differ",
            flush=True,
        )
    summary = f"{name}: {tally}"
    print(summary, flush=True)  # seen with -s
    assert not tally.differences, "\n".join([summary, *tally.differences[:5]])
    assert tally["differing_tokens"] == tally["differing_log_probs"] == 0, summary
    assert tally.share("preempted") >= MIN_PREEMPTED and tally.share("hits") >= MIN_HITS, summary
    assert abs(tally.share("scripted") - 0.5) <= 0.1 and tally["alone"] >= num_requests // ALONE, summary
    assert all(tally[f"cancelled while {point}"] for point in CANCEL_POINTS), summary
    assert all(tally.verified[accepted] for accepted in range(models.num_depths + 1)), summary
    assert all(tally[count] for count in ("stopped", "log_probs", "drafted")), summary


def test_random_traffic_gets_the_answers_of_requests_alone(served: tuple[str, LocalModels]) -> None:
    name, models = served
    check_traffic(name, models, CUT[name])


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_ten_thousand_random_requests_get_the_answers_of_requests_alone(
    served: tuple[str, LocalModels],
) -> None:
    name, models = served
    check_traffic(name, models, WHOLE[name])

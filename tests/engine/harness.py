"""An engine over scripted models, driven step by step, and replies that record what they are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from inkling.engine.channel import Session
from inkling.engine.loop import Engine
from inkling.engine.outbox import Chunk
from inkling.engine.pages import CacheLayout, Model, PoolLayout, span_pages, worst_case_pages
from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from inkling.engine.scheduler import EngineLimits
from inkling.protocol import KEY_WORDS, Kind
from tests.engine.scripted import ScriptedDraft, ScriptedTarget, TrueContinuation, TrueModel

KEY = np.arange(KEY_WORDS, dtype=np.int32)
MODEL = TrueModel()


class RecordedReply:
    """What one client got. ``fail_sends``: the sends, counted from 0, that raise."""

    def __init__(self, fail_sends: Sequence[int] = ()):
        self.chunks: list[Chunk] = []
        self.cancelled = False
        self.fail_sends = set(fail_sends)
        self.sends = 0

    def send(self, chunk: Chunk) -> None:
        self.sends += 1
        if self.sends - 1 in self.fail_sends:
            raise RuntimeError("send failed")
        assert not self.finished, "a response after FINAL"
        self.chunks.append(chunk)

    def is_cancelled(self) -> bool:
        return self.cancelled

    @property
    def finished(self) -> bool:
        return bool(self.chunks) and self.chunks[-1].final

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.ids]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def finish_reason(self) -> str:
        return self.chunks[-1].finish_reason

    @property
    def error(self) -> Exception | None:
        return self.chunks[-1].error if self.chunks else None


class FailingClient:
    """Passes steps on; before or after the calls (counted from 0) named in ``failures`` it raises."""

    def __init__(self, client: object, failures: dict[int, tuple[str, Exception]]):
        self.client, self.failures = client, failures
        self.calls = 0

    def step(self, *args: object) -> object:
        when, error = self.failures.get(self.calls, ("never", None))
        self.calls += 1
        if when == "before":
            raise error
        result = self.client.step(*args)
        if when == "after":
            raise error
        if when == "short":
            return (result[0][:-1], result[1]) if isinstance(result, tuple) else result[:-1]
        return result


def make_layout(
    limits: EngineLimits,
    *,
    window: int = 5,
    page_sizes: tuple[int, int, int] = (4, 4, 2),
    sequences: float | None = None,
    full_pages: int | None = None,
    boundaries: int = 0,
    kinds: tuple[Kind, ...] = tuple(Kind),
) -> CacheLayout:
    """Pools for the worst case of ``sequences`` sequences (all slots when None); ``full_pages``: usable pages of
    the full kind in place of that; ``boundaries``: of cached prefixes, whose windowed rows find room beside."""
    empty = tuple(PoolLayout(size, int(kind in kinds)) for kind, size in zip(Kind, page_sizes, strict=True))
    layout = CacheLayout(window, limits.num_draft_tokens, empty, empty)
    count = limits.max_running_sequences if sequences is None else sequences

    def pools(model: Model) -> tuple[PoolLayout, ...]:
        worst = worst_case_pages(
            layout,
            model,
            limits.max_context,
            min(limits.max_tokens_per_step, limits.max_prompt_chunk),
            limits.num_draft_tokens,
        )
        most = [max(pages, int(pages * count)) for pages in worst]
        most[Kind.FULL] = full_pages or most[Kind.FULL]
        for kind in (Kind.LOCAL, Kind.CONV):
            most[kind] += boundaries * span_pages(layout.reach(kind), page_sizes[kind])
        return tuple(
            PoolLayout(pool.page_size, 1 + pages if pool.num_pages else 0)
            for pool, pages in zip(layout.pools(model), most, strict=True)
        )

    return CacheLayout(window, limits.num_draft_tokens, pools(Model.TARGET), pools(Model.DRAFT))


class Bench:
    """An engine with scripted models, stepped by hand."""

    def __init__(
        self,
        *,
        num_drafts: int = 3,
        budget: int = 64,
        slots: int = 4,
        context: int = 128,
        queue: int = 1000,
        chunk: int = 1 << 30,
        block: int = 0,
        probability: float = 0.7,
        seed: int = 0,
        layout: Callable[[EngineLimits], CacheLayout] = make_layout,
        target_failures: dict[int, tuple[str, Exception]] | None = None,
        draft_failures: dict[int, tuple[str, Exception]] | None = None,
        model: TrueModel = MODEL,
        auto_draft_length: bool = False,
    ):
        self.model = model
        self.limits = EngineLimits(context, slots, budget, queue, num_drafts, chunk, auto_draft_length, block)
        self.layout = layout(self.limits)
        self.target = ScriptedTarget(self.layout, model, max_rows=budget)
        self.draft = ScriptedDraft(
            self.layout,
            TrueContinuation(model),
            vocab_size=model.vocab_size,
            num_depths=max(1, num_drafts),
            probability=probability,
            seed=seed,
        )
        self.target_client = FailingClient(self.target, target_failures or {})
        self.draft_client = FailingClient(self.draft, draft_failures or {})
        self.engine = Engine(self.limits, self.layout, self.target_client, self.draft_client, Session(KEY, 1))
        self.draft.true_ids = lambda slot: next(
            s.ids for s in self.engine.scheduler.running if s.slot == slot
        )
        self.sent: list[tuple[GenerateRequest, RecordedReply]] = []

    def submit(
        self, request: GenerateRequest, *, stream: bool = True, assembler: object = None
    ) -> RecordedReply:
        reply = RecordedReply()
        self.engine.submit(request, reply, assembler, stream=stream)
        self.sent.append((request, reply))
        return reply

    def step(self) -> bool:
        more = self.engine.step()
        self.engine.scheduler.check_integrity()
        self.engine.sender.poll_all()
        self.engine.sender.send_ready()
        return more

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError(f"work remains after {max_steps} steps")

    def check_answers(self) -> None:
        """Every request has the answer of the target alone, and everything was given back."""
        for request, reply in self.sent:
            assert reply.error is None, reply.error
            expected = self.model.answer(request, self.limits.max_context)
            assert (reply.ids, reply.finish_reason) == expected, request
        self.check_idle()

    def check_idle(self) -> None:
        scheduler = self.engine.scheduler
        assert all(reply.finished for _, reply in self.sent)
        assert not scheduler.has_work and not self.engine._open and self.engine.sender.num_open == 0
        scheduler.check_integrity()
        assert self.pages_free()

    def pages_free(self) -> bool:
        """Nobody holds a page; the prefix cache may keep some."""
        pools = [pool for pools in self.engine.scheduler.allocator.pools.values() for pool in pools]
        return all(pool.num_available == pool.num_usable for pool in pools)


def random_request(
    random: Random, num_drafts: int, *, max_prompt: int = 40, max_tokens: int = 24, vocab_size: int = 23
) -> GenerateRequest:
    length = random.choice((random.randint(1, num_drafts + 2), random.randint(1, max_prompt)))
    tokens = random.randint(1, max_tokens)
    stop_ids = frozenset(random.sample(range(vocab_size), random.choice((0, 0, 1, 2))))
    return GenerateRequest(
        tuple(random.randrange(vocab_size) for _ in range(length)),
        SamplingParams(seed=random.getrandbits(64)),
        StopRules(tokens, random.choice((0, 0, random.randint(0, tokens))), stop_ids),
        num_draft_tokens=random.choice((num_drafts, random.randint(0, num_drafts))),
        priority=random.choice((0, 0, random.randint(-2, 2))),
    )


def requests_of(seed: int, count: int, num_drafts: int) -> list[GenerateRequest]:
    random = Random(seed)
    return [random_request(random, num_drafts) for _ in range(count)]


def request_of(num_prompt: int, max_tokens: int, num_drafts: int = 3, seed: int = 5) -> GenerateRequest:
    prompt = tuple((7 * i + seed) % 23 for i in range(num_prompt))
    return GenerateRequest(
        prompt, SamplingParams(seed=seed), StopRules(max_tokens), num_draft_tokens=num_drafts
    )


def random_bench(random: Random, num_drafts: int, **options) -> Bench:
    window = random.randint(2, 9)
    sizes = (random.choice((1, 4, 16)), random.choice((1, 4, 5)), random.choice((1, 2, 3, 8)))
    sequences = random.choice((None, 1.3, 1, 2.5))
    bench = Bench(
        num_drafts=num_drafts,
        budget=random.choice((1, 2, 7, 64, 1000)),
        slots=random.choice((1, 4, 16)),
        chunk=random.choice((1, 4, 1 << 30)),
        probability=random.choice((0, 0.5, 0.7, 1)),
        seed=random.getrandbits(32),
        layout=lambda limits: make_layout(limits, window=window, page_sizes=sizes, sequences=sequences),
        **options,
    )
    if random.random() < 0.5:
        choice = Random(random.getrandbits(32))
        bench.engine.scheduler.draft_length = lambda sequence: choice.randint(0, sequence.max_drafts)
    return bench


def arrive(bench: Bench, random: Random, requests: list[GenerateRequest]) -> None:
    """Submits in random order, steps in between."""
    for request in random.sample(requests, len(requests)):
        bench.submit(request, stream=random.random() < 0.5)
        while random.random() < 0.5:
            bench.step()


class Letters:
    """Token n is the letter n; the word "stop" is completed when ``stop_after`` tokens have come."""

    def __init__(self, stop_after: int = 1 << 30, fail_after: int = 1 << 30):
        self.stop_after, self.fail_after = stop_after, fail_after
        self.count, self.text = 0, ""

    def append(self, token_id: int) -> bool:
        self.count += 1
        if self.count >= self.fail_after:
            raise ValueError("no such letter")
        self.text += chr(97 + token_id)
        return self.count >= self.stop_after

    def take(self) -> str:
        text, self.text = self.text, ""
        return text

    def finish(self) -> str:
        return self.take() + "."

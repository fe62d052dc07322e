"""Random traffic: requests of every setting, and the load and the limits under which they are served.

Everything follows from one seed, so that a session that fails runs again alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from inkling.engine.draft_length import AutoDraftLength
from inkling.engine.pages import CacheLayout, Model, PoolLayout, worst_case_pages
from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from inkling.protocol import Kind
from inkling.text import load_tokenizer
from tests.in_process import CountingEngine, LocalModels

DEMO = Path(__file__).parents[1] / "demo" / "checkpoint"
BLOCK = 64  # positions of a prefix block, and of a page of the attention kinds
MAX_PROMPT, MAX_TOKENS = 200, 32
MAX_CONTEXT = 224  # less than both together: the context ends some answers
GROWTH = range(9, 22)  # positions left in a page, fewer than such an answer has
TRUNK_SHARE = 0.55  # of the prompts
SLOTS = 32  # of the models, and sequences of a reference batch
WORDS = ("\n", " ", "(", "self", " return", "):\n", "e", "=", ", ", "def ", "0", "import os\n\nclass")

# When a client goes away. ``drafting``: between the two calls of a step; the others: between steps.
CANCEL_POINTS = ("waiting", "preempted", "prompt", "decoding", "drafted", "drafting")


@dataclass(frozen=True)
class Case:
    """One client: its request, and how it behaves."""

    request: GenerateRequest
    stream: bool = True
    cancel_at: str = ""  # one of CANCEL_POINTS; empty: stays to the end
    cancel_after: int = 0  # tokens emitted before that at least
    is_polled: bool = False  # the cancel comes from the client's connection, not from a call


class Source:
    """Where ids come from: program text for the demo, which its depths can guess; else random ids."""

    def __init__(self, models: LocalModels):
        settings, config = models.deployment.settings, models.deployment.config
        self.vocab_size, self.eos = config.vocab_size, frozenset(config.eos_token_ids)
        self.num_depths = models.num_depths
        self.tokenizer = load_tokenizer(settings.checkpoint)
        random = Random(1)
        self.ids: list[int] = [random.randrange(self.vocab_size) for _ in range(2000)]
        if self.tokenizer is not None:
            texts = [prompt["text"] for prompt in json.loads((DEMO.parent / "prompts.json").read_text())]
            self.ids = [token for text in texts for token in self.tokenizer.encode(text).ids]

    def excerpt(self, random: Random, length: int) -> list[int]:
        if random.random() < 0.2:
            return [random.randrange(self.vocab_size) for _ in range(length)]
        start = random.randrange(len(self.ids) - length)
        return self.ids[start : start + length]


def random_cases(random: Random, source: Source, count: int, growing: float = 0.1) -> list[Case]:
    """``growing``: share of the prompts that leave so little of a page that the answer needs another one."""
    trunks = [source.excerpt(random, MAX_PROMPT) for _ in range(random.randint(1, 2))]
    requests: list[GenerateRequest] = []
    for _ in range(count):
        if requests and random.random() < 0.03:  # the same once more, beside the first or after it
            request = random.choice(requests)
        else:
            prompt = _prompt(random, source, trunks, growing)
            request = GenerateRequest(
                prompt, _sampling(random, source), _stop_rules(random, source, len(prompt))
            )
            if random.random() < 0.3:
                request = replace(request, log_probs=random.randint(1, 6))
            if random.random() < 0.05:
                request = replace(request, prompt_log_probs=random.randint(1, 4))
        most = source.num_depths
        requests.append(
            replace(
                request,
                num_draft_tokens=random.choice((most, most, random.randint(0, most))),
                priority=random.choice((0, 0, 0, random.randint(-2, 2))),
            )
        )
    return [_case(random, request) for request in requests]


def _case(random: Random, request: GenerateRequest) -> Case:
    leaves = random.random() < 0.3  # if the point comes
    return Case(
        request,
        stream=random.random() < 0.7,
        cancel_at=random.choice((*CANCEL_POINTS, "preempted", "preempted")) if leaves else "",
        cancel_after=random.choice((0, 1, random.randint(0, 12))),
        is_polled=random.random() < 0.5,
    )


def _prompt(random: Random, source: Source, trunks: list[list[int]], growing: float) -> tuple[int, ...]:
    """Short ones, and those that share a trunk up to, around and away from its block ends."""
    grows, gap = random.random() < growing, random.choice(GROWTH)
    if random.random() < TRUNK_SHARE:
        trunk = random.choice(trunks)
        kept = BLOCK * random.choice((1, 1, 1, 1, 2, 3)) + random.choice((*range(-1, 8), 30))
        tail = random.choice((0, random.randint(1, 20)))
        if grows:
            kept, tail = kept // BLOCK * BLOCK + BLOCK - gap, random.choice((0, 1))
        return tuple((trunk[:kept] + source.excerpt(random, tail))[:MAX_PROMPT])
    if grows:
        return tuple(source.excerpt(random, BLOCK * random.choice((1, 1, 1, 1, 2)) - gap))
    length = random.choice((random.randint(1, source.num_depths + 2), random.randint(1, 24)))
    if random.random() < 0.05:
        length = random.randint(1, MAX_PROMPT)
    return tuple(source.excerpt(random, length))


def _sampling(random: Random, source: Source) -> SamplingParams:
    def some(value: object, neutral: object, probability: float = 0.2) -> object:
        return value if random.random() < probability else neutral

    seed = random.choice((random.getrandbits(64), random.getrandbits(64), random.choice((0, 1, 2**64 - 1))))
    words = tuple({tuple(source.excerpt(random, random.randint(1, 3))) for _ in range(random.randint(1, 4))})
    biased = {random.choice(source.ids): random.choice((-100.0, -3.0, 1.5, 4.0)) for _ in range(3)}
    return SamplingParams(
        temperature=some(random.choice((0.005, 0.5, 0.8, 1.0, 1.3)), 0.0, 0.65),
        top_k=some(random.choice((1, 5, 20, 40)), 0),
        top_p=some(random.choice((0.3, 0.9, 0.95)), 1.0),
        min_p=some(random.choice((0.01, 0.05, 0.2)), 0.0),
        seed=seed,
        repetition_penalty=some(random.choice((0.8, 1.1, 1.3, 1.8)), 1.0),
        presence_penalty=some(random.choice((-0.7, 0.5, 1.5)), 0.0),
        frequency_penalty=some(random.choice((-1.0, 0.4, 1.2)), 0.0),
        logit_bias=some(tuple(biased.items()), ()),
        bad_words=some(words, ()),
    )


def _stop_rules(random: Random, source: Source, num_prompt: int) -> StopRules:
    tokens = min(random.randint(1, MAX_TOKENS), random.randint(4, MAX_TOKENS))
    grows = -num_prompt % BLOCK in GROWTH
    if grows:
        tokens = random.randint(GROWTH.stop, MAX_TOKENS)
    stop_ids = source.eos if random.random() < (0.3 if grows else 0.8) else frozenset()
    if random.random() < (0.1 if grows else 0.25):
        stop_ids |= {random.choice(source.ids) for _ in range(random.randint(1, 4))}
    words = ()
    if source.tokenizer is not None and random.random() < 0.2:
        words = tuple(random.sample(WORDS, random.randint(1, 3)))
    minimum = random.randint(1, tokens) if random.random() < 0.2 else 0
    return StopRules(tokens, minimum, stop_ids, words)


@dataclass(frozen=True)
class Session:
    """What serves one group of cases."""

    seed: int
    num_cases: int
    scripted: bool  # drafts: true with probability ``acceptance``, else wrong; not scripted: the depths' own
    acceptance: float
    growing: float  # see ``random_cases``
    slots: int
    max_prompt_chunk: int
    max_tokens_per_step: int
    pools: str  # tight | moderate | whole
    lengths: str  # of drafts: fixed | random by the step | auto, with a made-up clock
    arrivals: float  # requests a step

    @classmethod
    def random(cls, number: int, seed: int) -> Session:
        random = Random(f"{seed} {number}")
        is_narrow = number % 8 in (4, 5)  # few rows a step: many steps, so few cases
        rows = random.choice((5, 16)) if is_narrow else random.choice((40, 100, 200, 512))
        pools = ("tight", "moderate", "moderate", "tight", "tight", "tight", "whole", "tight")[number % 8]
        return cls(
            seed=random.getrandbits(32),
            num_cases=15 if is_narrow else 80,
            scripted=number % 2 == 0,
            acceptance=random.choice((0.5, 0.8, 0.95)),
            slots=random.choice((3, 8) if is_narrow else (12, 16, 16, 32)),
            max_prompt_chunk=random.choice((1 << 30, 1 << 30, 64, 50, 17, 1 if is_narrow else 9)),
            max_tokens_per_step=rows,
            growing=0.8 if pools == "tight" else 0.1,
            pools=pools,
            lengths=random.choice(("fixed", "fixed", "random", "auto")),
            arrivals=random.choice((0.7, 2, 4, 50)),
        )

    def engine(self, models: LocalModels, draft: object | None) -> CountingEngine:
        """An engine of these limits; its pools hold at least the largest request."""
        random = Random(self.seed)
        options = {
            "max_running_sequences": self.slots,
            "max_prompt_chunk": self.max_prompt_chunk,
            "max_tokens_per_step": self.max_tokens_per_step,
            "max_queued_requests": 1000,
            "prefix_block": BLOCK,
        }
        layout = models.deployment.layout
        if self.pools != "whole":
            layout = self._smaller(random, models, layout)
        engine = models.engine(draft, layout, **options)
        if self.lengths == "random":
            engine.scheduler.draft_length = lambda sequence: random.randint(0, sequence.max_drafts)
        if self.lengths == "auto":
            ticks = [0.0]

            def clock() -> float:
                ticks[0] += random.choice((0.001, 0.01, 0.03))
                return ticks[0]

            engine.scheduler.lengths = AutoDraftLength(models.num_depths, clock)
        return engine

    def _smaller(self, random: Random, models: LocalModels, layout: CacheLayout) -> CacheLayout:
        chunk = min(self.max_prompt_chunk, self.max_tokens_per_step)
        spare = (2, 6) if self.pools == "tight" else (6, 14)  # full pages beyond one request's
        windowed = (
            2 if self.max_tokens_per_step < 40 else self.slots
        )  # requests' worst cases in the other kinds

        def cut(model: Model) -> tuple[PoolLayout, ...]:
            worst = worst_case_pages(layout, model, MAX_CONTEXT, chunk, models.num_depths)
            wanted = [int(pages * windowed) for pages in worst]
            wanted[Kind.FULL] = worst[Kind.FULL] + random.randint(*spare)
            return tuple(
                replace(pool, num_pages=min(pool.num_pages, 1 + pages))
                for pool, pages in zip(layout.pools(model), wanted, strict=True)
            )

        return replace(layout, target=cut(Model.TARGET), draft=cut(Model.DRAFT))

"""The MTP depths through the engine against the independent reference, after every acceptance count.

Random checkpoints accept none of their own drafts, so a replaced draw decides how many stand: the depths chain
the tokens it returns, and the token that each would have drawn is kept and compared. The caches are compared in
bits with those of one window over the committed ids, in fresh runners.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from inkling.config import AttentionGeometry, ModelConfig
from inkling.engine.pages import CacheLayout
from inkling.engine.request import GenerateRequest, StopRules
from inkling.engine.scheduler import EngineLimits, Scheduler
from inkling.engine.sequence import Sequence
from inkling.model.runner import DraftRunner
from inkling.protocol import RING_SPARE, SlotOptions
from inkling.testing import tiny_config, write_random_checkpoint
from tests.engine.harness import RecordedReply
from tests.in_process import SESSION, CountingEngine, LocalModels, generate
from tests.model.stepping import (
    DraftSteps,
    TargetSteps,
    new_draft,
    new_target,
    readable,
    same_bits,
    small_pages,
)
from tests.reference import Reference

TOLERANCE = 1e-4  # absolute, fp32, of block outputs of size 1 to 10
NUM_TOKENS = 26
LONG_ANSWER = 70  # of the one-token prompt
CONFIGS = {
    "tiny": tiny_config(),
    "five depths, window 6, chain norm": tiny_config(
        hidden_size=48,
        num_layers=2,
        layer_is_local=(True, False),
        layer_is_dense=(True, False),
        full=AttentionGeometry(num_heads=6, num_kv_heads=3, head_dim=16, rel_extent=10, window=None),
        local=AttentionGeometry(num_heads=4, num_kv_heads=1, head_dim=8, rel_extent=6, window=6),
        log_scaling_floor=3.0,
        mtp_depths=5,
        mtp_is_local=(True, False, True, True, False),
        mtp_chain_norm=True,
    ),
}


@dataclass
class Computed:
    """Entries [first, end) of one depth of one window, as the runner computed them."""

    sequence: Sequence
    num_committed: int  # ids that were committed then
    depth: int
    first: int
    ids: list[int]  # id of position entry + depth + 1, one an entry
    states: Tensor  # [entries, H]
    drawn: int | None  # what the depth draws after the last entry; None: nothing was drawn


class ChosenDrafts(DraftRunner):
    """The depths, drawing what ``choose(slot, position, drawn)`` returns; keeps what they compute."""

    def __init__(self, model, *, choose, **sizes):
        super().__init__(model, **sizes)
        self.choose = choose
        self.draw, self.slots.draw = self.slots.draw, self._chosen
        self.scheduler: Scheduler | None = None
        self.owners: dict[int, Sequence] = {}  # by slot
        self.computed: list[Computed] = []
        self.chosen: dict[tuple[int, int], int] = {}  # (slot, position) -> token, of this step

    def step(self, control: np.ndarray, hidden: Tensor) -> np.ndarray:
        self.chosen.clear()
        self.owners = {sequence.slot: sequence for sequence in self.scheduler.running}
        return super().step(control, hidden)

    def _chosen(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        self.drawn = {}
        tokens = self.draw(logits, slots, positions)
        for slot, position, token in zip(slots.tolist(), positions.tolist(), tokens.tolist(), strict=True):
            self.drawn[slot] = token
            self.chosen[slot, position] = self.choose(self.owners[slot], position, token)
        pairs = zip(slots.tolist(), positions.tolist(), strict=True)
        return np.array([self.chosen[pair] for pair in pairs], np.int64)

    def _run_depth(self, k, windows, states):
        self.drawn = {}
        out = super()._run_depth(k, windows, states)
        ids = np.split(windows.ids_of_depth(k), np.cumsum(windows.count)[:-1])
        parts = out.split(windows.count.tolist())
        for slot, first, used, part in zip(
            windows.slots.tolist(), windows.first.tolist(), ids, parts, strict=True
        ):
            owner = self.owners[slot]
            self.computed.append(
                Computed(owner, len(owner.ids), k, first, used.tolist(), part.clone(), self.drawn.get(slot))
            )
            for position, token in enumerate(used.tolist(), first + k + 1):
                if position >= len(owner.ids):
                    assert token == self.chosen[slot, position], "a later id is not the draft of this step"
        return out


class RandomLengths(Scheduler):
    """Any number of drafts a step, none included."""

    random = Random(5)

    def draft_length(self, sequence: Sequence) -> int:
        return self.random.randint(0, super().draft_length(sequence))


class SeldomAll(Scheduler):
    """Mostly no drafts and never all: entries wait until the ring of target states is short."""

    random = Random(6)

    def draft_length(self, sequence: Sequence) -> int:
        most = min(super().draft_length(sequence), sequence.num_depths - 1)
        return self.random.choice((0, 0, 0, self.random.randint(0, most)))


class ForcedAcceptance:
    """Chooses drafts so that a random number of them stands, then one that cannot."""

    def __init__(self, ids: dict[tuple[int, ...], list[int]], vocab_size: int, random: Random):
        self.ids, self.vocab_size, self.random = ids, vocab_size, random
        self.first_wrong: dict[tuple[int, int], int] = {}  # (sequence, its last known position) -> position

    def __call__(self, sequence: Sequence, position: int, drawn: int) -> int:
        last = len(sequence.ids) - 1
        wrong = self.first_wrong.setdefault(
            (id(sequence), last), last + 1 + self.random.randint(0, sequence.num_depths)
        )
        ids = self.ids[sequence.request.prompt_ids]
        true = ids[position] if position < len(ids) else 0
        if position < wrong:
            return true
        if position == wrong:
            return (true + self.random.randrange(1, self.vocab_size)) % self.vocab_size
        return self.random.choice((true, self.random.randrange(self.vocab_size)))


@dataclass
class Case:
    config: ModelConfig
    reference: Reference
    models: LocalModels
    ids: dict[tuple[int, ...], list[int]]  # by prompt: prompt and answer
    states: dict[tuple[int, ...], Tensor]  # by prompt: the reference's target states of these

    def request(self, prompt: tuple[int, ...], num_depths: int) -> GenerateRequest:
        stop = StopRules(len(self.ids[prompt]) - len(prompt))
        return GenerateRequest(prompt, stop=stop, num_draft_tokens=num_depths)


@pytest.fixture(scope="module", params=CONFIGS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = tmp_path_factory.mktemp("checkpoint")
    config = CONFIGS[request.param]
    write_random_checkpoint(directory, config, seed=2, mtp_file=False, dtype=torch.float32)
    models = LocalModels(directory, max_context=256, max_running_sequences=12, threads=1)
    reference = Reference(load_file(directory / "model.safetensors"), config)
    random = Random(4)
    prompts = [
        tuple(random.choices(range(config.vocab_size), k=length))
        for length in (*range(1, config.mtp_depths + 3), 30, 90)
    ]
    requests = [
        GenerateRequest(prompt, stop=StopRules(NUM_TOKENS if len(prompt) > 1 else LONG_ANSWER))
        for prompt in prompts
    ]
    ids = {
        r.prompt_ids: [*r.prompt_ids, *a.ids]
        for r, a in zip(requests, generate(models.engine(), requests), strict=True)
    }
    return Case(config, reference, models, ids, {p: reference.target(i)[0] for p, i in ids.items()})


class Scratch:
    """Caches of a draft that ran once, over committed ids, on states of a target that ran once."""

    def __init__(self, case: Case, layout: CacheLayout):
        self.case, self.layout = case, layout
        self.target = TargetSteps(new_target(case.models, layout), layout)
        self.draft = DraftSteps(new_draft(case.models, layout), layout)
        self._known: dict[tuple[tuple[int, ...], int, int], list[Tensor]] = {}

    def caches(self, prompt: tuple[int, ...], end: int, num_depths: int) -> list[Tensor]:
        """What the entry at ``end`` reads in ``num_depths`` depths."""
        key = (prompt, end, num_depths)
        if key not in self._known:
            ids = self.case.ids[prompt]
            for steps in (self.target, self.draft):
                steps.open(SlotOptions(0, num_depths), end, end)
            hidden = self.target.prompt(0, ids[:end], [end])
            self.draft.fill(0, hidden, ids, end, num_depths)
            runner = self.draft.runner
            self._known[key] = readable(runner.cache, runner.slots.tables, self.layout, 0, end, num_depths)
            for steps in (self.target, self.draft):
                steps.release(0)
        return self._known[key]


class DepthRun:
    """Requests through the engine with chosen drafts; caches are compared after every step."""

    def __init__(
        self,
        case: Case,
        layout: CacheLayout,
        scratch: Scratch,
        *,
        chunk: int,
        scheduler: type[Scheduler],
        seed: int,
    ):
        self.case, self.layout, self.scratch = case, layout, scratch
        depths = case.config.mtp_depths
        self.choice = ForcedAcceptance(case.ids, case.config.vocab_size, Random(seed))
        self.draft = new_draft(case.models, layout, ChosenDrafts, choose=self.choice)
        limits = EngineLimits(256, 12, 512, 100, depths, chunk)
        target = new_target(case.models, layout)
        self.engine = CountingEngine(limits, layout, target, self.draft, SESSION)
        self.engine.verified = Counter()
        self.engine.scheduler = scheduler(limits, layout)
        self.draft.scheduler = self.engine.scheduler
        self.num_compared = 0

    def run(self, requests: list[GenerateRequest]) -> None:
        replies = [RecordedReply() for _ in requests]
        for request, reply in zip(requests, replies, strict=True):
            self.engine.submit(request, reply)
        more = True
        while more:
            more = self.engine.step()
            for sequence in self.engine.scheduler.running:
                self._compare_caches(sequence)
        self.engine.sender.send_ready()
        for request, reply in zip(requests, replies, strict=True):
            assert reply.error is None, reply.error
            assert [*request.prompt_ids, *reply.ids] == self.case.ids[request.prompt_ids]

    def _compare_caches(self, sequence: Sequence) -> None:
        window = sequence.window
        if window is None or window.final == 0 or not sequence.max_drafts:
            return
        runner = self.draft
        held = readable(
            runner.cache, runner.slots.tables, self.layout, sequence.slot, window.final, window.num_depths
        )
        prompt = sequence.request.prompt_ids
        assert same_bits(held, self.scratch.caches(prompt, window.final, window.num_depths)), (
            f"prompt of {len(prompt)}, entries below {window.final}"
        )
        self.num_compared += 1

    def compare_states(self) -> None:
        """Every entry of every window and every draw, with the reference from position 0."""
        reference = self.case.reference
        previous: dict[int, Tensor] = {}  # by sequence: the depth before, or the target
        for c in self.draft.computed:
            ids, end, k = c.sequence.ids, c.first + len(c.ids), c.depth
            num_known = max(0, min(c.num_committed - c.first - k - 1, len(c.ids)))
            assert c.ids[:num_known] == ids[c.first + k + 1 : c.first + k + 1 + num_known]
            states = (
                self.case.states[c.sequence.request.prompt_ids][:end] if k == 0 else previous[id(c.sequence)]
            )
            states, logits = reference.depth(k, states, [*ids[k + 1 : c.first + k + 1], *c.ids])
            previous[id(c.sequence)] = states
            assert (states[c.first :] - c.states).abs().max() <= TOLERANCE, (k, c.first, end)
            assert c.drawn in (None, int(logits[-1].argmax())), (k, end)


@pytest.fixture(scope="module")
def scratch(case: Case) -> dict[str, Scratch]:
    return {
        "large": Scratch(case, case.models.deployment.layout),
        "small": Scratch(case, small_pages(case.models)),
    }


CHUNKS = {"unlimited": lambda n: 1 << 20, "1": lambda n: 1, "N": lambda n: n, "N + 1": lambda n: n + 1}


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("scheduler", [Scheduler, RandomLengths], ids=["all drafts", "random n"])
def test_states_draws_and_caches_after_every_acceptance_count(
    case: Case, scratch: dict[str, Scratch], scheduler: type[Scheduler], chunk: str
) -> None:
    depths = case.config.mtp_depths
    pages = scratch["large" if scheduler is Scheduler else "small"]
    seed = 10 * depths + len(chunk)
    run = DepthRun(case, pages.layout, pages, chunk=CHUNKS[chunk](depths), scheduler=scheduler, seed=seed)
    random = Random(seed)
    requests = [case.request(prompt, depths) for prompt in case.ids]
    if scheduler is not Scheduler:  # again, some with fewer depths of their own
        requests += [
            case.request(prompt, random.choice((depths, random.randint(1, depths))))
            for prompt in case.ids
            if len(prompt) < 90
        ]
    run.run(requests)
    run.compare_states()
    verified = run.engine.verified
    assert {accepted for _, accepted in verified} == set(range(depths + 1))
    if scheduler is Scheduler:
        assert all(verified[depths, accepted] for accepted in range(depths + 1))
    else:
        assert {n for n, _ in verified} == set(range(1, depths + 1))
    assert run.num_compared > 50


def test_states_draws_and_caches_of_entries_that_waited_long(case: Case, scratch: dict[str, Scratch]) -> None:
    depths = case.config.mtp_depths
    run = DepthRun(case, scratch["small"].layout, scratch["small"], chunk=64, scheduler=SeldomAll, seed=1)
    prompts = [prompt for prompt in case.ids if len(prompt) == 1]
    run.run([case.request(prompt, depths) for prompt in prompts])
    run.compare_states()
    windows = [len(c.ids) for c in run.draft.computed if c.depth == depths - 1]
    assert max(windows) >= RING_SPARE - depths, "no window took up a ring of entries"
    assert run.num_compared > 0


def test_drafts_are_the_greedy_drafts_of_the_reference(case: Case) -> None:
    depths = case.config.mtp_depths
    prompts = [prompt for prompt in case.ids if len(prompt) in (1, 2, depths + 2, 30)]
    engine = case.models.engine(max_prompt_chunk=depths)
    for prompt in prompts:
        engine.submit(case.request(prompt, depths), RecordedReply())
    num_drafts = 0
    for _ in range(16):
        engine.step()
        for sequence in engine.scheduler.running:
            expected = (
                case.reference.greedy_drafts(sequence.ids, len(sequence.drafts)) if sequence.drafts else []
            )
            assert sequence.drafts == expected
            num_drafts += len(expected)
    assert num_drafts > 8 * depths
    while engine.step():
        pass

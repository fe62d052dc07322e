"""The product without its server: the engine over the runners of a checkpoint, in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import torch

from inkling.deployment import Deployment
from inkling.engine.channel import Session
from inkling.engine.clients import DraftClient
from inkling.engine.loop import Engine
from inkling.engine.pages import CacheLayout
from inkling.engine.request import GenerateRequest
from inkling.engine.scheduler import EngineLimits, Segment
from inkling.model.load import load_draft_runner, load_target_runner
from inkling.settings import Settings
from tests.engine.harness import RecordedReply
from tests.engine.scripted import References, ScriptedDraft

GENERATION = 7
SESSION = Session(np.arange(8, dtype=np.int32), GENERATION)


class CountingEngine(Engine):
    """``verified`` counts (drafts verified, drafts accepted) over all steps and sequences."""

    verified: Counter[tuple[int, int]]

    def _commit(self, plan: list[Segment]) -> None:
        self.verified.update((s.num_drafts, s.accepted) for s in plan if s.num_drafts)
        super()._commit(plan)


class LocalModels:
    """Target and depths of one checkpoint, loaded once; engines of any setting take turns on them."""

    def __init__(self, checkpoint: Path | str, **settings: object):
        self.deployment = Deployment.of(
            Settings.from_values({"checkpoint": str(checkpoint), "draft_length": "fixed", **settings})
        )
        layout, device = self.deployment.shared_layout, self.deployment.device
        block = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        shared, ring = layout.of_block(block)
        outputs = None if ring is None else ring.states
        self.target = load_target_runner(
            self.deployment, generation=GENERATION, shared=shared, outputs=outputs
        )
        self.draft = load_draft_runner(self.deployment, shared, generation=GENERATION)

    @property
    def num_depths(self) -> int:
        return self.deployment.num_draft_tokens

    def engine(
        self, draft: DraftClient | None = None, layout: CacheLayout | None = None, **limits: int
    ) -> CountingEngine:
        """An engine whose loop the caller steps. ``draft`` replaces the depths; ``layout`` the deployment's, with
        fewer pages; ``limits``: EngineLimits fields."""
        deployment = self.deployment
        limits = replace(
            EngineLimits.of(deployment.settings, deployment.max_context, self.num_depths), **limits
        )
        engine = CountingEngine(
            limits, layout or deployment.layout, self.target, draft or self.draft, SESSION
        )
        engine.verified = Counter()
        return engine

    def scripted_draft(self, references: References, seed: int) -> ScriptedDraft:
        """In place of the depths: the true token with probability 0.7, else a wrong one."""
        return ScriptedDraft(
            self.deployment.layout,
            references,
            vocab_size=self.deployment.config.vocab_size,
            num_depths=self.num_depths,
            probability=0.7,
            seed=seed,
            generation=GENERATION,
        )


def generate(
    engine: Engine, requests: Sequence[GenerateRequest], arrivals: Random | None = None
) -> list[RecordedReply]:
    """Runs requests to their end; they arrive all at once, or after random steps drawn from ``arrivals``."""
    replies = [RecordedReply() for _ in requests]
    waiting = list(zip(requests, replies, strict=True))
    while waiting:
        for _ in range(len(waiting) if arrivals is None else arrivals.choice((0, 0, 1, 2))):
            if waiting:
                engine.submit(*waiting.pop(0))
        engine.step()
    while engine.step():
        pass
    engine.sender.send_ready()
    engine.scheduler.check_integrity()
    for reply in replies:
        if reply.error is not None:
            raise reply.error
    return replies

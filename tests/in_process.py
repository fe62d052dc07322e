"""The product without its server: the engine over the runners of a checkpoint, in this process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from inkling.deployment import Deployment
from inkling.engine.channel import Session
from inkling.engine.loop import DraftClient, Engine
from inkling.engine.outbox import Chunk
from inkling.engine.request import GenerateRequest
from inkling.engine.scheduler import EngineLimits
from inkling.model.load import load_draft_runner, load_target_runner
from inkling.model.shared_weights import SharedWeights
from inkling.settings import Settings

GENERATION = 7
SESSION = Session(np.arange(8, dtype=np.int32), GENERATION)


@dataclass
class CollectReply:
    """A reply that keeps everything."""

    ids: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    cancelled: bool = False

    def send(self, chunk: Chunk) -> None:
        assert not (self.chunks and self.chunks[-1].final), "a chunk after FINAL"
        self.chunks.append(chunk)
        self.ids += chunk.ids

    def is_cancelled(self) -> bool:
        return self.cancelled

    @property
    def last(self) -> Chunk:
        assert self.chunks and self.chunks[-1].final, "no FINAL"
        return self.chunks[-1]


class LocalModels:
    """Target and depths of one checkpoint, loaded once; engines of any setting take turns on them."""

    def __init__(self, checkpoint: Path, **settings: object):
        self.deployment = Deployment.of(Settings.from_values({"checkpoint": str(checkpoint), **settings}))
        self.target = load_target_runner(self.deployment, generation=GENERATION)
        weights = self.target.model.weights
        self.draft = load_draft_runner(
            self.deployment, SharedWeights(weights.embed, weights.head), generation=GENERATION
        )

    def engine(self, draft: DraftClient | None = None, **limits: int) -> Engine:
        """An engine whose loop the caller steps. ``draft`` replaces the depths; ``limits``: EngineLimits fields."""
        settings, deployment = self.deployment.settings, self.deployment
        default = EngineLimits(
            deployment.max_context,
            settings.max_running_sequences,
            settings.max_tokens_per_step,
            settings.max_queued_requests,
            deployment.num_draft_tokens,
        )
        return Engine(replace(default, **limits), deployment.layout, self.target, draft or self.draft, SESSION)


def generate(engine: Engine, requests: list[GenerateRequest]) -> list[CollectReply]:
    """Runs requests that all arrive at once to their end."""
    replies = [CollectReply() for _ in requests]
    for request, reply in zip(requests, replies, strict=True):
        engine.submit(request, reply)
    while engine.step():
        pass
    engine.sender.send_ready()
    engine.scheduler.check_integrity()
    return replies

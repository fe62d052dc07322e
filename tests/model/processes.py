"""Both model processes in this one, under an engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from inkling.deployment import Deployment
from inkling.engine.channel import Session
from inkling.engine.loop import Engine
from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from inkling.engine.scheduler import EngineLimits
from inkling.model.process import DraftProcess, TargetProcess
from inkling.run_folder import RunFolder
from inkling.settings import Settings
from tests.engine.harness import RecordedReply

PROMPTS = [tuple(range(3, 3 + length)) for length in (1, 5, 40, 30)]


def settings_of(checkpoint: Path, **settings: object) -> Settings:
    values = {"threads": 1, "draft_length": "fixed", "max_context": 64, "max_tokens_per_step": 32}
    values |= {"max_running_sequences": 4}
    return Settings(str(checkpoint), **values | settings)


def load(settings: Settings, folder: Path) -> tuple[TargetProcess, DraftProcess, RunFolder]:
    run_folder = RunFolder.of_server(folder, os.getpid())
    target = TargetProcess(settings, run_folder, lambda line: None)
    return target, DraftProcess(settings, run_folder, lambda line: None), run_folder


class Target:
    """The process as the loop calls it."""

    def __init__(self, process: TargetProcess):
        self.process = process

    def step(self, control: np.ndarray) -> tuple[np.ndarray, Tensor | None]:
        return self.process.step(control)[:2]


class Draft:
    def __init__(self, process: DraftProcess):
        self.process = process
        self.drafts: list[np.ndarray] = []  # of every step
        self.num_sent = 0

    def step(self, control: np.ndarray, hidden: Tensor | None) -> np.ndarray:
        self.num_sent += hidden is not None
        self.drafts.append(self.process.step(control, hidden))
        return self.drafts[-1]


def run(
    settings: Settings, folder: Path, prompts: Sequence[tuple[int, ...]] = PROMPTS, max_tokens: int = 20
) -> tuple[Draft, list[list[int]]]:
    """All prompts at once, half of them sampled; the draft with all it gave, and the answers."""
    target, draft, run_folder = load(settings, folder)
    record = run_folder.record()
    deployment = Deployment.of(replace(settings, cache_bytes=record.cache_bytes))
    limits = EngineLimits.of(settings, deployment.max_context, deployment.num_draft_tokens)
    recorded, session = Draft(draft), Session(record.key_words, record.generation)
    engine = Engine(limits, deployment.layout, Target(target), recorded, session)
    replies = [RecordedReply() for _ in prompts]
    for i, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        sampling = SamplingParams(temperature=i % 2 * 0.8, seed=i)
        stop, num_drafts = StopRules(max_tokens=max_tokens), deployment.num_draft_tokens
        engine.submit(GenerateRequest(prompt, sampling, stop, num_draft_tokens=num_drafts), reply)
    while engine.step():
        pass
    engine.sender.send_ready()
    return recorded, [reply.ids for reply in replies]

"""The engine over the CUDA runners of a checkpoint, in this process: on the GPU, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

from inkling.deployment import Deployment
from inkling.engine.pages import Model
from inkling.engine.request import GenerateRequest
from inkling.model.cuda_draft import CudaDraftRunner
from inkling.model.cuda_graphs import StepGraphs
from inkling.model.cuda_runner import CudaTargetRunner
from inkling.model.load import runner_sizes
from inkling.model.weights import load_draft, load_target
from inkling.settings import Settings
from tests.in_process import GENERATION, LocalModels, generate


class CudaModels(LocalModels):
    """``LocalModels`` on ``device``, in bf16; graphs are captured when ``capture`` is called."""

    def __init__(self, checkpoint: Path | str, device: str, **settings: object):
        values = {"checkpoint": str(checkpoint), "dtype": "bfloat16", "draft_length": "fixed", **settings}
        self.deployment = deployment = Deployment.of(Settings.from_values(values))
        config, depths = deployment.config, deployment.num_draft_tokens
        load = {"dtype": deployment.dtype, "device": device}
        rows = deployment.settings.max_tokens_per_step
        self.weights = load_target(checkpoint, config, **load)
        sizes = runner_sizes(deployment, Model.TARGET, GENERATION)
        self.target = CudaTargetRunner(config, self.weights, **sizes, max_tokens_per_step=rows)
        self.draft = None
        if depths:
            draft_weights = load_draft(checkpoint, config, depths, **load)
            sizes = runner_sizes(deployment, Model.DRAFT, GENERATION)
            shared = self.weights.embed, self.weights.head
            self.draft = CudaDraftRunner(config, draft_weights, *shared, **sizes, max_tokens_per_step=rows)

    def capture(self, report=lambda line: None) -> None:
        self.target.capture(report)
        if self.draft is not None:
            self.draft.capture(report)

    @contextmanager
    def with_graphs(self, kind: type[StepGraphs]) -> Iterator[None]:
        """``StepGraphs``: empty ones, so that every step runs as it is. ``PaddedRuns``: each in its graph's size."""
        runners = [runner for runner in (self.target, self.draft) if runner is not None]
        kept = [runner.graphs for runner in runners]
        for runner in runners:
            runner.graphs = kind(runner.stream, runner.graphs.run, runner.graphs.what)
        try:
            yield
        finally:
            for runner, graphs in zip(runners, kept, strict=True):
                runner.graphs = graphs


class PaddedRuns(StepGraphs):
    """Runs what a graph would replay, kernel by kernel; for machines without graphs."""

    def __contains__(self, key: Hashable) -> bool:
        return True

    def replay(self, key: Hashable) -> None:
        self.run(key)


def recorded(models: CudaModels, requests: list[GenerateRequest]) -> list[Tensor]:
    """Everything that the runners return while ``requests`` are served, in chunks that no clock decides."""
    found: list[Tensor] = []
    engine = models.engine(max_prompt_chunk=64)
    step_scored, draft_step = models.target.step_scored, models.draft.step

    def target(control: np.ndarray) -> tuple:
        tokens, hidden, scores = step_scored(control)
        found.extend((torch.from_numpy(tokens), hidden.cpu(), torch.from_numpy(scores)))
        return tokens, hidden, scores

    def draft(control: np.ndarray, hidden: Tensor) -> np.ndarray:
        drafts = draft_step(control, hidden)
        found.append(torch.from_numpy(drafts))
        return drafts

    models.target.step_scored, models.draft.step = target, draft
    try:
        generate(engine, requests, Random(4))
    finally:
        del models.target.step_scored, models.draft.step
    return found

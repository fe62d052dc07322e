"""From a deployment to a runner that can step: the loading of each model process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from inkling.deployment import Deployment
from inkling.engine.pages import CacheLayout, Model
from inkling.model.mtp import MtpModel
from inkling.model.runner import DraftRunner, TargetRunner
from inkling.model.shared_weights import SharedWeights
from inkling.model.target import TargetModel
from inkling.model.weights import DraftWeights, load_draft, load_target
from inkling.protocol import Kind

if TYPE_CHECKING:
    from inkling.model.cuda_draft import CudaDraftRunner
    from inkling.model.cuda_runner import CudaTargetRunner

Report = Callable[[str], None]


def load_target_runner(
    deployment: Deployment,
    *,
    generation: int,
    shared: SharedWeights | None = None,
    outputs: Tensor | None = None,
    report: Report = lambda line: None,
) -> TargetRunner | CudaTargetRunner:
    """Reads the target, allocates caches, and on the CPU checks that its products are row-exact.

    ``shared``: memory that the draft maps too; the embedding table and the head then live there only. ``outputs``:
    [slots, R, H] on the GPU, where the hidden states of the steps are to be left, in turn.
    """
    settings, config = deployment.settings, deployment.config
    torch.set_num_threads(settings.num_threads)
    weights = load_target(
        settings.checkpoint,
        config,
        dtype=deployment.weight_dtype,
        device=deployment.device,
        progress=_percent(report, "target"),
    )
    if shared is not None:
        shared.embed.copy_(weights.embed)
        shared.head.copy_(weights.head)
        weights = replace(weights, embed=shared.embed, head=shared.head)
    sizes = runner_sizes(deployment, Model.TARGET, generation)
    if settings.device == "cuda":
        from inkling.model.cuda_runner import CudaTargetRunner  # imports triton

        torch.cuda.empty_cache()  # the loaded embedding table and head are in ``shared`` now
        rows = settings.max_tokens_per_step
        runner = CudaTargetRunner(config, weights, **sizes, max_tokens_per_step=rows, outputs=outputs)
        torch.cuda.empty_cache()  # what its layers arranged anew
        return runner
    runner = TargetRunner(TargetModel.build(config, weights, deployment.dtype), **sizes)
    quantum = runner.check_row_invariance(settings.max_tokens_per_step)
    report(f"products are row-exact with {settings.num_threads} threads at a row quantum of {quantum}")
    return runner


def load_draft_runner(
    deployment: Deployment, shared: SharedWeights, *, generation: int, report: Report = lambda line: None
) -> DraftRunner | CudaDraftRunner:
    """Reads the first N depths; embedding table and head are ``shared``."""
    settings, config = deployment.settings, deployment.config
    torch.set_num_threads(settings.num_threads)
    sizes = runner_sizes(deployment, Model.DRAFT, generation)
    if deployment.num_draft_tokens == 0:
        return DraftRunner(_no_depths(deployment, shared), **sizes)
    weights = load_draft(
        settings.checkpoint,
        config,
        deployment.num_draft_tokens,
        dtype=deployment.weight_dtype,
        device=deployment.device,
        progress=_percent(report, "draft"),
    )
    if settings.device == "cuda":
        from inkling.model.cuda_draft import CudaDraftRunner  # imports triton

        rows = settings.max_tokens_per_step
        runner = CudaDraftRunner(
            config, weights, shared.embed, shared.head, **sizes, max_tokens_per_step=rows
        )
        torch.cuda.empty_cache()
        return runner
    model = MtpModel.build(config, weights, shared.embed, shared.head, deployment.dtype)
    return DraftRunner(model, **sizes)


def _no_depths(deployment: Deployment, shared: SharedWeights) -> MtpModel:
    """With drafting off for the deployment the draft model stands by and is never called."""
    weights = DraftWeights([], None, None)
    return MtpModel(deployment.config, weights, [], deployment.dtype, shared.embed, shared.head)


def runner_sizes(
    deployment: Deployment, model: Model, generation: int, layout: CacheLayout | None = None
) -> dict[str, object]:
    """Keyword arguments that all runners take; ``layout``: other caches than the deployment's."""
    pools = dict(zip(Kind, (layout or deployment.layout).pools(model), strict=True))
    return {
        "generation": generation,
        "num_slots": deployment.settings.max_running_sequences,
        "max_context": deployment.max_context,
        "num_draft_tokens": deployment.num_draft_tokens,
        "page_size": {kind: pool.page_size for kind, pool in pools.items()},
        "num_pages": {kind: pool.num_pages for kind, pool in pools.items()},
    }


def _percent(report: Report, what: str) -> Callable[[int, int, str], None]:
    """A progress callback that reports every tenth part."""
    told = -1

    def progress(done: int, total: int, name: str) -> None:
        nonlocal told
        tenth = 10 * done // max(1, total)
        if tenth > told:
            told = tenth
            report(f"loading {what} weights {100 * done // max(1, total)} %")

    return progress

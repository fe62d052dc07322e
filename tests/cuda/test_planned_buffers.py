"""What the CUDA runners allocate is what the memory plan counts, buffer by buffer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inkling.engine.pages import Model
from inkling.memory_plan import _LOGIT_ROWS, plan_memory
from inkling.model.cuda_draws import LOGIT_ROWS
from inkling.testing import write_random_checkpoint
from tests.cuda.cuda_models import CudaModels
from tests.cuda.test_runner import SMALL


@pytest.mark.parametrize("max_context", [48, 2000])
def test_buffers_of_the_runners_are_planned(tmp_path: Path, device: str, max_context: int) -> None:
    write_random_checkpoint(tmp_path, replace(SMALL, max_position=4096), seed=3)
    settings = {
        "max_context": max_context,
        "max_running_sequences": 5,
        "max_tokens_per_step": 64,
        "threads": 1,
    }
    models = CudaModels(tmp_path, device, **settings, cache_bytes=1 << 26)
    deployment = models.deployment
    plan = plan_memory(
        deployment.config,
        replace(deployment.settings, device="cuda"),
        num_drafts=deployment.num_draft_tokens,
        max_context=deployment.max_context,
        dtype=deployment.dtype,
        weight_dtype=deployment.weight_dtype,
        shared=deployment.shared_layout,
        memory_bytes=0,
    )
    drawn = {Model.TARGET: models.target.draws._drawn, Model.DRAFT: models.draft._drawn}
    for model, runner in ((Model.TARGET, models.target), (Model.DRAFT, models.draft)):
        planned = plan.models[model]
        assert planned["attention splits"] == pytest.approx(runner.passes._part_memory.nbytes, rel=0.01)
        assert planned["draws"] == drawn[model].best_ids.nbytes + drawn[model].parts.nbytes
        caches = sum(
            t.nbytes for layer in runner.cache.layers for t in vars(layer).values() if hasattr(t, "nbytes")
        )
        assert plan.of_model(model)["caches"] == pytest.approx(caches, rel=0.01)
    assert plan.models[Model.DRAFT]["hidden states"] == models.draft.ring.nbytes
    assert _LOGIT_ROWS == LOGIT_ROWS

"""The CUDA runners under the engine: the same tokens whatever is drafted, batched or cut, and the CPU's states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inkling.config import AttentionGeometry
from inkling.engine.request import GenerateRequest, SamplingParams, StopRules
from inkling.testing import tiny_config, write_random_checkpoint
from tests.in_process import generate

SMALL = tiny_config(
    num_layers=2,
    vocab_size=61,
    padded_vocab_size=64,
    full=AttentionGeometry(2, 1, 16, 24, None),
    local=AttentionGeometry(4, 2, 16, 11, 11),
    layer_is_local=(False, True),
    layer_is_dense=(True, False),
    num_experts=4,
    mtp_depths=2,
    mtp_is_local=(True, False),
)


@pytest.fixture(scope="module")
def models(device: str, tmp_path_factory: pytest.TempPathFactory):
    from tests.cuda.cuda_models import CudaModels

    directory: Path = tmp_path_factory.mktemp("small")
    write_random_checkpoint(directory, SMALL, seed=3)
    return CudaModels(directory, device, max_context=64, max_running_sequences=4, max_tokens_per_step=32, threads=1)


def test_x(models):
    import time
    t = time.time()
    req = GenerateRequest(tuple(range(2, 9)), SamplingParams(), StopRules(max_tokens=6))
    a = generate(models.engine(), [req])[0].ids
    print(a, time.time() - t); t = time.time()
    b = generate(models.engine(), [replace(req, num_draft_tokens=2)])[0].ids
    print(b, time.time() - t)
    assert a == b

"""Settings and checkpoint together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inkling.deployment import Deployment
from inkling.engine.request import GenerateRequest, StopRules
from inkling.errors import SettingsError
from inkling.settings import Settings
from inkling.testing import tiny_config, write_random_checkpoint
from tests.in_process import LocalModels, generate

REQUEST = GenerateRequest((3, 1, 4, 1, 5), stop=StopRules(max_tokens=20))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(directory, seed=5)
    return directory


def deployment(checkpoint, **settings) -> Deployment:
    return Deployment.of(Settings(checkpoint=str(checkpoint), **settings))


def test_a_deployment_without_drafts_loads_no_depths_and_answers_the_same(checkpoint):
    drafting = LocalModels(checkpoint, max_context=128, threads=1)
    plain = LocalModels(checkpoint, max_context=128, threads=1, num_draft_tokens=0)
    assert plain.num_depths == 0 and not plain.draft.model.blocks
    drafted = replace(REQUEST, num_draft_tokens=drafting.num_depths)
    assert generate(plain.engine(), [REQUEST])[0].ids == generate(drafting.engine(), [drafted])[0].ids


def test_a_checkpoint_without_depths_is_served_without_drafting(tmp_path):
    write_random_checkpoint(tmp_path, tiny_config(mtp_depths=0, mtp_is_local=()), seed=5)
    models = LocalModels(tmp_path, max_context=128, threads=1)
    assert models.num_depths == 0
    assert len(generate(models.engine(), [REQUEST])[0].ids) == 20


def test_weights_stored_in_bf16_stay_narrow_and_give_the_bits_of_wide_ones(tmp_path):
    answers, dtypes = [], []
    for dtype in (torch.bfloat16, torch.float32):
        directory = tmp_path / str(dtype)
        directory.mkdir()
        write_random_checkpoint(directory, seed=6, dtype=torch.bfloat16)
        if dtype is torch.float32:
            _widen_files(directory)
        models = LocalModels(directory, max_context=128, threads=1)
        dtypes.append(models.deployment.weight_dtype)
        answers.append(generate(models.engine(), [REQUEST])[0].ids)
    assert dtypes == [torch.bfloat16, torch.float32]
    assert answers[0] == answers[1]


def _widen_files(directory):
    from safetensors.torch import load_file, save_file

    for file in directory.glob("*.safetensors"):
        save_file({name: tensor.float() for name, tensor in load_file(file).items()}, file)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_draft_tokens": 9}, "num_draft_tokens is 9; the checkpoint has 3 MTP depths"),
        ({"max_context": 1}, r"max_context is 1; it must be in \[2, "),
        ({"max_context": 10**9}, "max_context is 1000000000"),
        ({"device": "cuda"}, "use cpu"),
        ({"device": "cuda", "dtype": "float32"}, "dtype is 'float32'; it must be auto or bfloat16 on cuda"),
        ({"hidden_transport": "pipe"}, "hidden_transport is 'pipe'; it must be ring or dlpack"),
        ({"cache_bytes": 1000}, "cache_bytes is 1000"),
    ],
)
def test_settings_that_do_not_fit_the_checkpoint_name_value_and_bound(checkpoint, settings, words):
    with pytest.raises(SettingsError, match=words):
        deployment(checkpoint, **settings)

"""The three hand-written config.pbtxt files say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest
import tritonclient.grpc.model_config_pb2 as model_config
from google.protobuf import text_format

from inkling.interface import OUTPUTS
from inkling.parameters import INPUTS
from inkling.protocol import DRAFT_MODEL, DRAFT_TENSORS, ENSEMBLE_MODEL, HIDDEN, TARGET_MODEL, TARGET_TENSORS

REPOSITORY = Path(__file__).parents[2] / "model_repository"
MODELS = (TARGET_MODEL, DRAFT_MODEL, ENSEMBLE_MODEL)


def config_of(model: str) -> model_config.ModelConfig:
    return text_format.Parse((REPOSITORY / model / "config.pbtxt").read_text(), model_config.ModelConfig())


def tensors(declared) -> dict[str, tuple[str, tuple[int, ...]]]:
    names = [tensor.name for tensor in declared]
    assert len(names) == len(set(names))
    return {t.name: (model_config.DataType.Name(t.data_type), tuple(t.dims)) for t in declared}


@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_one_unbatched_python_instance(model):
    config = config_of(model)
    assert (config.name, config.backend, config.max_batch_size) == (model, "python", 0)
    assert [group.count for group in config.instance_group] == [1]
    assert not config.HasField("dynamic_batching") and not config.HasField("sequence_batching")


def test_the_public_model_declares_the_interface_tables():
    config = config_of(ENSEMBLE_MODEL)
    assert tensors(config.input) == {name: (field.type, field.dims) for name, field in INPUTS.items()}
    assert tensors(config.output) == OUTPUTS
    assert all(tensor.optional for tensor in config.input)  # prompts are alternatives
    assert config.model_transaction_policy.decoupled
    assert config.instance_group[0].kind == model_config.ModelInstanceGroup.KIND_CPU


@pytest.mark.parametrize("model, declared", [(TARGET_MODEL, TARGET_TENSORS), (DRAFT_MODEL, DRAFT_TENSORS)])
def test_the_private_models_declare_the_step_protocol(model, declared):
    config = config_of(model)
    inputs, outputs = declared
    assert tensors(config.input) == inputs and tensors(config.output) == outputs
    assert [tensor.name for tensor in config.input if tensor.optional] == (
        [HIDDEN] if HIDDEN in inputs else []
    )
    assert not config.model_transaction_policy.decoupled
    assert config.instance_group[0].kind == model_config.ModelInstanceGroup.KIND_MODEL
    assert config.parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value == "no"

"""``config.json`` in both spellings, and every rule it must keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inkling.config import AttentionGeometry, ModelConfig
from inkling.errors import CheckpointError
from inkling.testing import released_config, tiny_config, write_config

REMOVED = object()


@pytest.fixture(params=["original", "transformers"])
def spelling(request) -> str:
    return request.param


def write(directory: Path, spelling: str, changes: dict[str, Any], *, text_only: bool = False) -> None:
    """A valid config with values replaced (or ``REMOVED``) at dotted keys."""
    write_config(directory, tiny_config(format=spelling), text_only=text_only)
    file = directory / "config.json"
    values = json.loads(file.read_text())
    for key, value in changes.items():
        *sections, last = key.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        if value is REMOVED:
            del place[last]
        else:
            place[last] = value
    file.write_text(json.dumps(values))


def refusal(directory: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as raised:
        ModelConfig.from_dir(directory)
    return raised.value


@pytest.mark.parametrize("text_only", [False, True])
def test_what_is_written_is_what_is_read(tmp_path, spelling, text_only):
    config = tiny_config(format=spelling, mtp_chain_norm=True, eos_token_ids=(7, 9))
    write_config(tmp_path, config, text_only=text_only)
    assert ModelConfig.from_dir(tmp_path) == config


def test_released_small_model_is_read_as_published(tmp_path):
    """Keys and values quoted from the released Inkling-Small."""
    (tmp_path / "config.json").write_text(json.dumps(released_small()))
    config = ModelConfig.from_dir(tmp_path)
    assert config == released_config("Inkling-Small")
    assert config.full == AttentionGeometry(32, 8, 128, rel_extent=1024, window=None)
    assert config.local == AttentionGeometry(32, 8, 128, rel_extent=512, window=512)
    assert [i for i in range(42) if not config.layer_is_local[i]] == [5, 11, 17, 23, 29, 35, 41]
    assert config.layer_is_dense == (True, True) + (False,) * 40
    assert (config.dense_ffn, config.expert_ffn) == (16384, 2048)
    assert (config.vocab_size, config.padded_vocab_size) == (200058, 201024)
    assert config.mtp_is_local == (True, False, True, False, True, True, True, True)
    assert config.eos_token_ids == (200006,)
    assert config.layer_geometry(5) is config.full and config.depth_geometry(0) is config.local


def released_small() -> dict[str, Any]:
    text = {
        "model_max_length": 1048576, "hidden_size": 4096, "num_hidden_layers": 42, "vocab_size": 201024,
        "unpadded_vocab_size": 200058, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "swa_num_attention_heads": 32, "swa_num_key_value_heads": 8, "swa_head_dim": 128,
        "sliding_window_size": 512, "local_layer_ids": [i for i in range(42) if i % 6 != 5], "d_rel": 16,
        "rel_extent": 1024, "log_scaling_n_floor": 128000, "log_scaling_alpha": 0.1, "rms_norm_eps": 1e-6,
        "q_bias": False, "o_bias": False, "use_embed_norm": True, "use_sconv": True, "sconv_kernel_size": 4,
        "dense_mlp_idx": 2, "dense_intermediate_size": 16384, "intermediate_size": 2048,
        "n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 2, "shared_expert_sink": True,
        "norm_after_topk": True, "use_gate_bias": True, "use_global_scale": True,
        "gate_activation": "sigmoid", "route_scale": 8.0, "logits_mup_width_multiplier": 16.0,
        "final_logit_softcapping": None,
    }  # fmt: skip
    mtp = {"num_nextn_predict_layers": 8, "local_layer_ids": [0, 2, 4, 5, 6, 7]}
    mtp["chain_hidden_post_norm"] = False
    return {
        "architectures": ["InklingForConditionalGeneration"], "model_type": "inkling_mm_model",
        "eos_token_id": 200006, "torch_dtype": "bfloat16", "text_config": text, "mtp_config": mtp,
        "vision_config": {"decoder_dmodel": 4096}, "audio_config": {"decoder_dmodel": 4096},
    }  # fmt: skip


# (key, value that breaks a rule, words of the rule); keys of the text config, valid in both spellings
BROKEN_IN_BOTH = [
    ("hidden_size", 0, "at least 1"),
    ("hidden_size", "64", "must be an integer"),
    ("hidden_size", True, "must be an integer"),
    ("hidden_size", REMOVED, "required"),
    ("num_hidden_layers", None, "required"),
    ("vocab_size", -256, "at least 1"),
    ("unpadded_vocab_size", 257, "from 1 to 256"),
    ("num_key_value_heads", 3, "must divide num_attention_heads = 4"),
    ("swa_num_key_value_heads", 5, "must divide swa_num_attention_heads = 8"),
    ("swa_head_dim", 0, "at least 1"),
    ("head_dim", REMOVED, "required"),
    ("sliding_window_size", 0, "at least 1"),
    ("rel_extent", 0, "at least 1"),
    ("d_rel", 8, "from 16 to 16"),
    ("log_scaling_n_floor", 0, "above 0"),
    ("log_scaling_alpha", -0.1, "at least 0"),
    ("rms_norm_eps", 0.0, "above 0"),
    ("rms_norm_eps", float("nan"), "finite"),
    ("n_routed_experts", 0, "at least 1"),
    ("num_experts_per_tok", 9, "from 1 to 8"),
    ("num_experts_per_tok", 0, "from 1 to 8"),
    ("n_shared_experts", 0, "at least 1"),
    ("shared_expert_sink", False, "must be True"),
    ("norm_after_topk", False, "must be True"),
    ("gate_activation", "softmax", "must be 'sigmoid'"),
    ("use_gate_bias", False, "must be True"),
    ("use_global_scale", False, "must be True"),
    ("use_sconv", False, "must be True"),
    ("inference_moe_w13_interleaved", False, "must be True"),
    ("q_bias", True, "must be False"),
    ("o_bias", True, "must be False"),
    ("hidden_act", "gelu", "must be 'silu'"),
    ("mtp_hidden_states_first", False, "must be True"),
    ("final_logit_softcapping", 30.0, "must be null"),
    ("tie_word_embeddings", True, "must be False"),
    ("use_embed_norm", 1, "true or false"),
    ("route_scale", float("inf"), "finite"),
    ("logits_mup_width_multiplier", 0, "above 0"),
    ("local_layer_ids", [0, 0], "unique"),
    ("local_layer_ids", [4], "from 0 to 3"),
    ("local_layer_ids", [-1], "from 0 to 3"),
    ("local_layer_ids", [0.0], "list of integers"),
    ("local_layer_ids", "0", "list of integers"),
    ("dense_mlp_idx", 5, "from 0 to 4"),
    ("mtp_swa_head_dim", 32, "must be 16"),
    ("quantization_config", {"quant_algo": "NVFP4"}, "NVFP4"),
]


@pytest.mark.parametrize(("key", "value", "rule"), BROKEN_IN_BOTH)
def test_a_broken_rule_names_file_key_value_and_bound(tmp_path, spelling, key, value, rule):
    write(tmp_path, spelling, {f"text_config.{key}": value})
    error = refusal(tmp_path)
    assert error.file == str(tmp_path / "config.json")
    assert error.key == f"text_config.{key}"
    assert rule in error.rule
    if value not in (REMOVED, None) and not isinstance(value, list) and value == value:
        assert error.value == value


BROKEN_IN_ONE = [
    ("original", "text_config.sconv_kernel_size", 3, "from 4 to 4"),
    ("original", "text_config.intermediate_size", 0, "at least 1"),
    ("original", "text_config.dense_intermediate_size", 0, "at least 1"),
    ("original", "text_config.model_max_length", 0, "at least 1"),
    ("original", "text_config.local_layer_ids", REMOVED, "required"),
    ("original", "text_config.dense_mlp_idx", REMOVED, "required"),
    ("original", "mtp_config.num_nextn_predict_layers", -1, "at least 0"),
    ("original", "mtp_config.local_layer_ids", [3], "from 0 to 2"),
    ("original", "mtp_config.local_layer_ids", [1, 1], "unique"),
    ("original", "mtp_config.chain_hidden_post_norm", "no", "true or false"),
    ("original", "mtp_config.local_extent", 12, "from 11 to 11"),
    ("original", "text_config.num_mtp_layers", 2, "must say the same as num_nextn_predict_layers = 3"),
    ("transformers", "text_config.conv_kernel_size", 5, "from 4 to 4"),
    ("transformers", "text_config.intermediate_size", 0, "at least 1"),
    ("transformers", "text_config.moe_intermediate_size", 0, "at least 1"),
    ("transformers", "text_config.max_position_embeddings", REMOVED, "required"),
    ("transformers", "text_config.num_mtp_layers", 1.5, "must be an integer"),
    ("transformers", "text_config.mtp_local_layer_ids", [0, 3], "from 0 to 2"),
    ("transformers", "text_config.layer_types", ["hybrid"] * 3, "list of 4 names"),
    ("transformers", "text_config.layer_types", ["hybrid"] * 3 + ["linear"], "'hybrid' or 'hybrid_sliding'"),
    ("transformers", "text_config.mlp_layer_types", ["dense"] * 3 + ["moe"], "'sparse' or 'dense'"),
    ("transformers", "text_config.local_layer_ids", [0], "layer_types"),
    ("transformers", "text_config.dense_mlp_idx", 2, "mlp_layer_types"),
    ("original", "model_type", "inkling2", "inkling_mm_model"),
    ("original", "model_type", REMOVED, "inkling_mm_model"),
    ("original", "text_config", [], "JSON object"),
    ("original", "mtp_config", [1], "JSON object"),
    ("original", "tie_word_embeddings", True, "must be False"),
    ("original", "eos_token_id", 256, "from 0 to 255"),
    ("original", "eos_token_id", [1, "2"], "from 0 to 255"),
    ("transformers", "quantization_config", {}, "NVFP4"),
]


@pytest.mark.parametrize(("spelling", "key", "value", "rule"), BROKEN_IN_ONE)
def test_rules_of_one_spelling(tmp_path, spelling, key, value, rule):
    write(tmp_path, spelling, {key: value})
    error = refusal(tmp_path)
    assert error.file == str(tmp_path / "config.json")
    assert rule in str(error)
    assert key.rpartition(".")[2] in str(error)


def test_kv_heads_must_divide_the_hidden_size(tmp_path, spelling):
    write(tmp_path, spelling, {"text_config.num_attention_heads": 6, "text_config.num_key_value_heads": 3})
    assert "must divide hidden_size = 64" in refusal(tmp_path).rule


def test_spellings_of_one_key_must_agree(tmp_path):
    write(tmp_path, "original", {"text_config.conv_kernel_size": 4, "text_config.max_position_embeddings": 9})
    error = refusal(tmp_path)
    assert (error.key, error.value) == ("text_config.max_position_embeddings", 9)
    assert "must equal model_max_length = 4096" in error.rule


def test_a_width_of_experts_beside_a_dense_width_is_the_original_spelling(tmp_path):
    """As transformers and vLLM read such a file."""
    write(tmp_path, "original", {"text_config.moe_intermediate_size": 999})
    config = ModelConfig.from_dir(tmp_path)
    assert (config.format, config.dense_ffn, config.expert_ffn) == ("original", 96, 32)


def test_original_spelling_without_dense_width_has_one_width(tmp_path):
    write(tmp_path, "original", {"text_config.dense_intermediate_size": REMOVED})
    config = ModelConfig.from_dir(tmp_path)
    assert (config.format, config.dense_ffn, config.expert_ffn) == ("original", 32, 32)


def test_defaults_of_transformers_fill_its_own_spelling(tmp_path):
    removed = ("layer_types", "mlp_layer_types", "mtp_local_layer_ids", "unpadded_vocab_size")
    write(tmp_path, "transformers", {f"text_config.{key}": REMOVED for key in removed})
    config = ModelConfig.from_dir(tmp_path)
    assert config.layer_is_local == (True,) * 4  # every sixth layer is full
    assert config.layer_is_dense == (False,) * 4
    assert config.mtp_is_local == (False,) * 3
    assert config.vocab_size == 256


def test_config_of_transformers_itself_is_read(tmp_path):
    """The file that transformers writes after reading the original spelling."""
    transformers = pytest.importorskip("transformers")
    write(tmp_path, "original", {})
    original = ModelConfig.from_dir(tmp_path)
    transformers.InklingConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    config = ModelConfig.from_dir(tmp_path / "again")
    assert config.format == "transformers"
    assert config == tiny_config(format="transformers") and original == tiny_config()
    transformers.InklingConfig.from_pretrained(tmp_path).text_config.save_pretrained(tmp_path / "text")
    text = ModelConfig.from_dir(tmp_path / "text")
    assert text.mtp_is_local == config.mtp_is_local
    assert text.eos_token_ids == (2,)  # the default of the transformers text config


def test_absent_log_scaling_is_a_factor_of_one(tmp_path, spelling):
    write(tmp_path, spelling, {"text_config.log_scaling_n_floor": None})
    assert ModelConfig.from_dir(tmp_path).log_scaling_alpha == 0


def test_no_mtp_config_means_no_depths(tmp_path):
    write(tmp_path, "original", {"mtp_config": None})
    config = ModelConfig.from_dir(tmp_path)
    assert (config.mtp_depths, config.mtp_is_local, config.mtp_chain_norm) == (0, (), False)


def test_end_ids_come_from_the_top_level_then_the_generation_config_then_the_text_config(tmp_path):
    write(tmp_path, "transformers", {"eos_token_id": REMOVED, "text_config.eos_token_id": 2})
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (5, 6)
    write(tmp_path, "transformers", {"eos_token_id": 7, "text_config.eos_token_id": 2})
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (7,)


def test_quantisation_beside_the_config_is_refused(tmp_path):
    write(tmp_path, "original", {})
    file = tmp_path / "hf_quant_config.json"
    file.write_text('{"quantization": {"quant_algo": "NVFP4", "group_size": 16}}')
    error = refusal(tmp_path)
    assert (error.file, error.value) == (str(file), "NVFP4")


@pytest.mark.parametrize(
    ("text", "rule"), [("{", "readable JSON"), ("[]", "JSON object"), (None, "every checkpoint has one")]
)
def test_an_unreadable_config_is_refused(tmp_path, text, rule):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert rule in refusal(tmp_path).rule

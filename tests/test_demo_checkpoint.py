"""The shipped checkpoint's files are whole and small, and its data rules hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from demo.corpus import END_OF_TEXT, is_permissive

DEMO = Path(__file__).resolve().parent.parent / "demo"
CHECKPOINT = DEMO / "checkpoint"
MIB = 2**20


def test_index_lists_exactly_the_tensors_of_at_least_two_shards_and_the_mtp_file():
    listed = json.loads((CHECKPOINT / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for file in CHECKPOINT.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= dict.fromkeys(tensors.keys(), file.name)
    assert found == listed
    assert len(set(listed.values()) - {"mtp.safetensors"}) >= 2
    assert all((file == "mtp.safetensors") == name.startswith("model.mtp.") for name, file in listed.items())


def test_files_stay_within_the_size_bounds():
    sizes = [file.stat().st_size for file in CHECKPOINT.iterdir()]
    assert max(sizes) <= 16 * MIB
    assert sum(sizes) <= 48 * MIB


def test_gate_bias_and_global_scales_are_not_left_at_their_start_values():
    listed = json.loads((CHECKPOINT / "model.safetensors.index.json").read_text())["weight_map"]
    names = [name for name in listed if name.endswith(("gate.bias", "global_scale"))]
    assert len(names) == 4 + 4 + 2 + 4  # gate biases, gate scales, dense trunk layers, depths
    for name in names:
        with safe_open(CHECKPOINT / listed[name], "pt") as tensors:
            value = tensors.get_tensor(name)
        assert (value != (0 if name.endswith("bias") else 1)).any(), name


def test_tokenizer_covers_the_unpadded_vocabulary_and_ends_with_the_configured_id():
    config = json.loads((CHECKPOINT / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    text = config["text_config"]
    assert tokenizer.get_vocab_size() == text["unpadded_vocab_size"] < text["vocab_size"]
    assert tokenizer.token_to_id(END_OF_TEXT) == config["eos_token_id"]


def test_prompts_have_30_to_200_tokens_and_survive_the_tokenizer():
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    prompts = json.loads((DEMO / "prompts.json").read_text())
    assert len(prompts) == 40
    for prompt in prompts:
        ids = tokenizer.encode(prompt["text"]).ids
        assert 30 <= len(ids) <= 200
        assert tokenizer.decode(ids) == prompt["text"]


@pytest.mark.parametrize(
    "licence", ["MIT", "BSD License", "Apache-2.0 AND MIT", "Apache Software License", "MIT AND PSF-2.0"]
)
def test_permissive_statements_are_accepted(licence):
    assert is_permissive(licence)


@pytest.mark.parametrize(
    "licence", ["unknown", "", "MPL-2.0 AND MIT", "GPL-3.0-only", "LGPLv2+", "Proprietary", "MIT OR GPL-2.0", "AND"]
)
def test_copyleft_unknown_and_mixed_statements_are_refused(licence):
    assert not is_permissive(licence)

"""Random checkpoints: what transformers makes of them, and that they are worth testing with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from inkling.check import check_checkpoint
from inkling.config import AttentionGeometry, ModelConfig
from inkling.model.weights import MoEWeights, load_target
from inkling.tensors import MTP, Naming
from inkling.testing import random_tensors, rename, tiny_config, write_random_checkpoint
from tests.checkpoint_files import CHAINED, assert_equal_bits, edit


def as_transformers_reads_it(directory: Path):
    transformers = pytest.importorskip("transformers")
    model, loading = transformers.InklingForConditionalGeneration.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    missing = [key for key in loading["missing_keys"] if "_tower." not in key]
    assert not missing and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    return model


@pytest.mark.parametrize("format", ["original", "transformers"])
def test_transformers_reads_the_same_state(tmp_path, format):
    """transformers' own renaming and de-interleaving against ours, target and depths."""
    config = write_random_checkpoint(tmp_path, CHAINED, format=format, shards=2)
    model = as_transformers_reads_it(tmp_path)
    from transformers.modeling_layers import MtpModel

    state = {name: value for name, value in model.state_dict().items() if "_tower." not in name}
    mtp = MtpModel.from_pretrained(model).state_dict()
    state |= {MTP + name: value for name, value in mtp.items() if name.startswith(("layers.", "shared_post"))}
    stored = random_tensors(config, 0, torch.bfloat16)
    expected = rename(stored, config, Naming.TRANSFORMERS)
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value.float()), name


def test_what_transformers_saves_loads_the_same(tmp_path):
    write_random_checkpoint(tmp_path / "ours", tiny_config(mtp_depths=0, mtp_is_local=()))
    model = as_transformers_reads_it(tmp_path / "ours").to(torch.bfloat16)
    expected = load_target(
        tmp_path / "ours", ModelConfig.from_dir(tmp_path / "ours"), dtype=torch.float32, device="cpu"
    )
    for layer in expected.layers:
        if isinstance(layer.mlp, MoEWeights):  # stored in fp32 by us, in bf16 by the model above
            layer.mlp.gate_bias = layer.mlp.gate_bias.bfloat16().float()
            layer.mlp.global_scale = float(torch.tensor(layer.mlp.global_scale).bfloat16())
    for original_names in (True, False):
        directory = tmp_path / str(original_names)
        model.save_pretrained(directory, save_original_format=original_names)
        (problem,) = check_checkpoint(directory).problems
        assert "towers are not supported yet" in problem.rule
        without_towers(directory)
        config = ModelConfig.from_dir(directory)
        assert_equal_bits(load_target(directory, config, dtype=torch.float32, device="cpu"), expected)


def without_towers(directory: Path) -> None:
    marks = ("visual", "audio", "vision_tower", "audio_tower")

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.split(".")[1] in marks]:
            del tensors[name]

    edit(directory, change)


@pytest.mark.parametrize("seed", [0, 1])
def test_random_tensors_depend_on_the_seed_alone(seed):
    one, other = random_tensors(CHAINED, seed), random_tensors(CHAINED, seed)
    assert all(torch.equal(one[name], other[name]) for name in one)
    name = "model.llm.norm.weight"
    assert not torch.equal(one[name], random_tensors(CHAINED, seed + 2)[name])


def test_random_tensors_are_nowhere_neutral():
    tensors = random_tensors(CHAINED, seed=0)
    for name, value in tensors.items():
        assert value.std() > 0.05 if value.numel() > 1 else value.item() != 1, name


@pytest.mark.parametrize("format", ["original", "transformers"])
def test_logits_of_random_checkpoints_are_spread(tmp_path, format):
    local = AttentionGeometry(num_heads=6, num_kv_heads=2, head_dim=16, rel_extent=5, window=5)
    for seed, config in enumerate((tiny_config(), tiny_config(local=local, num_experts_per_token=3))):
        write_random_checkpoint(tmp_path / str(seed), config, seed=seed, format=format, mtp_file=False)
        model = as_transformers_reads_it(tmp_path / str(seed))
        ids = torch.randint(0, 251, (1, 40), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0]
        assert 1.0 < logits.std() < 3.0
        assert logits.argmax(-1).unique().numel() > 20  # many continuations, none that rules all


def test_tokenizer_has_exactly_the_pieces_of_the_vocabulary(tmp_path):
    from tokenizers import Tokenizer

    for vocab_size in (251, 300, 4096):
        config = tiny_config(vocab_size=vocab_size, padded_vocab_size=4096)
        write_random_checkpoint(tmp_path, config, tokenizer=True)
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        assert tokenizer.get_vocab_size() == vocab_size
        ids = tokenizer.encode("def f(x): return x + 1<|eos|>").ids
        assert ids[-1] == config.eos_token_ids[0] and max(ids) < vocab_size
        assert tokenizer.decode(ids) == "def f(x): return x + 1"

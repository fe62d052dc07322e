"""Files, index and completeness: what a broken checkpoint is told."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inkling.check import check_checkpoint
from inkling.checkpoint import INDEX_FILE, Checkpoint
from inkling.errors import CheckpointError
from inkling.model.weights import load_draft, load_target
from inkling.tensors import draft_tensors
from inkling.testing import random_tensors, write_random_checkpoint, write_tensors
from tests.checkpoint_files import CHAINED, assert_equal_bits, edit, load


@pytest.mark.parametrize("format", ["original", "transformers"])
def test_each_missing_tensor_is_named(tmp_path, format):
    """Every tensor of the table in turn, by header alone."""
    config = write_random_checkpoint(tmp_path, CHAINED, format=format, mtp_file=False)
    whole = Checkpoint(tmp_path)
    assert whole.problems(config) == []
    for name, stored in list(whole.tensors.items()):
        del whole.tensors[name]
        (problem,) = whole.problems(config)
        assert (problem.key, problem.value) == (name, None) and str(stored.shape) in problem.rule
        whole.tensors[name] = stored


def test_each_mis_shaped_tensor_is_named_with_both_shapes(tmp_path):
    config = write_random_checkpoint(tmp_path, CHAINED)
    whole = Checkpoint(tmp_path)
    for name, stored in list(whole.tensors.items()):
        whole.tensors[name] = dataclasses.replace(stored, shape=(*stored.shape[:-1], stored.shape[-1] + 1))
        (problem,) = whole.problems(config)
        assert (problem.file, problem.key) == (str(stored.file), name)
        assert problem.value == whole.tensors[name].shape and str(stored.shape) in problem.rule
        whole.tensors[name] = stored


NORM = "model.llm.norm.weight"
EXPERTS = "model.llm.layers.2.mlp.experts.w13_weight"
DEPTH_BIASES = "model.mtp.layers.1.transformer_block.attn.rel_logits_proj.proj"

BREAKS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str, str]] = {
    "missing": (lambda t: t.pop("model.llm.norm.weight"), "model.llm.norm.weight", "it is missing"),
    "surplus": (lambda t: t.update(x=torch.zeros(3)), "x", "it is surplus"),
    "surplus layer": (
        lambda t: t.update({"model.llm.layers.4.attn_norm.weight": torch.zeros(64)}),
        "model.llm.layers.4.attn_norm.weight",
        "it is surplus",
    ),
    "transposed": (
        lambda t: t.update({"model.llm.embed.weight": t["model.llm.embed.weight"].T.contiguous()}),
        "model.llm.embed.weight",
        "its shape must be (256, 64)",
    ),
    "integers": (
        lambda t: t.update({"model.llm.norm.weight": torch.ones(64, dtype=torch.int32)}),
        "model.llm.norm.weight",
        "its dtype must be BF16, F16 or F32",
    ),
    "towers": (
        lambda t: t.update({"model.visual.final_norm.weight": torch.ones(64)}),
        "model.visual.final_norm.weight",
        "towers are not supported yet (1 tensors)",
    ),
    "towers of transformers": (
        lambda t: t.update({"model.audio_tower.norm.weight": torch.ones(64)}),
        "model.audio_tower.norm.weight",
        "towers are not supported yet",
    ),
    "NVFP4": (
        lambda t: t.update({EXPERTS: torch.zeros(8, 64, 32, dtype=torch.uint8)}),
        EXPERTS,
        "NVFP4 is not supported yet (1 tensors)",
    ),
    "NVFP4 scales": (
        lambda t: t.update({EXPERTS + ".scale2": torch.zeros(8)}),
        EXPERTS + ".scale2",
        "NVFP4 is not supported yet",
    ),
}


@pytest.mark.parametrize(("change", "key", "rule"), BREAKS.values(), ids=BREAKS)
def test_target_refuses_what_check_reports(tmp_path, change, key, rule):
    config = write_random_checkpoint(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(CheckpointError) as raised:
        load_target(tmp_path, config, dtype=torch.float32, device="cpu")
    report = check_checkpoint(tmp_path)
    for problem in (raised.value, *report.problems):
        assert problem.key == key and rule in problem.rule
    assert len(report.problems) == 1 and not report.ok
    load_draft(tmp_path, config, 3, dtype=torch.float32, device="cpu")  # not its concern


MTP_BREAKS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "a norm is missing": (lambda t: t.pop("model.mtp.layers.2.hidden_norm.weight"), "it is missing"),
    "chain norm without the flag": (
        lambda t: t.update({"model.mtp.chain_norm.weight": torch.ones(64)}),
        "chain_hidden_post_norm is false",
    ),
    "chain norm of transformers without the flag": (
        lambda t: t.update({"model.mtp.shared_post_norm.weight": torch.ones(64)}),
        "chain_hidden_post_norm is false",
    ),
    "a depth too many": (
        lambda t: t.update({"model.mtp.layers.3.hidden_norm.weight": torch.ones(64)}),
        "(3 MTP depths)",
    ),
    "local geometry on a full depth": (
        lambda t: t.update({DEPTH_BIASES: torch.ones(16, 11)}),
        "its shape must be (16, 24)",
    ),
}


@pytest.mark.parametrize(("change", "rule"), MTP_BREAKS.values(), ids=MTP_BREAKS)
def test_draft_refuses_incomplete_depths_even_unused_ones(tmp_path, change, rule):
    config = write_random_checkpoint(tmp_path)
    edit(tmp_path, change, "mtp.safetensors")
    with pytest.raises(CheckpointError) as raised:
        load_draft(tmp_path, config, 1, dtype=torch.float32, device="cpu")
    assert rule in raised.value.rule
    load_target(tmp_path, config, dtype=torch.float32, device="cpu")  # not its concern


def test_a_chain_norm_that_the_flag_promises_must_exist(tmp_path):
    config = write_random_checkpoint(tmp_path, CHAINED)
    edit(tmp_path, lambda tensors: tensors.pop("model.mtp.chain_norm.weight"), "mtp.safetensors")
    with pytest.raises(CheckpointError, match="chain_norm.weight is None; it is missing"):
        load_draft(tmp_path, config, 3, dtype=torch.float32, device="cpu")


def test_draft_needs_the_embedding_norm_of_the_target(tmp_path):
    config = write_random_checkpoint(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("model.llm.embed_norm.weight"))
    with pytest.raises(CheckpointError, match="model.llm.embed_norm.weight"):
        load_draft(tmp_path, config, 3, dtype=torch.float32, device="cpu")


def test_missing_mtp_file_is_found(tmp_path):
    config = write_random_checkpoint(tmp_path)
    (tmp_path / "mtp.safetensors").unlink()
    load_target(tmp_path, config, dtype=torch.float32, device="cpu")
    assert len(check_checkpoint(tmp_path).problems) == len(draft_tensors(config)) == 60


def test_copies_that_transformers_writes_beside_the_depths_are_passed_over(tmp_path):
    write_random_checkpoint(tmp_path, format="transformers")
    copies = ("model.mtp.embed_tokens.weight", "model.mtp.shared_head.weight")
    edit(tmp_path, lambda t: t.update({name: torch.zeros(256, 64) for name in copies}), "mtp.safetensors")
    assert check_checkpoint(tmp_path).ok
    load(tmp_path)


def test_depths_may_be_named_otherwise_than_the_target(tmp_path):
    """transformers does not rewrite the depths: its checkpoints keep the original ``mtp.safetensors``."""
    config = write_random_checkpoint(tmp_path, CHAINED, format="transformers")
    write_random_checkpoint(tmp_path / "original", CHAINED)
    (tmp_path / "original" / "mtp.safetensors").replace(tmp_path / "mtp.safetensors")
    target, draft = load(tmp_path)
    assert len(target.layers) == config.num_layers and len(draft.depths) == 3
    assert check_checkpoint(tmp_path).ok


def test_transformers_config_beside_original_names_loads(tmp_path):
    """What transformers' save_pretrained writes."""
    config = dataclasses.replace(CHAINED, format="transformers")
    write_random_checkpoint(tmp_path / "plain", CHAINED)
    write_random_checkpoint(tmp_path / "mixed", config, format="transformers", mtp_file=False)
    tensors = random_tensors(config, 0, torch.bfloat16)
    write_tensors(tmp_path / "mixed", tensors, shards=1, mtp_file=False)
    assert_equal_bits(load(tmp_path / "mixed"), load(tmp_path / "plain"))


def test_depths_in_a_file_that_the_index_does_not_list_are_found(tmp_path):
    write_random_checkpoint(tmp_path, shards=2)
    index = tmp_path / INDEX_FILE
    values = json.loads(index.read_text())
    values["weight_map"] = {k: v for k, v in values["weight_map"].items() if v != "mtp.safetensors"}
    index.write_text(json.dumps(values))
    assert check_checkpoint(tmp_path).ok
    load(tmp_path)


def change_index(directory: Path, change: Callable[[dict[str, object]], object]) -> None:
    index = directory / INDEX_FILE
    values = json.loads(index.read_text())
    change(values["weight_map"])
    index.write_text(json.dumps(values))


INDEX_BREAKS: dict[str, tuple[Callable[[dict[str, object]], object], str]] = {
    "unlisted tensor": (lambda m: m.pop(NORM), "which holds the tensor"),
    "listed in the wrong file": (lambda m: m.update({NORM: "mtp.safetensors"}), "which holds the tensor"),
    "listed and absent": (lambda m: m.update(x="mtp.safetensors"), "that file does not hold it"),
    "absent file": (lambda m: m.update(x="model-9.safetensors"), "it is listed and does not exist"),
    "file elsewhere": (lambda m: m.update(x="../model.safetensors"), "without a folder"),
    "no file name": (lambda m: m.update(x=3), "must be a file name"),
    "empty": (lambda m: m.clear(), "must map tensor names to file names"),
}


@pytest.mark.parametrize(("change", "rule"), INDEX_BREAKS.values(), ids=INDEX_BREAKS)
def test_an_index_that_contradicts_the_files_is_refused(tmp_path, change, rule):
    config = write_random_checkpoint(tmp_path, shards=2)
    change_index(tmp_path, change)
    with pytest.raises(CheckpointError) as raised:
        load_target(tmp_path, config, dtype=torch.float32, device="cpu")
    assert rule in raised.value.rule and raised.value.file == str(tmp_path / INDEX_FILE)
    assert rule in check_checkpoint(tmp_path).render()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_unreadable_index_is_refused(tmp_path, text):
    write_random_checkpoint(tmp_path, shards=2)
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match="weight_map"):
        Checkpoint(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    write_random_checkpoint(tmp_path)
    edit(tmp_path, lambda t: t.update({NORM: torch.ones(64)}), "mtp.safetensors")
    (problem,) = check_checkpoint(tmp_path).problems
    assert problem.key == NORM and "it is stored in model" in problem.rule


def test_a_truncated_file_is_refused(tmp_path):
    write_random_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    with open(file, "r+b") as handle:
        handle.truncate(file.stat().st_size - 1)
    (problem,) = check_checkpoint(tmp_path).problems
    assert problem.file == str(file) and "whole safetensors file" in problem.rule


def test_a_folder_without_weights_is_refused(tmp_path):
    write_random_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (problem,) = check_checkpoint(tmp_path).problems
    assert "must hold model.safetensors or model.safetensors.index.json" in problem.rule


def test_an_index_beside_a_single_file_is_ambiguous(tmp_path):
    write_random_checkpoint(tmp_path, shards=2)
    write_random_checkpoint(tmp_path, mtp_file=False)
    with pytest.raises(CheckpointError, match="remove one of them"):
        Checkpoint(tmp_path)


def test_check_lists_every_problem_and_load_counts_them(tmp_path):
    config = write_random_checkpoint(tmp_path)

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[NORM], tensors["model.llm.layers.0.mlp.global_scale"]
        tensors["x"] = torch.zeros(1)

    edit(tmp_path, change)
    edit(tmp_path, lambda tensors: tensors.pop("model.mtp.layers.0.input_proj.weight"), "mtp.safetensors")
    report = check_checkpoint(tmp_path)
    keys = {NORM, "model.llm.layers.0.mlp.global_scale", "x", "model.mtp.layers.0.input_proj.weight"}
    assert {problem.key for problem in report.problems} == keys and len(report.problems) == 4
    assert all(key in report.render() for key in keys) and "has 4 problems" in report.render()
    with pytest.raises(CheckpointError, match="2 more: inkling check"):
        load_target(tmp_path, config, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("format", ["original", "transformers"])
def test_check_counts_parameters_and_bytes_by_part(tmp_path, format):
    config = write_random_checkpoint(tmp_path, CHAINED, format=format)
    report = check_checkpoint(tmp_path)
    tensors = random_tensors(config, 0, torch.bfloat16)
    assert report.parameters == sum(value.numel() for value in tensors.values())
    assert report.num_bytes == sum(value.nbytes for value in tensors.values())
    parts = {part.name: part for part in report.parts}
    assert parts["head"].parameters == 256 * 64
    assert parts["routed experts"].parameters == 3 * 8 * (64 * 64 + 64 * 32)
    assert parts["dense MLPs"].parameters == 192 * 64 + 64 * 96 + 1
    assert parts["routers"].num_bytes == 3 * (10 * 64 * 2 + 8 * 4 + 4)
    assert [name for name in parts if name.startswith("depth")] == [
        "depth 0 (local)", "depth 1 (full)", "depth 2 (local)",
    ]  # fmt: skip
    text = report.render()
    assert f"{report.num_bytes:,}" in text and text.endswith("is complete")


def test_check_reports_a_broken_config_without_looking_further(tmp_path):
    write_random_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    report = check_checkpoint(tmp_path)
    assert not report.ok and report.config is None and report.parts == ()
    assert "model_type is None" in report.render() and "has 1 problem" in report.render()

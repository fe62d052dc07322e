"""Fused weights: the same bits from every way of storing them, and nothing read that is not needed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inkling import checkpoint as checkpoint_module
from inkling.check import check_checkpoint
from inkling.checkpoint import Checkpoint
from inkling.errors import CheckpointError
from inkling.model.weights import MoEWeights, load_draft, load_target
from inkling.tensors import MTP, target_tensors
from inkling.testing import random_tensors, tiny_config, write_random_checkpoint
from tests.checkpoint_files import CHAINED, assert_equal_bits, edit, leaves, load

WAYS = {
    "original": {},
    "original, text only": {"text_only": True},
    "original, shards": {"shards": 3},
    "original, depths among the shards": {"shards": 3, "mtp_file": False},
    "original, one file": {"mtp_file": False},
    "transformers": {"format": "transformers"},
    "transformers, shards": {"format": "transformers", "shards": 2, "mtp_file": False},
    "transformers, text only": {"format": "transformers", "text_only": True},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_of_storing_gives_the_same_weights(tmp_path, way):
    write_random_checkpoint(tmp_path / "plain", CHAINED)
    write_random_checkpoint(tmp_path / "other", CHAINED, **way)
    assert_equal_bits(load(tmp_path / "other"), load(tmp_path / "plain"))
    assert check_checkpoint(tmp_path / "other").ok


def test_rows_are_fused_in_the_stated_order(tmp_path):
    config = write_random_checkpoint(tmp_path, CHAINED, dtype=torch.float32)
    stored = random_tensors(config, seed=0)
    target, draft = load(tmp_path)
    layer, prefix = target.layers[1], "model.llm.layers.1."
    names = ("wq_du", "wk_dv", "wv_dv", "wr_du")
    assert torch.equal(layer.attn.qkvr, torch.cat([stored[f"{prefix}attn.{n}.weight"] for n in names]))
    assert torch.equal(layer.attn.k_conv, stored[prefix + "attn.k_sconv.weight"][:, 0])
    assert torch.equal(layer.attn.rel_proj, stored[prefix + "attn.rel_logits_proj.proj"])
    assert isinstance(layer.mlp, MoEWeights)
    experts = stored[prefix + "mlp.experts.w13_weight"]
    assert torch.equal(layer.mlp.w13, torch.cat([experts[:, 0::2], experts[:, 1::2]], dim=1))
    shared = stored[prefix + "mlp.shared_experts.shared_w13_weight"]
    assert torch.equal(layer.mlp.shared_w13, torch.cat([shared[:, 0::2], shared[:, 1::2]], dim=1))
    assert layer.mlp.global_scale == stored[prefix + "mlp.gate.global_scale"].item()
    dense = stored["model.llm.layers.0.mlp.w13_dn.weight"]
    assert torch.equal(target.layers[0].mlp.w13, torch.cat([dense[0::2], dense[1::2]]))
    assert torch.equal(target.head, stored["model.llm.unembed.weight"][:251])
    assert torch.equal(target.embed, stored["model.llm.embed.weight"])
    depth = draft.depths[2]
    assert torch.equal(depth.input_proj, stored["model.mtp.layers.2.input_proj.weight"])
    taps = stored["model.mtp.layers.2.transformer_block.attn_sconv.weight"]
    assert torch.equal(depth.block.attn_conv, taps[:, 0])
    assert torch.equal(draft.chain_norm, stored["model.mtp.chain_norm.weight"])
    assert torch.equal(draft.backbone_embed_norm, stored["model.llm.embed_norm.weight"])


def test_every_stored_value_is_loaded_once(tmp_path):
    """Sums over all loaded and all stored elements agree, so nothing is dropped or read twice."""
    config = write_random_checkpoint(tmp_path, CHAINED, dtype=torch.float32)
    stored = random_tensors(config, seed=0)
    stored["model.llm.unembed.weight"] = stored["model.llm.unembed.weight"][:251]
    target, draft = load(tmp_path)
    draft.backbone_embed_norm = None  # the target's
    values = [torch.as_tensor(value).double().flatten() for _, value in leaves((target, draft))]
    loaded, expected = torch.cat(values), torch.cat([v.double().flatten() for v in stored.values()])
    assert torch.equal(loaded.sort().values, expected.sort().values)


def test_gate_bias_stays_fp32_when_all_else_is_bf16(tmp_path):
    write_random_checkpoint(tmp_path, dtype=torch.float32)
    target, _ = load(tmp_path, dtype=torch.bfloat16)
    assert target.layers[1].mlp.gate_bias.dtype == torch.float32
    others = [v for path, v in leaves(target) if isinstance(v, Tensor) and not path.endswith("gate_bias")]
    assert {value.dtype for value in others} == {torch.bfloat16}


def test_loaded_weights_outlive_the_files(tmp_path):
    write_random_checkpoint(tmp_path, dtype=torch.float32)
    target, draft = load(tmp_path)
    before = [value.clone() for _, value in leaves((target, draft)) if isinstance(value, Tensor)]
    for file in tmp_path.glob("*.safetensors"):
        with open(file, "r+b") as handle:  # in place: a view of the mapping would change with it
            handle.write(b"\xff" * file.stat().st_size)
    after = [value for _, value in leaves((target, draft)) if isinstance(value, Tensor)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_checkpoint_without_embedding_norm_loads(tmp_path):
    write_random_checkpoint(tmp_path, tiny_config(use_embed_norm=False))
    target, draft = load(tmp_path)
    assert target.embed_norm is None and draft.backbone_embed_norm is None


def test_progress_ends_at_the_bytes_of_the_files(tmp_path):
    config = write_random_checkpoint(tmp_path)
    calls = []
    options = {"dtype": torch.float32, "device": "cpu", "progress": lambda *call: calls.append(call)}
    load_target(tmp_path, config, **options)
    stored = sum(t.num_bytes for name, t in Checkpoint(tmp_path).tensors.items() if not name.startswith(MTP))
    done, totals, names = zip(*calls, strict=True)
    assert list(done) == sorted(set(done)) and done[-1] == stored and set(totals) == {stored}
    assert len(set(names)) == len(target_tensors(config))


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Names of all tensors whose data is read."""
    seen: list[str] = []
    original = checkpoint_module.safe_open

    class Recorder:
        def __init__(self, *args, **kwargs):
            self.handle = original(*args, **kwargs)

        def __getattr__(self, name):  # keys, get_slice (headers)
            assert name in ("keys", "get_slice"), f"reads data by {name}"
            return getattr(self.handle, name)

        def get_tensor(self, name):
            seen.append(name)
            return self.handle.get_tensor(name)

    monkeypatch.setattr(checkpoint_module, "safe_open", Recorder)
    return seen


@pytest.mark.parametrize("num_depths", [1, 2, 3])
def test_depths_beyond_those_used_are_not_read(tmp_path, reads, num_depths):
    config = write_random_checkpoint(tmp_path, CHAINED)
    load_draft(tmp_path, config, num_depths, dtype=torch.float32, device="cpu")
    depths = {name.split(".")[3] for name in reads if ".layers." in name}
    assert depths == {str(depth) for depth in range(num_depths)}
    assert len(reads) == 20 * num_depths + 2  # and the chain norm, and the target's embedding norm


def test_target_reads_no_depth(tmp_path, reads):
    config = write_random_checkpoint(tmp_path, mtp_file=False)
    load_target(tmp_path, config, dtype=torch.float32, device="cpu")
    assert not any(name.startswith(MTP) for name in reads)
    assert sorted(reads) == sorted(spec.key for spec in target_tensors(config))


def test_nothing_is_read_before_the_headers_are_found_right(tmp_path, reads):
    config = write_random_checkpoint(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("model.llm.unembed.weight"))
    reads.clear()
    with pytest.raises(CheckpointError):
        load_target(tmp_path, config, dtype=torch.float32, device="cpu")
    assert reads == []


@pytest.mark.parametrize("num_depths", [0, 4, -1])
def test_depths_that_the_checkpoint_does_not_have_are_refused(tmp_path, num_depths):
    config = write_random_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=f"MTP depths is 3; {num_depths} are asked for"):
        load_draft(tmp_path, config, num_depths, dtype=torch.float32, device="cpu")


def test_a_model_without_depths_serves_without_drafting(tmp_path):
    config = write_random_checkpoint(tmp_path, tiny_config(mtp_depths=0, mtp_is_local=()))
    assert check_checkpoint(tmp_path).ok
    load_target(tmp_path, config, dtype=torch.float32, device="cpu")
    with pytest.raises(CheckpointError, match="MTP depths is 0"):
        load_draft(tmp_path, config, 1, dtype=torch.float32, device="cpu")

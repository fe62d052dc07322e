"""The reference against transformers 5.23, and against itself where transformers has no say.

The target is compared as a whole. transformers' own MTP is not the trained model; it differs in three ways,
each of which is taken out of the comparison (seen on 5.23.0, ``modeling_layers.MtpModel``):

1. It feeds raw embedding rows to the depths: ``tie_with_main_model`` replaces the backbone's embedding norm
   by the identity. The tests hand it the normed embedding back, or take the norm out of the reference's
   depths.
2. Its sliding-window depths see every earlier key in passes of several rows (``create_masks_for_mtp_layer``
   maps ``hybrid_sliding`` to a plain causal mask). One row at a time its cache cuts to the window, so local
   depths are compared row by row and full ones in one pass.
3. Its full-attention depths take the attention temperature of position p + k + 1 (``MtpCache`` offsets
   queries by k + 1), the reference that of p. Below ``log_scaling_floor`` both are 1.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from inkling.config import AttentionGeometry, ModelConfig
from inkling.testing import random_tensors, tiny_config, write_random_checkpoint
from tests.reference import EntryLedger, Reference

TOLERANCE = 1e-5  # absolute, fp32, of logits with a standard deviation around 2 and of states around 1
IDS = random.Random(7).choices(range(251), k=40)  # longer than the windows, extents and floors below


def checkpoint(directory: Path, config: ModelConfig, seed: int = 0) -> tuple[Reference, dict[str, Tensor]]:
    """A random fp32 checkpoint on disk, and the reference that was given its tensors as read back."""
    config = write_random_checkpoint(directory, config, seed=seed, mtp_file=False, dtype=torch.float32)
    tensors = load_file(directory / "model.safetensors")
    return Reference(tensors, config), tensors


def load_transformers(directory: Path):
    """The checkpoint as transformers reads it. Its towers, absent from the file, become tiny and random."""
    from transformers import InklingConfig, InklingForConditionalGeneration
    from transformers.models.inkling.configuration_inkling import InklingAudioConfig, InklingVisionConfig

    config = InklingConfig.from_pretrained(directory)
    width = config.text_config.hidden_size
    config.vision_config = InklingVisionConfig(
        text_hidden_size=width, patch_size=2, temporal_patch_size=2, num_channels=1, num_hidden_layers=3
    )
    config.audio_config = InklingAudioConfig(text_hidden_size=width, n_mel_bins=1, mel_vocab_size=2)
    config._attn_implementation = "eager"  # the one that keeps the position bias
    model, loading = InklingForConditionalGeneration.from_pretrained(
        directory, config=config, dtype=torch.float32, output_loading_info=True
    )
    missing = [key for key in loading["missing_keys"] if "_tower." not in key]
    assert not missing and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    return model.eval()


def load_transformers_mtp(model):
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    return MtpModel.from_pretrained(model).eval(), MtpCache(config=model.config.get_mtp_config())


def max_difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


TARGETS = {
    "no dense layer": tiny_config(layer_is_dense=(False,) * 4),
    "one dense layer": tiny_config(),
    "two dense layers": tiny_config(layer_is_dense=(True, True, False, False)),
    "more local heads, narrow": tiny_config(
        full=AttentionGeometry(num_heads=2, num_kv_heads=2, head_dim=32, rel_extent=9, window=None),
        local=AttentionGeometry(num_heads=6, num_kv_heads=2, head_dim=8, rel_extent=5, window=5),
        log_scaling_floor=4.0,
        mup_multiplier=3.0,
        route_scale=8.0,
    ),
    "more full heads, window 2": tiny_config(
        full=AttentionGeometry(num_heads=8, num_kv_heads=1, head_dim=8, rel_extent=3, window=None),
        local=AttentionGeometry(num_heads=2, num_kv_heads=1, head_dim=16, rel_extent=2, window=2),
        log_scaling_floor=1.0,
        num_experts=5,
        num_experts_per_token=3,
        num_shared_experts=1,
        rms_norm_eps=1e-3,
    ),
}


@pytest.mark.parametrize("name", TARGETS)
@torch.no_grad()
def test_target_equals_transformers(name, tmp_path):
    reference, _ = checkpoint(tmp_path, TARGETS[name], seed=len(name))
    model = load_transformers(tmp_path)
    for length in (1, 2, 3, 4, 40):
        ids = IDS[:length]
        hidden, logits = reference.target(ids)
        batch = torch.tensor([ids])
        their_hidden = model.model(input_ids=batch, use_cache=False).last_hidden_state
        their_logits = model(input_ids=batch, use_cache=False).logits
        assert max_difference(hidden, their_hidden[0]) <= TOLERANCE
        assert max_difference(logits, their_logits[0]) <= TOLERANCE


@torch.no_grad()
def test_double_precision_confirms_single(tmp_path):
    single, tensors = checkpoint(tmp_path, tiny_config())
    double = Reference(tensors, single.config, dtype=torch.float64)
    hidden, logits = double.target(IDS)
    assert hidden.dtype == logits.dtype == torch.float64
    assert max_difference(logits, single.target(IDS)[1].double()) <= TOLERANCE
    _, drafted = double.depth(0, hidden[:-1], IDS[1:])
    assert max_difference(drafted, single.depth(0, hidden[:-1], IDS[1:])[1].double()) <= TOLERANCE


def test_every_tensor_matters():
    """A changed tensor moves the logits far beyond the tolerance: no comparison is blind to one."""
    config = tiny_config(mtp_chain_norm=True)
    tensors = random_tensors(config, seed=3)

    def outputs(changed: dict[str, Tensor]) -> Tensor:
        reference = Reference(changed, config)
        hidden, logits = reference.target(IDS[:20])
        rows = [logits]
        for k in range(config.mtp_depths):
            hidden, logits = reference.depth(k, hidden, IDS[k + 1 : k + 21])
            rows.append(logits)
        return torch.cat(rows)

    before = outputs(tensors)
    for name, tensor in tensors.items():
        skewed = tensor * torch.linspace(0.5, 1.5, tensor.numel()).view(tensor.shape)
        assert max_difference(before, outputs({**tensors, name: skewed})) > 100 * TOLERANCE, name


LOW_TEMPERATURE = {"log_scaling_floor": 4096.0}  # tau is 1 in every depth: difference 3


@torch.no_grad()
def test_full_attention_depths_equal_transformers_in_one_pass(tmp_path):
    config = tiny_config(mtp_is_local=(False,) * 3, **LOW_TEMPERATURE)
    reference, _ = checkpoint(tmp_path, config)
    model = load_transformers(tmp_path)
    mtp, cache = load_transformers_mtp(model)
    mtp.embed_tokens = model.get_input_embeddings()  # difference 1
    hidden = model.model(input_ids=torch.tensor([IDS[:30]]), use_cache=False).last_hidden_state
    for k in range(3):
        ids = IDS[k + 1 : k + 31]
        theirs = mtp.forward_layer(k, hidden, None, cache, input_ids=torch.tensor([ids]))
        ours, logits = reference.depth(k, hidden[0], ids)
        assert max_difference(ours, theirs[0]) <= TOLERANCE
        assert max_difference(logits, mtp._project_to_logits(theirs)[0]) <= TOLERANCE
        hidden = theirs


@pytest.mark.parametrize("chain_norm", [False, True], ids=["no chain norm", "chain norm"])
@torch.no_grad()
def test_all_depths_equal_transformers_row_by_row(chain_norm, tmp_path):
    config = tiny_config(mtp_is_local=(True, False, True), mtp_chain_norm=chain_norm, **LOW_TEMPERATURE)
    reference, _ = checkpoint(tmp_path, config)
    model = load_transformers(tmp_path)
    mtp, cache = load_transformers_mtp(model)
    mtp.embed_tokens = model.get_input_embeddings()  # difference 1
    hidden = model.model(input_ids=torch.tensor([IDS[:30]]), use_cache=False).last_hidden_state
    for k in range(3):
        ids = torch.tensor([IDS[k + 1 : k + 31]])
        rows = [(hidden[:, p : p + 1], ids[:, p : p + 1]) for p in range(30)]
        theirs = torch.cat([mtp.forward_layer(k, h, None, cache, input_ids=i) for h, i in rows], dim=1)
        ours, _ = reference.depth(k, hidden[0], ids[0].tolist())
        assert max_difference(ours, theirs[0]) <= TOLERANCE
        hidden = theirs


@torch.no_grad()
def test_greedy_drafts_equal_transformers_without_the_backbone_norm(tmp_path):
    config = tiny_config(mtp_is_local=(False,) * 3, **LOW_TEMPERATURE)
    reference, tensors = checkpoint(tmp_path, config)
    model = load_transformers(tmp_path)
    mtp, cache = load_transformers_mtp(model)
    raw = Reference(tensors, dataclasses.replace(config, use_embed_norm=False))  # difference 1
    raw.target = reference.target  # transformers takes the norm from the depths alone
    hidden = model.model(input_ids=torch.tensor([IDS[:20]]), use_cache=False).last_hidden_state
    theirs, _, _ = mtp(torch.tensor([IDS[1:21]]), hidden, None, torch.arange(1, 21)[None], cache)
    assert raw.greedy_drafts(IDS[:21], 3) == theirs[0].tolist()
    assert reference.greedy_drafts(IDS[:21], 3) != theirs[0].tolist()


@pytest.fixture(scope="module")
def tiny() -> Reference:
    return Reference(random_tensors(tiny_config(), seed=1), tiny_config())


def test_temperature_of_a_depth_is_that_of_the_entry_position(tiny):
    """tau(p) = 1 up to p = floor - 1: raising the floor may change entries from p = floor on, and must."""
    late = Reference(tiny._tensors, dataclasses.replace(tiny.config, **LOW_TEMPERATURE))
    hidden, _ = tiny.target(IDS[:30])
    full_depth, floor = 1, int(tiny.config.log_scaling_floor)
    ours, _ = tiny.depth(full_depth, hidden, IDS[2:32])
    theirs, _ = late.depth(full_depth, hidden, IDS[2:32])
    assert torch.equal(ours[:floor], theirs[:floor])
    assert (ours[floor:] - theirs[floor:]).abs().amax(dim=1).min() > 10 * TOLERANCE


def test_equal_scores_choose_the_lowest_experts(tiny):
    assert tiny.config.num_experts_per_token == 2
    assert tiny.choose_experts(torch.tensor([0.1, 0.5, 0.5, 0.9, 0.5])) == [3, 1]
    assert tiny.choose_experts(torch.zeros(8)) == [0, 1]


def test_draft_hidden_chains_the_drafts_that_greedy_drafts_returns(tiny):
    ids = IDS[:18]
    drafts = tiny.greedy_drafts(ids, 3)
    outputs = tiny.draft_hidden(ids, n_entries=17, num_depths=3, drafts=drafts[:2])
    assert [int(tiny._logits(hidden[-1]).argmax()) for hidden in outputs] == drafts


def test_entries_depend_on_no_id_beyond_their_own(tiny):
    """Entry p of depth k reads ids 0..p+k+1: a new id 12 spares the entries below 12 - k - 1 alone."""
    other = [*IDS[:12], (IDS[12] + 1) % 251, *IDS[13:]]
    before = tiny.draft_hidden(IDS, n_entries=20, num_depths=3)
    after = tiny.draft_hidden(other, n_entries=20, num_depths=3)
    for k in range(3):
        first = 12 - k - 1
        assert max_difference(before[k][:first], after[k][:first]) <= TOLERANCE
        assert (before[k][first] - after[k][first]).abs().max() > 100 * TOLERANCE


def test_generate_emits_what_the_target_alone_emits(tiny):
    known = IDS[:6]
    for _ in range(12):
        known = [*known, int(tiny.target(known)[1][-1].argmax())]
    for n in range(4):
        emitted, accepted = tiny.generate(IDS[:6], 12, n)
        assert emitted == known[6:]
        assert 1 + len(accepted) + sum(accepted) == 12
    assert tiny.generate(IDS[:1], 1, 3) == ([int(tiny.target(IDS[:1])[1][-1].argmax())], [])
    assert tiny.generate(IDS[:1], 0, 3) == ([], [])


def test_generate_accepts_exactly_the_leading_right_drafts(tiny, monkeypatch):
    plain, _ = tiny.generate(IDS[:6], 12, 0)
    answer = IDS[:6] + plain
    num_right = itertools.cycle([2, 0, 3, 3])

    def scripted(ids, n):
        drafts = [*answer[len(ids) : len(ids) + n], *[0] * n][:n]
        wrong = next(num_right)
        drafts[wrong : wrong + 1] = [(draft + 1) % 251 for draft in drafts[wrong : wrong + 1]]
        return drafts

    monkeypatch.setattr(tiny, "greedy_drafts", scripted)
    assert tiny.generate(IDS[:6], 12, 3) == (plain, [2, 0, 3, 2])  # 1 + 3 + 1 + 4 + 3 tokens


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_the_last_rejected_less_one_entries_are_stale(n):
    """After a accepted of n drafts the last max(0, n - a - 1) entries are wrong; one window repairs them."""
    rng = random.Random(n)
    fresh = itertools.count()
    ids = [next(fresh) for _ in range(5)]  # prompt and the first emitted id, all ids distinct
    ledger, final = EntryLedger(n), 0
    for _ in range(300):
        num_entries = len(ids) - 1
        drafts = [next(fresh) for _ in range(n)]
        num_accepted = rng.randint(0, n)
        for k in range(n):
            ledger.record(k, final, [*ids, *drafts][final + k + 1 : num_entries + k + 1])
        ids += [*drafts[:num_accepted], next(fresh)]
        final = ledger.final(ids)
        assert final == num_entries - max(0, n - num_accepted - 1)
        assert ledger.num_right(0, ids) == num_entries


def test_an_entry_behind_a_wrong_one_is_wrong_too():
    ledger = EntryLedger(2)
    ledger.record(0, 0, [1, 9, 3])  # ids are 0, 1, 2, 3, 4
    ledger.record(1, 0, [2, 3, 4])
    assert [ledger.num_right(k, [0, 1, 2, 3, 4]) for k in (0, 1)] == [1, 1]
    ledger.record(0, 1, [2, 3])
    assert [ledger.num_right(k, [0, 1, 2, 3, 4]) for k in (0, 1)] == [3, 1]
    with pytest.raises(ValueError, match="hole"):
        ledger.record(0, 4, [5])


def test_impossible_questions_are_refused(tiny):
    with pytest.raises(ValueError, match="at least 2"):
        tiny.greedy_drafts(IDS[:1], 1)
    with pytest.raises(ValueError, match="10 entries of 3 depths"):
        tiny.draft_hidden(IDS[:10], n_entries=10, num_depths=3, drafts=IDS[:2])
    with pytest.raises(ValueError, match="2 states and 3 ids"):
        tiny.depth(0, torch.zeros(2, 64), IDS[:3])

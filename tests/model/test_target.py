"""The target through its serving path against transformers: logits of chunked prompts, tokens of the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from inkling.config import AttentionGeometry, ModelConfig
from inkling.engine.pages import CacheLayout
from inkling.engine.request import GenerateRequest, StopRules
from inkling.protocol import SlotOptions
from inkling.testing import tiny_config, write_random_checkpoint
from tests.engine.scripted import References, ScriptedDraft
from tests.in_process import GENERATION, LocalModels, generate
from tests.model.stepping import TargetSteps, new_target, small_pages
from tests.reference import Reference
from tests.test_reference import load_transformers

TOLERANCE = 1e-4  # absolute, fp32, of logits with a standard deviation around 2
LENGTH = 90  # rows; longer than every window, extent and floor below, and than a page
NUM_TOKENS = 64

# Local layers have a bias for every key of their window, so their extent is their window.
CHECKPOINTS: dict[str, tuple[ModelConfig, dict]] = {
    "default": (tiny_config(), {"format": "original", "mtp_file": False}),
    "no dense layer, in transformers' format": (
        tiny_config(layer_is_dense=(False,) * 4, num_experts_per_token=1),
        {"format": "transformers"},
    ),
    "two dense layers, three experts a token, wide padding": (
        tiny_config(
            layer_is_dense=(True, True, False, False),
            num_experts_per_token=3,
            vocab_size=203,
            padded_vocab_size=256,
        ),
        {"format": "original", "shards": 3, "dtype": torch.bfloat16},
    ),
    "more local heads, window 5, floor 4": (
        tiny_config(
            full=AttentionGeometry(num_heads=2, num_kv_heads=2, head_dim=32, rel_extent=9, window=None),
            local=AttentionGeometry(num_heads=6, num_kv_heads=2, head_dim=8, rel_extent=5, window=5),
            log_scaling_floor=4.0,
            mup_multiplier=3.0,
            route_scale=8.0,
        ),
        {"format": "transformers", "mtp_file": False},
    ),
    "more full heads, window 2, floor 1": (
        tiny_config(
            full=AttentionGeometry(num_heads=8, num_kv_heads=1, head_dim=8, rel_extent=3, window=None),
            local=AttentionGeometry(num_heads=2, num_kv_heads=1, head_dim=16, rel_extent=2, window=2),
            log_scaling_floor=1.0,
            num_experts=5,
            num_experts_per_token=3,
            num_shared_experts=1,
            rms_norm_eps=1e-3,
        ),
        {"format": "original"},
    ),
    "all full, no padding, one expert": (
        tiny_config(
            layer_is_local=(False,) * 3,
            num_layers=3,
            layer_is_dense=(True, False, False),
            full=AttentionGeometry(num_heads=3, num_kv_heads=1, head_dim=24, rel_extent=40, window=None),
            hidden_size=72,
            vocab_size=256,
            num_experts=1,
            num_experts_per_token=1,
            mup_multiplier=1.0,
        ),
        {"format": "transformers"},
    ),
    "all local, window 33, odd widths": (
        tiny_config(
            layer_is_local=(True,) * 2,
            num_layers=2,
            layer_is_dense=(False,) * 2,
            hidden_size=52,
            local=AttentionGeometry(num_heads=4, num_kv_heads=4, head_dim=12, rel_extent=33, window=33),
            full=AttentionGeometry(num_heads=4, num_kv_heads=2, head_dim=16, rel_extent=7, window=None),
            dense_ffn=37,
            expert_ffn=20,  # transformers wants a multiple of 4
            num_experts=11,
            num_shared_experts=3,
        ),
        {"format": "original", "shards": 2, "mtp_file": False},
    ),
    "five layers, window 16, text only": (
        tiny_config(
            num_layers=5,
            layer_is_local=(True, True, False, True, True),
            layer_is_dense=(True, True, False, False, False),
            hidden_size=48,
            full=AttentionGeometry(num_heads=6, num_kv_heads=3, head_dim=16, rel_extent=64, window=None),
            local=AttentionGeometry(num_heads=12, num_kv_heads=2, head_dim=8, rel_extent=16, window=16),
            log_scaling_floor=30.0,
            log_scaling_alpha=0.7,
        ),
        {"format": "transformers", "text_only": True},
    ),
}


def served(models: LocalModels, layout: CacheLayout, ids: list[int], chunks: list[int]) -> Tensor:
    """Logits [T, V'] of every position of ``ids``, computed in chunks."""
    steps = TargetSteps(new_target(models, layout), layout)
    steps.open(SlotOptions(0, 0), len(ids), len(ids))
    hidden = steps.prompt(0, ids, chunks)
    return models.target.model.logits(hidden, torch.arange(len(ids)))


@pytest.fixture(scope="module", params=CHECKPOINTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    config, written = CHECKPOINTS[request.param]
    directory = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(directory, config, seed=len(request.param), **{"dtype": torch.float32} | written)
    models = LocalModels(directory, max_context=256, max_running_sequences=4, threads=1)
    return models, transformers_of(directory), config


def transformers_of(directory: Path):
    """The checkpoint as transformers reads it, without end-of-text ids."""
    if "text_config" in json.loads((directory / "config.json").read_text()):
        model = load_transformers(directory)
    else:
        from transformers import InklingForCausalLM

        # eager: the one that keeps the position bias
        model = InklingForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def test_logits_of_every_chunking_equal_transformers(case) -> None:
    models, theirs, config = case
    random = Random(config.hidden_size)
    ids = [random.randrange(config.vocab_size) for _ in range(LENGTH)]
    expected = {
        n: theirs(input_ids=torch.tensor([ids[:n]]), use_cache=False).logits[0] for n in (1, 2, LENGTH)
    }
    for layout in (models.deployment.layout, small_pages(models)):
        for length, chunks in (
            (1, [1]),
            (2, [1]),
            (2, [2]),
            (LENGTH, [LENGTH]),
            (LENGTH, [1, 1, 1, 1, 2, 1, 3, 1, 4]),  # borders inside the conv history
            (LENGTH, [random.randint(1, 20) for _ in range(LENGTH)]),
            (LENGTH, [2, 64, 1, 1, 30]),
        ):
            logits = served(models, layout, ids[:length], chunks)
            assert logits.shape == expected[length].shape == (length, config.vocab_size)
            assert (logits - expected[length]).abs().max() <= TOLERANCE, (length, chunks)


def generate_transformers(model, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def test_greedy_tokens_equal_transformers_at_every_n(case) -> None:
    models, theirs, config = case
    random = Random(config.vocab_size)
    prompts = [[random.randrange(config.vocab_size) for _ in range(length)] for length in (1, 41)]
    requests = [GenerateRequest(tuple(prompt), stop=StopRules(NUM_TOKENS)) for prompt in prompts]
    drafting = [replace(request, num_draft_tokens=config.mtp_depths) for request in requests]
    expected = [generate_transformers(theirs, prompt) for prompt in prompts]
    scripted = ScriptedDraft(
        models.deployment.layout,
        References(zip(requests, expected, strict=True)),
        vocab_size=config.vocab_size,
        num_depths=config.mtp_depths,
        generation=GENERATION,
    )
    assert [reply.ids for reply in generate(models.engine(), requests)] == expected
    assert [reply.ids for reply in generate(models.engine(max_prompt_chunk=7), drafting)] == expected
    engine = models.engine(scripted)
    assert [reply.ids for reply in generate(engine, drafting)] == expected
    assert engine.verified[config.mtp_depths, config.mtp_depths] > 0


@torch.no_grad()
def test_a_checkpoint_without_embedding_norm_equals_the_reference(tmp_path: Path) -> None:
    """transformers always norms."""
    config = tiny_config(use_embed_norm=False)
    config = write_random_checkpoint(tmp_path, config, seed=3, mtp_file=False, dtype=torch.float32)
    models = LocalModels(tmp_path, max_context=256, max_running_sequences=4, threads=1)
    reference = Reference(load_file(tmp_path / "model.safetensors"), config)
    ids = Random(3).choices(range(config.vocab_size), k=40)
    logits = served(models, models.deployment.layout, ids, [3, 9])
    assert (logits - reference.target(ids)[1]).abs().max() <= TOLERANCE

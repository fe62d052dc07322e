"""Synthetic checkpoints on the GPU: how fast they are built and in how much memory; what they say and accept there."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from inkling.config import ModelConfig
from inkling.engine.request import GenerateRequest, StopRules
from inkling.model.weights import DraftWeights, MoEWeights, TargetWeights, load_draft, load_target
from inkling.synthetic_weights import ACCEPTANCE, SyntheticCheckpoint
from inkling.tensors import draft_tensors, target_tensors
from tests.in_process import LocalModels, generate
from tests.test_synthetic import Walk

pytestmark = pytest.mark.gpu
NUM_IDS = 4096
BUILD_S = {"micro": 10.0, "mini": 30.0}


def normed(x: Tensor) -> Tensor:
    """RMS norm with weights of 1."""
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).bfloat16()


def build(name: str) -> tuple[TargetWeights, DraftWeights]:
    """Prints and bounds the seconds, the memory that stays, and the memory on the way."""
    config = ModelConfig.from_dir(name)
    specs = [*target_tensors(config), *draft_tensors(config)]
    not_kept = (
        2 * (config.padded_vocab_size - config.vocab_size) * config.hidden_size
    )  # padding rows of the head
    expected = sum(spec.size * spec.itemsize for spec in specs) - not_kept
    largest = max(spec.size * spec.itemsize for spec in specs)
    torch.cuda.init()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, held, start = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), time.perf_counter()
    target = load_target(name, config, dtype=torch.bfloat16, device="cuda")
    draft = load_draft(name, config, config.mtp_depths, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    kept = torch.cuda.memory_allocated() - before
    peak, reserved = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_reserved() - held
    print(f"{name}: {seconds:.2f} s; {kept / 1e9:.3f} GB kept of {expected / 1e9:.3f} by the table, ", end="")
    print(
        f"peak {peak / 1e9:.3f}, reserved {reserved / 1e9:.3f}, largest tensor {largest / 1e9:.3f}",
        flush=True,
    )
    assert seconds < BUILD_S[name.partition(":")[2].partition("?")[0]]
    assert kept == pytest.approx(expected, rel=0.01)  # small tensors take whole blocks
    assert peak < expected + 1.2 * largest
    assert reserved < 1.02 * expected
    return target, draft


def check_directions(
    config: ModelConfig, source: SyntheticCheckpoint, target: TargetWeights, draft: DraftWeights
):
    """Without the blocks: head and input_proj alone, in bf16, with as much noise as the blocks add and more."""
    generator = torch.Generator("cuda").manual_seed(1)
    ids = torch.randint(config.vocab_size, (NUM_IDS,), device="cuda", generator=generator)
    cycle = source.cycle

    def largest(x: Tensor) -> tuple[Tensor, Tensor]:
        return (
            ((x.float() / config.mup_multiplier).bfloat16() @ target.head.t())
            .float()
            .topk(2)
            .indices.unbind(1)
        )

    embedding = normed(target.embed[ids])
    noise = torch.randn(embedding.shape, device="cuda", generator=generator).bfloat16()
    for rms in (0.5, 1.0):
        said = largest(normed(embedding + rms * noise))[0]
        assert said.equal(cycle.successor.cuda()[ids]), f"noise {rms}"
    for depth, weights in enumerate(draft.depths):
        both = torch.cat([normed(noise), normed(embedding)], 1)
        drafted = largest(both @ weights.input_proj.t() + 0.5 * noise)[0]
        assert drafted.equal(cycle.drafts[depth].cuda()[ids]), f"depth {depth}"
        rate = (drafted == cycle.successor.cuda()[ids]).float().mean().item()
        assert rate == pytest.approx(ACCEPTANCE[depth], abs=0.03)


def check_routing(config: ModelConfig, target: TargetWeights) -> None:
    """Distinct experts among 4 and 32 rows of random tokens, each layer alone."""
    generator = torch.Generator("cuda").manual_seed(2)
    ids = torch.randint(config.vocab_size, (NUM_IDS,), device="cuda", generator=generator)
    embedding = normed(target.embed[ids])
    rows = normed(
        embedding + 0.5 * torch.randn(embedding.shape, device="cuda", generator=generator).bfloat16()
    )
    count, share = config.num_experts, config.num_experts_per_token / config.num_experts
    ratios = {4: [], 32: []}
    for layer in target.layers:
        if isinstance(layer.mlp, MoEWeights):
            logits = rows.float() @ layer.mlp.gate[:count].float().t()
            chosen = logits.topk(config.num_experts_per_token).indices
            for num_rows, found in ratios.items():
                distinct = sum(group.unique().numel() for group in chosen[:1024].split(num_rows)) / (
                    1024 / num_rows
                )
                found.append(distinct / (count * (1 - (1 - share) ** num_rows)))
    for num_rows, found in ratios.items():
        print(
            f"{num_rows} rows: distinct experts {min(found):.3f} to {max(found):.3f} of the expected",
            flush=True,
        )
        assert all(ratio == pytest.approx(1, abs=0.1) for ratio in found)


@pytest.mark.parametrize("shape", ["micro", "mini"])
def test_built_in_seconds_with_the_directions_and_the_routing_it_should_have(shape: str) -> None:
    name = f"synthetic:{shape}?seed=0"
    source, config = SyntheticCheckpoint(name, "cuda"), ModelConfig.from_dir(name)
    target, draft = build(name)
    for kept, key in ((target.embed, "model.llm.embed.weight"), (target.layers[-1].attn.o, None)):
        key = key or f"model.llm.layers.{config.num_layers - 1}.attn.wo_ud.weight"
        assert source.read(key).equal(kept), "another draw has other bits"
    check_directions(config, source, target, draft)
    check_routing(config, target)


def test_micro_says_and_accepts_what_it_was_built_to() -> None:
    """The vocabulary once, 64 sequences side by side, 8 drafts a step, on the runners of this machine."""
    name, sequences, tokens = "synthetic:micro?seed=0", 64, 512
    models = LocalModels(
        name,
        device="cuda",
        max_running_sequences=sequences,
        max_context=2048,
        max_tokens_per_step=9 * sequences,  # with fewer, a step of all verifies fewer drafts
        cache_bytes=8 << 30,
    )
    walk = Walk(SyntheticCheckpoint(name).cycle)
    starts = [i * len(walk.tokens) // sequences for i in range(sequences)]
    requests = [
        GenerateRequest(walk.prompt(start, 4), stop=StopRules(max_tokens=tokens), num_draft_tokens=8)
        for start in starts
    ]
    engine = models.engine()
    start = time.perf_counter()
    replies = generate(engine, requests)
    print(f"{sequences * tokens} tokens in {time.perf_counter() - start:.1f} s", flush=True)
    wrong = sum(
        a != b
        for start, reply in zip(starts, replies, strict=True)
        for a, b in zip(reply.ids, walk.answer(start, tokens), strict=True)
    )
    counts = engine.verified
    for depth, stated in enumerate(ACCEPTANCE):
        reached = sum(n for (drafts, accepted), n in counts.items() if drafts > depth and accepted >= depth)
        passed = sum(n for (drafts, accepted), n in counts.items() if drafts > depth and accepted > depth)
        print(f"depth {depth}: {passed / reached:.4f} of {reached}, stated {stated}", flush=True)
    assert wrong == 0
    assert counts == sum((walk.verified(s, tokens, 8) for s in starts), type(counts)())

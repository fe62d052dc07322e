"""Synthetic checkpoints: names, sizes, bits; and the answer, the acceptance and the routing they are built to have."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import inkling.model.layer as layer_module
from inkling.checkpoint import Checkpoint
from inkling.cli import app
from inkling.config import ModelConfig
from inkling.deployment import Deployment
from inkling.engine.request import GenerateRequest, StopRules
from inkling.errors import CheckpointError
from inkling.model.weights import load_target
from inkling.settings import Settings
from inkling.synthetic_weights import ACCEPTANCE, SyntheticCheckpoint, TokenCycle, open_checkpoint
from inkling.tensors import TensorSpec, draft_tensors, target_tensors
from tests.in_process import LocalModels, generate

TINY = "synthetic:tiny?seed=0"
EMBEDDING, HEAD = "model.llm.embed.weight", "model.llm.unembed.weight"
SEQUENCES, TOKENS = 32, 320  # 10,240 tokens


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("synthetic:maxi?seed=0", "name is 'maxi'; it must be one of tiny, micro, mini"),
        ("synthetic:", "name is ''; it must be one of tiny, micro, mini"),
        ("synthetic:mini?seed=-1", "seed is '-1'; must be an integer from 0 to 9223372036854775807"),
        ("synthetic:mini?seed=", "seed is ''; must be an integer from 0"),
        (f"synthetic:mini?seed={2**63}", f"seed is '{2**63}'; must be an integer from 0"),
        ("synthetic:mini?peak=65", "peak is '65'; must be an integer from 1 to 64"),
        ("synthetic:mini?sed=1", "option is 'sed'; the options are seed and peak, as in synthetic:mini"),
    ],
)
def test_a_wrong_name_is_refused_with_value_bound_and_remedy(name: str, reason: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        Deployment.of(Settings(checkpoint=name))
    assert reason in str(raised.value)
    result = CliRunner().invoke(app, ["check", name])
    assert result.exit_code == 1 and reason in result.stdout
    assert CliRunner().invoke(app, ["serve", "--checkpoint", name]).exit_code == 1


def test_check_says_that_the_weights_are_synthetic() -> None:
    result = CliRunner().invoke(app, ["check", "synthetic:mini?seed=0"])
    assert result.exit_code == 0
    assert "synthetic:mini?seed=0 is complete: synthetic weights" in result.stdout


def test_plan_takes_a_synthetic_checkpoint() -> None:
    result = CliRunner().invoke(app, ["plan", "synthetic:mini?seed=0", "--memory-bytes", "150000000000"])
    assert result.exit_code == 0, result.output
    assert "sequences that fit: " in result.stdout


@pytest.mark.parametrize(("name", "total", "active"), [("micro", 1.0e9, 0.23e9), ("mini", 28e9, 2.4e9)])
def test_sizes_are_as_stated(name: str, total: float, active: float) -> None:
    """Active: what the target reads for one token, but for the embedding table."""
    config = ModelConfig.from_dir(f"synthetic:{name}")
    target, draft = target_tensors(config), draft_tensors(config)

    def active_size(spec: TensorSpec) -> float:
        if spec.part == "embedding":
            return 0
        share = config.num_experts_per_token / config.num_experts if spec.part == "routed experts" else 1
        return spec.size * share

    counted = sum(spec.size for spec in [*target, *draft])
    counted_active = sum(active_size(spec) for spec in target)
    print(f"{name}: {counted:,} parameters, {counted_active:,.0f} active")
    assert counted == pytest.approx(total, rel=0.1)
    assert counted_active == pytest.approx(active, rel=0.1)


def test_mini_has_the_stated_shape() -> None:
    config = ModelConfig.from_dir("synthetic:mini")
    assert (config.num_layers, config.layer_is_local.count(False), config.hidden_size) == (24, 4, 2048)
    assert (config.full.num_heads, config.full.num_kv_heads, config.full.head_dim) == (16, 4, 128)
    assert (config.num_experts, config.num_experts_per_token, config.num_shared_experts) == (128, 6, 2)
    assert (config.expert_ffn, config.dense_ffn, config.mtp_depths) == (1536, 8192, 8)
    assert (config.padded_vocab_size, config.vocab_size) == (201024, 200058)


def test_every_tensor_reads_as_the_table_says() -> None:
    checkpoint = open_checkpoint(TINY)
    for name, stored in checkpoint.tensors.items():
        value = checkpoint.read(name)
        assert tuple(value.shape) == stored.shape
        assert str(value.dtype) == {"BF16": "torch.bfloat16", "F32": "torch.float32"}[stored.dtype]
        assert value.isfinite().all()


def random_names(checkpoint: Checkpoint) -> Iterator[str]:
    constants = ("norm.weight", "global_scale", "gate.bias")
    return (name for name in checkpoint.tensors if not name.endswith(constants))


def test_the_same_seed_gives_the_same_bits_in_any_order_and_another_seed_others() -> None:
    first, again, other = (SyntheticCheckpoint(f"synthetic:tiny?seed={seed}") for seed in (3, 3, 4))
    expected = {name: first.read(name) for name in random_names(first)}
    for name in reversed(expected):
        assert again.read(name).equal(expected[name]), name
        assert not other.read(name).equal(expected[name]), name
    layers = [expected[f"model.llm.layers.{i}.attn.wq_du.weight"] for i in range(2)]
    assert not layers[0].equal(layers[1])


def digest(checkpoint: Checkpoint) -> str:
    hashed = hashlib.sha256()
    for name in (EMBEDDING, HEAD, "model.mtp.layers.0.input_proj.weight"):
        hashed.update(checkpoint.read(name).view(torch.int16).numpy().tobytes())
    return hashed.hexdigest()


def test_another_process_builds_the_same_embedding_and_head() -> None:
    program = f"from tests.test_synthetic import *; print(digest(open_checkpoint({TINY!r})))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == digest(open_checkpoint(TINY))


def test_the_vocabulary_is_one_cycle() -> None:
    successor = TokenCycle.drawn(200058, 16, seed=0).successor.tolist()
    token, length = successor[0], 1
    while token:
        token, length = successor[token], length + 1
    assert length == 200058


class Walk:
    """The vocabulary in the order in which the target says it, from token 0 on."""

    def __init__(self, cycle: TokenCycle):
        successor, token = cycle.successor.tolist(), 0
        self.tokens: list[int] = []
        for _ in successor:
            self.tokens.append(token)
            token = successor[token]
        right = (cycle.drafts == cycle.successor)[:, self.tokens]
        self.right: list[list[bool]] = right.tolist()  # of depth k after position i

    def prompt(self, start: int, length: int) -> tuple[int, ...]:
        """Its last token stands at ``start``."""
        return tuple(self.tokens[i % len(self.tokens)] for i in range(start - length + 1, start + 1))

    def answer(self, start: int, length: int) -> list[int]:
        return [self.tokens[(start + 1 + i) % len(self.tokens)] for i in range(length)]

    def accepted(self, position: int, num_drafts: int) -> int:
        """Drafts of a window after the token at ``position``."""
        for depth in range(num_drafts):
            if not self.right[depth][(position + depth) % len(self.tokens)]:
                return depth
        return num_drafts

    def verified(self, start: int, length: int, num_drafts: int) -> Counter[tuple[int, int]]:
        """(drafts verified, drafts accepted) of an answer of ``length`` tokens after the token at ``start``."""
        counts: Counter[tuple[int, int]] = Counter()
        done = 1  # the prompt's own pass gives the first
        while done < length:
            drafts = min(num_drafts, length - done - 1)
            accepted = self.accepted(start + done, drafts)
            if drafts:
                counts[drafts, accepted] += 1
            done += accepted + 1
        return counts


@pytest.mark.parametrize(("num_drafts", "accepted_length"), [(3, 2.89), (8, 4.50)])
def test_a_walk_through_the_vocabulary_of_mini_accepts_as_stated(
    num_drafts: int, accepted_length: float
) -> None:
    """The flags alone; the models are held to them below. Windows start where the one before ended."""
    walk = Walk(open_checkpoint("synthetic:mini?seed=0").cycle)
    counts = Counter(
        accepted
        for (drafts, accepted), times in walk.verified(0, len(walk.tokens), num_drafts).items()
        for _ in range(times)
        if drafts == num_drafts
    )
    assert accepted_length == pytest.approx(
        sum((a + 1) * n for a, n in counts.items()) / counts.total(), abs=0.03
    )
    for depth in range(num_drafts):
        reached = sum(n for accepted, n in counts.items() if accepted >= depth)
        passed = reached - counts[depth]
        assert passed / reached == pytest.approx(ACCEPTANCE[depth], abs=0.01), f"depth {depth}"


@dataclass
class Run:
    walk: Walk
    starts: list[int]
    answers: list[list[int]]
    verified: Counter[tuple[int, int]]
    chosen: list[list[Tensor]]  # int64 [rows, k] of each step, of each layer with experts


@pytest.fixture(scope="module")
def run() -> Run:
    """10,240 tokens of tiny in 32 sequences, 8 drafts a step, with what the routers chose for the real rows."""
    models = LocalModels(TINY, threads=1, max_running_sequences=SEQUENCES, max_context=512)
    walk = Walk(open_checkpoint(TINY).cycle)
    starts = [i * len(walk.tokens) // SEQUENCES for i in range(SEQUENCES)]
    rules = StopRules(max_tokens=TOKENS)
    requests = [
        GenerateRequest(walk.prompt(start, 4), stop=rules, num_draft_tokens=models.num_depths)
        for start in starts
    ]
    engine, experts = models.engine(), layer_module.experts_reference
    chosen = defaultdict(list)

    def recording(
        m: Tensor, num_rows: int, indices: Tensor, gamma: Tensor, w13: Tensor, *rest: Tensor
    ) -> Tensor:
        chosen[id(w13)].append(indices[:num_rows].clone())
        return experts(m, num_rows, indices, gamma, w13, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_module, "experts_reference", recording)
        answers = [reply.ids for reply in generate(engine, requests)]
    return Run(walk, starts, answers, engine.verified, list(chosen.values()))


def test_the_target_follows_the_cycle(run: Run) -> None:
    for start, answer in zip(run.starts, run.answers, strict=True):
        assert answer == run.walk.answer(start, TOKENS)


def test_every_window_accepts_what_the_flags_say(run: Run) -> None:
    expected = sum((run.walk.verified(start, TOKENS, 8) for start in run.starts), Counter())
    assert run.verified == expected
    assert expected.total() > 2000


@pytest.mark.parametrize("num_rows", [4, 32])
def test_routing_is_spread_over_the_experts(run: Run, num_rows: int) -> None:
    config = ModelConfig.from_dir(TINY)
    share = config.num_experts_per_token / config.num_experts
    expected = config.num_experts * (1 - (1 - share) ** num_rows)
    assert len(run.chosen) == config.layer_is_dense.count(False)
    for steps in run.chosen:
        groups = [group for step in steps for group in step.split(num_rows) if len(group) == num_rows]
        distinct = sum(group.unique().numel() for group in groups) / len(groups)
        assert distinct == pytest.approx(expected, rel=0.1)


def test_peak_is_the_logit_of_the_successor() -> None:
    for peak in (4, 32):
        config = ModelConfig.from_dir(TINY)
        weights = load_target(f"{TINY}&peak={peak}", config, dtype=torch.float32, device="cpu")
        ids = torch.arange(1000)
        states = weights.embed[ids] / weights.embed[ids].square().mean(-1, keepdim=True).sqrt()
        logits = states @ weights.head.t() / config.mup_multiplier
        right = logits.gather(1, SyntheticCheckpoint(TINY).cycle.successor[ids, None])
        assert right.mean().item() == pytest.approx(peak, rel=0.1)
        assert logits.std().item() == pytest.approx(peak / math.sqrt(config.hidden_size), rel=0.1)

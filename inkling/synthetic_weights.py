"""Weights of a synthetic checkpoint, drawn tensor by tensor where they are wanted and never written to disk.

The answer is known. The vocabulary is one cycle of random order; the target continues every token with its successor,
because head row successor(t) is the direction of embedding t and the blocks add little to it. Depth k is right for
the fraction ``ACCEPTANCE[k]`` of the tokens: the others carry a flag, one coordinate of their embedding, which the
depth's ``input_proj`` turns into the direction of another token. Flags of different depths and tokens are
independent, so acceptance depends neither on where a draft window starts nor on what was accepted before.

Everything but the cycle and its flags is drawn on the device that it is read for. The same seed gives the same bits
on the same kind of device and with the same torch, in every process.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from inkling.checkpoint import Checkpoint, StoredTensor
from inkling.config import ModelConfig
from inkling.synthetic import SyntheticName, is_synthetic
from inkling.tensors import Naming, draft_tensors, target_tensors

# of depth k, given that all before it were accepted: 76, 62, 51, 42, 36, 31, 27, 24 % after so many drafts
ACCEPTANCE = (0.762, 0.808, 0.833, 0.827, 0.858, 0.849, 0.880, 0.871)
_FLAGS_PER_WIDTH = 128  # H / 128 flags, so as many wrong drafts, of each depth
_BLOCK_RMS = 0.5  # what all blocks together add to an embedding of RMS 1
_HIDDEN_RMS = 0.25  # what the hidden half of input_proj adds to it
_FLAG_STRENGTH = 4.0  # of a wrong direction, to the right one's 1
_SWIGLU_RMS = 0.6  # of silu(g) * u for standard normal g and u


@dataclass(frozen=True)
class TokenCycle:
    """What follows each token, and where each depth goes wrong. On the CPU, whatever the device of the weights."""

    successor: Tensor  # int64 [V']
    flags: Tensor  # int64 [D, V']: which of the depth's flags the token carries; -1: none
    sources: Tensor  # int64 [D, M]: with flag m, depth k drafts the successor of sources[k, m]

    @property
    def drafts(self) -> Tensor:
        """int64 [D, V']: what depth k drafts after each token."""
        stray = self.sources.gather(1, self.flags.clamp(min=0))
        return torch.where(self.flags < 0, self.successor, self.successor[stray])

    @classmethod
    def drawn(cls, vocab_size: int, flags_per_depth: int, seed: int) -> TokenCycle:
        generator = _generator("cycle", seed, "cpu")
        order = torch.randperm(vocab_size, generator=generator)
        successor = torch.empty_like(order)
        successor[order] = order.roll(-1)
        flags = torch.full((len(ACCEPTANCE), vocab_size), -1)
        for row, accepted in zip(flags, ACCEPTANCE, strict=True):
            flagged = torch.randperm(vocab_size, generator=generator)[: round((1 - accepted) * vocab_size)]
            row[flagged] = torch.randint(flags_per_depth, flagged.shape, generator=generator)
        sources = torch.randperm(vocab_size, generator=generator)[: len(ACCEPTANCE) * flags_per_depth]
        return cls(successor, flags, sources.view(len(ACCEPTANCE), -1))


class SyntheticCheckpoint(Checkpoint):
    """Reads as a checkpoint of original names does; ``read`` draws on ``device``."""

    def __init__(self, name: str | Path, device: torch.device | str = "cpu"):
        parsed = SyntheticName.parse(name)
        self.seed, self.peak, self.device = parsed.seed, parsed.peak, torch.device(device)
        self.config = ModelConfig.from_dir(name)
        self.directory = Path(name)
        specs = [*target_tensors(self.config), *draft_tensors(self.config)]
        self.tensors = {
            spec.key: StoredTensor(self.directory, spec.shape, "F32" if spec.itemsize == 4 else "BF16")
            for spec in specs
        }
        self.index_problems = []
        self.target_naming = self.mtp_naming = Naming.ORIGINAL
        self.flags_per_depth = self.config.hidden_size // _FLAGS_PER_WIDTH

    @cached_property
    def cycle(self) -> TokenCycle:
        return TokenCycle.drawn(self.config.vocab_size, self.flags_per_depth, self.seed)

    def read(self, name: str) -> Tensor:
        """The tensor, the caller's own."""
        key = name.removesuffix(".weight").rpartition(".")[2]
        if key == "embed":
            return self._embedding(name)
        if key == "unembed":
            return self._head(name)
        if key == "input_proj":
            return self._input_proj(name)
        if key.endswith("norm") or key == "global_scale":
            return self._empty(name).fill_(1)
        if key == "bias":
            return self._empty(name).zero_()
        return self._normal(name, self._deviation(key, self.tensors[name].shape[-1]))

    def _deviation(self, key: str, inputs: int) -> float:
        """Outputs of RMS 1 from inputs of RMS 1, but where they enter the residual stream."""
        config = self.config
        if key.endswith("sconv"):
            return 0.1
        if key == "proj":
            return 0.25  # 16 relative states: biases of RMS 1
        deviation = inputs**-0.5
        added = _BLOCK_RMS / (2 * config.num_layers) ** 0.5
        if key == "wo_ud":
            return deviation * added
        if key == "w2_md":
            return deviation * added / _SWIGLU_RMS
        if key in ("w2_weight", "shared_w2_weight"):  # as many outputs, of weights that sum to route_scale
            active = config.num_experts_per_token + config.num_shared_experts
            return deviation * added / _SWIGLU_RMS * active**0.5 / config.route_scale
        return deviation

    def _empty(self, name: str) -> Tensor:
        stored = self.tensors[name]
        dtype = torch.float32 if stored.dtype == "F32" else torch.bfloat16
        return torch.empty(stored.shape, dtype=dtype, device=self.device)

    def _normal(self, name: str, deviation: float) -> Tensor:
        """Drawn in place in its own dtype."""
        return self._empty(name).normal_(0, deviation, generator=_generator(name, self.seed, self.device))

    @property
    def _num_plain(self) -> int:
        """Coordinates of an embedding that are random; the flags of all depths follow them."""
        return self.config.hidden_size - len(ACCEPTANCE) * self.flags_per_depth

    @property
    def _flag_value(self) -> float:
        """A flag has 1/32 of an embedding's energy."""
        return (self.config.hidden_size / 32) ** 0.5

    def _directions(self) -> Tensor:
        """[V, H]: the embeddings without their flags."""
        rows = self._normal("model.llm.embed.weight", 1.0)
        rows[:, self._num_plain :] = 0
        return rows

    def _embedding(self, name: str) -> Tensor:
        rows, flags = self._directions(), self.cycle.flags
        depth, token = (flags >= 0).nonzero(as_tuple=True)
        column = self._num_plain + depth * self.flags_per_depth + flags[depth, token]
        rows[token.to(self.device), column.to(self.device)] = self._flag_value
        return rows

    def _head(self, name: str) -> Tensor:
        """Logits are (h / muP) . row: ``peak`` where h is the direction itself."""
        scale = self.peak * self.config.mup_multiplier / self.config.hidden_size
        rows, successor = self._directions().mul_(scale), self.cycle.successor.to(self.device)
        head = self._empty(name).zero_()
        return head.index_copy_(0, successor, rows[: self.config.vocab_size])

    def _input_proj(self, name: str) -> Tensor:
        """The embedding half passes directions on, and turns this depth's flags into directions of their sources."""
        depth, hidden = int(name.split(".")[3]), self.config.hidden_size
        both = self._normal(name, _HIDDEN_RMS * hidden**-0.5)
        embedding = both[:, hidden:].zero_()
        embedding[:, : self._num_plain].diagonal().fill_(1)
        sources = self._directions()[self.cycle.sources[depth].to(self.device)]
        start = self._num_plain + depth * self.flags_per_depth
        embedding[:, start : start + self.flags_per_depth] = sources.t() * (_FLAG_STRENGTH / self._flag_value)
        return both


def open_checkpoint(checkpoint: str | Path, device: torch.device | str = "cpu") -> Checkpoint:
    """The checkpoint of a directory, or a synthetic one whose weights are drawn on ``device``."""
    return SyntheticCheckpoint(checkpoint, device) if is_synthetic(checkpoint) else Checkpoint(checkpoint)


def _generator(name: str, seed: int, device: torch.device | str) -> torch.Generator:
    """Keyed by tensor and seed alone: no draw depends on what was drawn before it."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)

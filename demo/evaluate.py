"""Accepted length of speculative decoding with the demo network, by full recomputation.

Slow and plain on purpose: no cache, so nothing can be stale. Every round drafts N tokens from committed ids,
verifies them with the target, and keeps the accepted ones and the target's next token.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from network import Inkling
from torch import Tensor


@dataclass
class Acceptance:
    """Per prompt: rounds, tokens, text. Per depth: rounds that reached it, drafts that passed it."""

    rounds: list[int]
    tokens: list[int]
    drafted: list[int]
    accepted: list[int]
    outputs: list[list[int]]

    def length(self, prompts: list[int]) -> float:
        """Mean tokens per round over these prompts, the target's own token included."""
        return sum(self.tokens[b] for b in prompts) / max(sum(self.rounds[b] for b in prompts), 1)

    def rates(self) -> list[float]:
        return [a / max(d, 1) for a, d in zip(self.accepted, self.drafted, strict=True)]


class Choice:
    """Greedy, or temperature with Gumbel noise fixed per position and shared by target and draft."""

    def __init__(self, net: Inkling, temperature: float, positions: int) -> None:
        self.temperature = temperature
        shape = (positions, net.text.unpadded_vocab_size)
        uniform = torch.rand(shape, generator=torch.Generator().manual_seed(6)).clamp(1e-9, 1 - 1e-7)
        self.noise = -torch.log(-torch.log(uniform)).to(net.model.llm.norm.weight.device)

    def __call__(self, logits: Tensor, positions: Tensor) -> list:
        """logits [.., V'] and the positions [..] of the tokens to choose -> ids as nested lists."""
        if self.temperature > 0:
            logits = logits / self.temperature + self.noise[positions]
        return logits.argmax(-1).tolist()


def loops(output: list[int]) -> bool:
    """True when fewer than half of the 4-grams of a text are distinct."""
    grams = [tuple(output[i : i + 4]) for i in range(len(output) - 3)]
    return len(set(grams)) < len(grams) / 2


def padded(rows: list[list[int]], device: torch.device) -> Tensor:
    """Right-padded [B, T] ids; causality keeps the padding from reaching real positions."""
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)


def take(states: Tensor, last: list[int]) -> Tensor:
    """Row last[b] of every sequence: [B, T, H] -> [B, H]."""
    return states[torch.arange(len(last)), last]


def draft(net: Inkling, choose: Choice, ids: list[list[int]], n: int, backbone_norm: bool) -> list[list[int]]:
    """Drafts [B][n] after the committed ids; entry p of depth k reads id p+k+1, a draft at the end."""
    device = net.model.llm.norm.weight.device
    rows = [list(row) for row in ids]
    entries = [len(row) - 2 for row in rows]  # last position whose next id is committed
    states = net.hidden(padded(rows, device))
    for k in range(n):
        shifted = padded([row[k + 1 :] for row in rows], device)
        states = net.depth(k, states[:, : shifted.shape[1]], shifted, backbone_norm)
        positions = torch.tensor([len(row) for row in rows], device=device)
        for row, token in zip(rows, choose(net.logits(take(states, entries)), positions), strict=True):
            row.append(token)
    return [row[-n:] for row in rows]


def speculate(
    net: Inkling, prompts: list[list[int]], n: int, new_tokens: int, backbone_norm: bool, temperature: float
) -> Acceptance:
    """Generates at least `new_tokens` per prompt with n drafts a round, all prompts at once."""
    device = net.model.llm.norm.weight.device
    choose = Choice(net, temperature, max(map(len, prompts)) + new_tokens + 2 * n + 2)
    ids = [list(prompt) for prompt in prompts]
    last = take(net.hidden(padded(ids, device)), [len(row) - 1 for row in ids])
    lengths = torch.tensor([len(row) for row in ids], device=device)
    for row, token in zip(ids, choose(net.logits(last), lengths), strict=True):
        row.append(token)
    result = Acceptance([0] * len(ids), [0] * len(ids), [0] * n, [0] * n, [])
    while live := [b for b, row in enumerate(ids) if len(row) - len(prompts[b]) < new_tokens]:
        drafts = draft(net, choose, [ids[b] for b in live], n, backbone_norm)
        trial = padded([ids[b] + tokens for b, tokens in zip(live, drafts, strict=True)], device)
        positions = torch.arange(1, trial.shape[1] + 1, device=device)
        choice = choose(net.logits(net.hidden(trial)), positions.expand(trial.shape))
        for b, tokens, row in zip(live, drafts, choice, strict=True):
            own = row[len(ids[b]) - 1 : len(ids[b]) + n]  # the target's token after 0..n drafts
            hits = next((k for k in range(n) if tokens[k] != own[k]), n)
            ids[b] += own[: hits + 1]
            result.rounds[b] += 1
            result.tokens[b] += hits + 1
            for k in range(n):
                result.drafted[k] += hits >= k
                result.accepted[k] += hits > k
    result.outputs = [row[len(prompt) :][:new_tokens] for row, prompt in zip(ids, prompts, strict=True)]
    return result


def report(net: Inkling, prompts: list[list[int]], new_tokens: int) -> list[dict]:
    """Accepted length and per-depth rates for N = 3 and 4, with and without the backbone norm.

    Drafts never change the text; `changed_prompts` counts those that differ from the first run at the same
    temperature, where differently shaped batches rounded a near-tie the other way.
    """
    figures, first = [], {}
    for temperature, n, backbone_norm in itertools.product((0.0, 0.8), (3, 4), (True, False)):
        with torch.inference_mode():
            result = speculate(net, prompts, n, new_tokens, backbone_norm, temperature)
        text = first.setdefault(temperature, result.outputs)
        every = list(range(len(prompts)))
        fresh = [b for b in every if not loops(result.outputs[b])]
        figures.append({
            "temperature": temperature,
            "drafts": n,
            "backbone_norm": backbone_norm,
            "accepted_length": round(result.length(every), 3),
            "accepted_length_without_loops": round(result.length(fresh), 3),
            "looping_prompts": len(every) - len(fresh),
            "per_depth": [round(rate, 3) for rate in result.rates()],
            "rounds": sum(result.rounds),
            "changed_prompts": sum(a != b for a, b in zip(text, result.outputs, strict=True)),
        })  # fmt: skip
    return figures

"""Accepted length of greedy speculative decoding with the demo network, by full recomputation.

Slow and plain on purpose: no cache, so nothing can be stale. Every round drafts N tokens from committed ids,
verifies them with the target, and keeps the accepted ones and the target's next token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from network import Inkling
from torch import Tensor


@dataclass
class Acceptance:
    """Of `rounds`, `drafted[k]` reached depth k (all shallower accepted) and `accepted[k]` passed it."""

    rounds: int
    tokens: int
    drafted: list[int]
    accepted: list[int]
    outputs: list[list[int]]

    @property
    def length(self) -> float:
        """Mean tokens per round, the target's own token included."""
        return self.tokens / self.rounds

    def rates(self) -> list[float]:
        return [a / max(d, 1) for a, d in zip(self.accepted, self.drafted, strict=True)]


def padded(rows: list[list[int]], device: torch.device) -> Tensor:
    """Right-padded [B, T] ids; causality keeps the padding from reaching real positions."""
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)


def take(states: Tensor, last: list[int]) -> Tensor:
    """Row last[b] of every sequence: [B, T, H] -> [B, H]."""
    return states[torch.arange(len(last)), last]


def draft(net: Inkling, ids: list[list[int]], n: int, backbone_norm: bool) -> list[list[int]]:
    """Drafts [B][n] after the committed ids; entry p of depth k reads id p+k+1, a draft at the end."""
    device = net.model.llm.norm.weight.device
    rows = [list(row) for row in ids]
    entries = [len(row) - 2 for row in rows]  # last position whose next id is committed
    states = net.hidden(padded(rows, device))
    for k in range(n):
        shifted = padded([row[k + 1 :] for row in rows], device)
        states = net.depth(k, states[:, : shifted.shape[1]], shifted, backbone_norm)
        picked = net.logits(take(states, entries)).argmax(-1).tolist()
        for row, token in zip(rows, picked, strict=True):
            row.append(token)
    return [row[-n:] for row in rows]


def speculate(
    net: Inkling, prompts: list[list[int]], n: int, new_tokens: int, backbone_norm: bool
) -> Acceptance:
    """Greedy generation of at least `new_tokens` per prompt with n drafts a round, all prompts at once."""
    device = net.model.llm.norm.weight.device
    ids = [list(prompt) for prompt in prompts]
    last = take(net.hidden(padded(ids, device)), [len(row) - 1 for row in ids])
    for row, token in zip(ids, net.logits(last).argmax(-1).tolist(), strict=True):
        row.append(token)
    result = Acceptance(0, 0, [0] * n, [0] * n, [])
    while live := [b for b, row in enumerate(ids) if len(row) - len(prompts[b]) < new_tokens]:
        drafts = draft(net, [ids[b] for b in live], n, backbone_norm)
        trial = [ids[b] + tokens for b, tokens in zip(live, drafts, strict=True)]
        choice = net.logits(net.hidden(padded(trial, device))).argmax(-1).tolist()
        for b, tokens, row in zip(live, drafts, choice, strict=True):
            own = row[len(ids[b]) - 1 : len(ids[b]) + n]  # the target's token after 0..n drafts
            hits = next((k for k in range(n) if tokens[k] != own[k]), n)
            ids[b] += own[: hits + 1]
            result.rounds += 1
            result.tokens += hits + 1
            for k in range(n):
                result.drafted[k] += hits >= k
                result.accepted[k] += hits > k
    result.outputs = [row[len(prompt) :][:new_tokens] for row, prompt in zip(ids, prompts, strict=True)]
    return result


def report(net: Inkling, prompts: list[list[int]], new_tokens: int) -> dict[str, dict]:
    """Accepted length and per-depth rates at N = 3 and 4, with and without the backbone norm.

    Drafts never change the text; `changed_prompts` counts those that differ from the first setting, where
    differently shaped batches rounded a near-tie the other way.
    """
    figures, first = {}, None
    for n in (3, 4):
        for backbone_norm in (True, False):
            with torch.inference_mode():
                result = speculate(net, prompts, n, new_tokens, backbone_norm)
            first = first or result.outputs
            key = f"N={n} {'with' if backbone_norm else 'without'} backbone norm"
            figures[key] = {
                "accepted_length": round(result.length, 3),
                "per_depth": [round(rate, 3) for rate in result.rates()],
                "rounds": result.rounds,
                "changed_prompts": sum(a != b for a, b in zip(first, result.outputs, strict=True)),
            }
    return figures

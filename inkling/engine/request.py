"""What a client asked for, after validation. The engine sees ids and rules, no tensors, no text."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingParams:
    """Ranges were checked by the interface: temperature [0, 100], top_p (0, 1], min_p [0, 1], top_k >= 0."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 64 bits


@dataclass(frozen=True)
class StopRules:
    max_tokens: int = 16
    min_tokens: int = 0  # no stop id and no stop word ends the request before so many tokens
    stop_ids: frozenset[int] = frozenset()  # EOS (unless ignored), end_id, stop_token_ids: end the request
    stop_words: tuple[str, ...] = ()


@dataclass(frozen=True)
class GenerateRequest:
    """One validated request. ``num_draft_tokens`` is D_s, fixed for the sequence's life; 0: no drafting."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopRules = field(default_factory=StopRules)
    num_draft_tokens: int = 0
    priority: int = 0  # scheduling by priority comes with preemption; kept in order of arrival until then
    timeout_us: int = 0  # 0: none

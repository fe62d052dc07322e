"""What a client asked for, after validation. The engine sees ids and rules, no tensors, no text."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingParams:
    """Ranges were checked by the interface (``inkling.parameters``)."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 64 bits
    repetition_penalty: float = 1.0  # of ids in prompt and output; 1: off
    presence_penalty: float = 0.0  # of ids in the output
    frequency_penalty: float = 0.0  # the same, for each time
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, added to its logit), no id twice
    bad_words: tuple[tuple[int, ...], ...] = ()  # ids that never follow one another in the output

    @property
    def needs_history(self) -> bool:
        """Whether a draw depends on the ids before it by more than the model's states."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) or any(len(word) > 1 for word in self.bad_words)


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
    priority: int = 0  # 32 bits; larger goes first
    timeout_us: int = 0  # 0: none
    log_probs: int = 0  # of the answer's tokens. 0: none; n: the token's and those of the n - 1 likeliest
    prompt_log_probs: int = (
        0  # the same of the prompt's tokens but the first; needs a row for each: no prefix hit
    )

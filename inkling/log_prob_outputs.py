"""Log probs as a client gets them, under the names of the TensorRT-LLM tensors and of the vLLM backend.

``output_log_probs``   fp32, one for each token of the response
``cum_log_probs``, ``cumulative_logprob``   their sum over the whole answer so far
``top_log_probs``      JSON: for each token of the response {id: log prob}, likeliest first
``logprobs``           JSON: for each token of the response {id: {logprob, rank, decoded_token}} of the token and the
                       likeliest; null when the request did not set ``logprobs``
``prompt_logprobs``    the same for the prompt, in the first response with tokens; null for its first token
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from inkling.engine.log_probs import TokenLogProb
from inkling.engine.outbox import Chunk

if TYPE_CHECKING:
    from inkling.interface import Given

LOG_PROBS_ASKED_BY = {
    "return_log_probs": ("output_log_probs", "cum_log_probs"),
    "num_top_log_probs": ("top_log_probs",),
    "return_logprobs": ("logprobs",),
    "return_cumulative_logprob": ("cumulative_logprob",),
    "prompt_logprobs": ("prompt_logprobs",),
}


@dataclass(frozen=True)
class LogProbOutputs:
    """What one request wants to see of its log probs."""

    tokenizer: Tokenizer | None = None
    wanted: frozenset[str] = frozenset()  # outputs
    num_top: int = 0  # likeliest tokens in top_log_probs
    num_logprobs: int | None = None  # likeliest tokens in logprobs; None: not set
    num_prompt_logprobs: int = 0

    @classmethod
    def of(cls, given: Mapping[str, Given], tokenizer: Tokenizer | None) -> LogProbOutputs:
        values = {
            name: given[name].value if name in given else None for name in (*LOG_PROBS_ASKED_BY, "logprobs")
        }
        asks = {name for name in LOG_PROBS_ASKED_BY if values[name]}
        if values["prompt_logprobs"] is not None:  # 0 asks for the tokens' own
            asks.add("prompt_logprobs")
        wanted = frozenset(output for name in asks for output in LOG_PROBS_ASKED_BY[name])
        return cls(
            tokenizer,
            wanted,
            values["num_top_log_probs"] or 0,
            values["logprobs"],
            values["prompt_logprobs"] or 0,
        )

    @property
    def log_probs(self) -> int:
        """``GenerateRequest.log_probs``."""
        uses = [self.num_top] if self.wanted & {"output_log_probs", "cum_log_probs", "top_log_probs"} else []
        uses += [0] if "cumulative_logprob" in self.wanted else []
        if "logprobs" in self.wanted and self.num_logprobs is not None:
            uses.append(self.num_logprobs)
        return 1 + max(uses) if uses else 0

    @property
    def prompt_log_probs(self) -> int:
        """``GenerateRequest.prompt_log_probs``."""
        return 1 + self.num_prompt_logprobs if "prompt_logprobs" in self.wanted else 0

    def values(self, chunk: Chunk) -> dict[str, list]:
        """Output name -> elements, for one response."""
        if not self.wanted:
            return {}
        values: dict[str, list] = {
            "output_log_probs": [scored.log_prob for scored in chunk.log_probs],
            "cum_log_probs": [chunk.cum_log_prob],
            "cumulative_logprob": [chunk.cum_log_prob],
            "top_log_probs": [_json(dict(scored.top[: self.num_top]) for scored in chunk.log_probs)],
            "logprobs": [self._logprobs(chunk)],
        }
        if chunk.prompt_log_probs is not None:
            rows = [self._entry(scored, self.num_prompt_logprobs) for scored in chunk.prompt_log_probs]
            values["prompt_logprobs"] = [_json([None, *rows])]
        return {name: value for name, value in values.items() if name in self.wanted}

    def _logprobs(self, chunk: Chunk) -> bytes:
        if self.num_logprobs is None:
            return b"null"
        return _json(self._entry(scored, self.num_logprobs) for scored in chunk.log_probs)

    def _entry(self, scored: TokenLogProb, num_top: int) -> dict[int, dict[str, object]]:
        """The token first, then the likeliest that are not it."""
        ranked = {scored.token: (scored.log_prob, scored.rank)}
        for rank, (token, log_prob) in enumerate(scored.top[:num_top], 1):
            ranked.setdefault(token, (log_prob, rank))
        return {
            token: {"logprob": log_prob, "rank": rank, "decoded_token": self._decoded(token)}
            for token, (log_prob, rank) in ranked.items()
        }

    def _decoded(self, token: int) -> str | None:
        return self.tokenizer.decode([token], skip_special_tokens=False) if self.tokenizer else None


def _json(rows: Iterable[object]) -> bytes:
    return json.dumps(list(rows)).encode()

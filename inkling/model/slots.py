"""What a model process keeps per slot: sampling options, page tables, and the order of the steps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from inkling.errors import GenerationError, StepGapError
from inkling.model.batch import PageTables
from inkling.protocol import Kind, SlotOptions, Step
from kernels.head import greedy_reference
from kernels.sampling import SamplingRows, sample


def positions_per_slot(max_context: int, num_draft_tokens: int) -> int:
    """Positions that a pass may touch: rows of drafts reach beyond the context."""
    return max_context + num_draft_tokens + 1


class Slots:
    def __init__(self, num_slots: int, max_positions: int, page_size: Mapping[Kind, int], generation: int):
        self.generation = generation
        self.last_step = 0
        self.tables = PageTables(num_slots, max_positions, page_size)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.seed = np.zeros(num_slots, np.uint64)
        self.log_probs = np.zeros(num_slots, np.int64)
        self.prompt_log_probs = np.zeros(num_slots, np.int64)

    def begin(self, message: Step) -> dict[Kind, np.ndarray]:
        """Applies a step's bookkeeping; returns the pages per kind that begin to hold another sequence.

        Raises GenerationError or StepGapError and changes nothing then.
        """
        if message.generation != self.generation:
            raise GenerationError(
                f"the step is for generation {message.generation}, this process knows {self.generation}; "
                "restart the server"
            )
        if message.previous_step not in (0, self.last_step):
            raise StepGapError(
                f"step {message.step} follows {message.previous_step}, the last one here was {self.last_step}"
            )
        for words in message.opens:
            self._open(SlotOptions.from_words(words))
        self.last_step = message.step
        return self.tables.assign(message.pages)

    def _open(self, options: SlotOptions) -> None:
        slot = options.slot
        self.tables.clear(slot)
        self.temperature[slot], self.top_k[slot] = options.temperature, options.top_k
        self.top_p[slot], self.min_p[slot] = options.top_p, options.min_p
        self.seed[slot] = options.seed
        self.log_probs[slot], self.prompt_log_probs[slot] = options.log_probs, options.prompt_log_probs

    def draw(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Tokens int64 [n] for ``positions`` [n] of ``slots`` [n] from fp32 ``logits`` [n, V'].

        Target and draft call this one function; only the target shapes its logits before (``TokenRules``), which
        is exact: a draft that draws what the shaped logits would not is not accepted.
        """
        if not self.temperature[slots].any():
            return greedy_reference(logits).numpy()
        rows = SamplingRows(
            temperature=torch.from_numpy(self.temperature[slots]),
            top_k=torch.from_numpy(self.top_k[slots]),
            top_p=torch.from_numpy(self.top_p[slots]),
            min_p=torch.from_numpy(self.min_p[slots]),
            seed=torch.from_numpy(self.seed[slots].view(np.int64)),
            position=torch.from_numpy(positions.astype(np.int64)),
        )
        return sample(logits, rows).numpy()

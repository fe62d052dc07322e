"""A target and a draft that answer constants: what is left of a step is the engine's own cost.

Both read the number of tokens wanted from the message and nothing else. Drafts always stand when the two
``token`` are equal, and always fall when they are not.
"""

from __future__ import annotations

import numpy as np

from inkling.protocol import DraftStep, TargetStep, unpack


class NullTarget:
    """TOKENS are ``token``; HIDDEN is zero, int32 [T, hidden_words]; LOGPROBS are 0 of rank 1."""

    def __init__(self, token: int = 2, hidden_words: int = 1):
        self.token = token
        self._hidden = np.zeros((1, hidden_words), np.int32)
        self._wanted = np.zeros((0, 2), np.int32)  # by slot: SlotOptions.log_probs, prompt_log_probs

    def step(self, control: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._answer(unpack(TargetStep, control))

    def step_scored(self, control: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The same, and LOGPROBS; the likeliest tokens are all ``token``."""
        message = unpack(TargetStep, control)
        tokens, hidden = self._answer(message)
        slots, _, rows, draws = message.segments.T
        drawn = np.repeat(self._wanted[slots, 0], draws)
        scored = self._wanted[np.repeat(slots, rows)[message.scores[:, 0]], 1]
        wanted = np.concatenate([drawn[drawn > 0], scored])
        num_top = int(wanted.max(initial=1)) - 1
        scores = np.zeros((len(wanted), 2 + 2 * num_top), np.int32)
        scores[:, 1] = 1
        scores[:, 2 : 2 + num_top] = self.token
        return tokens, hidden, scores

    def _answer(self, message: TargetStep) -> tuple[np.ndarray, np.ndarray]:
        if len(message.opens):
            slots = message.opens[:, 0]
            grown = max(0, int(slots.max()) + 1 - len(self._wanted))
            self._wanted = np.pad(self._wanted, ((0, grown), (0, 0)))
            self._wanted[slots] = message.opens[:, 13:15]
        num_rows = len(message.ids)
        if num_rows > len(self._hidden):
            self._hidden = np.zeros((num_rows, self._hidden.shape[1]), np.int32)
        num_draws = int(message.segments[:, 3].sum())
        return np.full(num_draws, self.token, np.int32), self._hidden[:num_rows]


class NullDraft:
    """DRAFTS are ``token``."""

    def __init__(self, token: int = 2):
        self.token = token

    def step(self, control: np.ndarray, hidden: object) -> np.ndarray:
        message = unpack(DraftStep, control)
        return np.full(int(message.segments[:, 7].sum()), self.token, np.int32)

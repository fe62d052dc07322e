"""A target and a draft that answer constants: what is left of a step is the engine's own cost.

Both read the number of tokens wanted from the message and nothing else. Drafts always stand when the two
``token`` are equal, and always fall when they are not.
"""

from __future__ import annotations

import numpy as np

from inkling.protocol import DraftStep, TargetStep, unpack


class NullTarget:
    """TOKENS are ``token``; HIDDEN is zero, int32 [T, hidden_words]."""

    def __init__(self, token: int = 2, hidden_words: int = 1):
        self.token = token
        self._hidden = np.zeros((1, hidden_words), np.int32)

    def step(self, control: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        message = unpack(TargetStep, control)
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

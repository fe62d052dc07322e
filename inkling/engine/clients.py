"""The two callables of the loop: each executes one packed step message."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class TargetClient(Protocol):
    def step(self, control: np.ndarray) -> tuple[np.ndarray, Any]:
        """CONTROL (TargetStep) -> TOKENS int32 [draws] and the hidden states [T, H], opaque to the loop."""
        ...

    def step_scored(self, control: np.ndarray) -> tuple[np.ndarray, Any, np.ndarray]:
        """The same, and LOGPROBS. Called in place of ``step`` when a request of the step wants log probs."""
        ...


class DraftClient(Protocol):
    def step(self, control: np.ndarray, hidden: Any) -> np.ndarray:
        """CONTROL (DraftStep), HIDDEN -> DRAFTS int32, segment by segment."""
        ...

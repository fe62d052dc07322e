"""The target's hidden states of the last steps, where the next process or the next copy finds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inkling.errors import ProtocolError

RING_SLOTS = 2  # a step's states stay while the next step's are written


def output_rows(max_tokens_per_step: int, num_slots: int, num_draft_tokens: int) -> int:
    """R, rows of the longest step, padded: every slot may verify all its drafts."""
    return max(max_tokens_per_step, num_slots * (num_draft_tokens + 1))


@dataclass(frozen=True)
class HiddenRing:
    """``states`` [RING_SLOTS, R, H]: step s has slot s mod RING_SLOTS.

    In memory that target and draft both map, the step number, which both are told, is all that travels. The order of
    their calls is the order of accesses: the target has finished step s before the draft is called for it, and the
    draft has before step s + 1.
    """

    states: Tensor

    def of_step(self, step: int) -> Tensor:
        """[R, H]; the rows beyond those of the step hold older states."""
        return self.states[step % len(self.states)]

    def put(self, step: int, hidden: Tensor) -> None:
        """Stores ``hidden`` [T, H], unless it was written here to begin with. Raises ProtocolError when T exceeds R."""
        slot = self.of_step(step)
        if slot.data_ptr() == hidden.data_ptr():
            return
        if len(hidden) > len(slot):
            raise ProtocolError(f"step {step} has {len(hidden)} rows, the ring of hidden states {len(slot)}")
        slot[: len(hidden)].copy_(hidden)
        if slot.is_cuda:
            torch.cuda.synchronize(slot.device)  # the other process reads as soon as it is called

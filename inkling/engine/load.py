"""What the choice of a draft length knows of the sequences: those of the next step, and what their prompts took."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Prompts:
    """What was computed of the prompts of one or more sequences, again after a preemption, too."""

    rows: float = 0.0
    depth_rows: float = 0.0  # those whose sequence asked for drafts
    steps: float = 0.0  # that carried them; steps that carried others, too, are shared
    tokens: float = 0.0  # of their answers

    def scale(self, factor: float) -> None:
        self.rows *= factor
        self.depth_rows *= factor
        self.steps *= factor
        self.tokens *= factor

    def add(self, other: Prompts) -> None:
        self.rows += other.rows
        self.depth_rows += other.depth_rows
        self.steps += other.steps
        self.tokens += other.tokens


@dataclass(slots=True)
class Load:
    """The sequences that the next step will decode."""

    max_rows: int  # of a target call
    plain: int = 0  # sequences that draft nothing
    drafting: Counter[int] = field(default_factory=Counter)  # most drafts -> sequences that may draft so many
    # the same of all sequences, had nobody given up depths and were every prompt computed
    asked: Counter[int] = field(default_factory=Counter)
    prompt_rows: float = 0.0  # of prompts that go on, in the step just run; the next has about as many
    tokens: int = 0  # of the step just run
    entries: int = 0  # that wait in the windows, over all sequences
    depths: int = 0  # the most that a sequence keeps
    is_ring_short: bool = False  # a window must run all its depths

    @property
    def num_drafting(self) -> int:
        return self.drafting.total()

    def drafts(self, num_drafts: int) -> int:
        """Of a step in which each sequence drafts ``num_drafts`` or the most that it may."""
        return sum(count * min(most, num_drafts) for most, count in self.drafting.items())

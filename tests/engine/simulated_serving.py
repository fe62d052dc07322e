"""Serving by the clock of a cost model: drafts stand by chance, calls take stated times, windows are real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from inkling.engine.draft_length import AutoDraftLength, DraftLength, choose_lengths
from inkling.engine.draft_window import DraftWindow
from inkling.engine.load import Prompts
from inkling.engine.scheduler import Segment

MAX_DEPTHS = 8
SLOW_EVERY = 4000.0  # seconds (stated) between the slow times of an unsteady machine


@dataclass(frozen=True)
class Costs:
    """Seconds (of any unit). ``target(rows)``; a draft call takes ``call`` and ``depth(rows)`` per depth."""

    target: Callable[[int], float]
    depth: Callable[[int], float]
    call: float = 0.0


class SimulatedSequence:
    """What the choice of a draft length sees of a ``Sequence``."""

    finish_reason = ""

    def __init__(self, num_prompt: int, num_tokens: int, num_depths: int, random: Random):
        self.end = num_prompt + num_tokens
        # [token, depth], each in [0, 1): a draft stands where its chance is below the acceptance
        self.chances = [[random.random() for _ in range(MAX_DEPTHS)] for _ in range(num_tokens)]
        self.num_known, self.num_computed = num_prompt, 0
        self.num_depths = self.asked_depths = num_depths
        self.window = DraftWindow(num_depths) if num_depths else None
        self.num_drafts = 0
        self.prompts = Prompts()

    @property
    def num_uncomputed(self) -> int:
        return self.num_known - self.num_computed

    @property
    def max_drafts(self) -> int:
        return max(0, min(self.num_depths, self.end - self.num_known - 1))

    def shrink(self, num_depths: int) -> None:
        self.num_depths = num_depths
        if num_depths:
            self.window.shrink(num_depths)
        else:
            self.window = None


class Simulation:
    """``batch`` sequences at all times, until ``num_tokens`` are out. ``acceptance(tokens so far)``: of a draft
    whose predecessors stood; whether one stands is the same at every length, so runs compare. By the clock one call
    in 50 takes three times as long, all vary by a few percent, and with ``is_unsteady`` the machine is half as fast
    for a while again and again; throughput counts the stated times."""

    def __init__(
        self,
        costs: Costs,
        acceptance: Callable[[int], float],
        *,
        batch: int,
        num_tokens: int,
        num_prompt: int = 32,
        answer: int = 256,
        seed: int = 0,
        is_unsteady: bool = False,
        max_rows: int = 1 << 20,  # of a step: decodes first, then chunks of prompts
    ):
        self.costs, self.acceptance, self.batch = costs, acceptance, batch
        self.num_tokens, self.num_prompt, self.answer = num_tokens, num_prompt, answer
        self.seed, self.is_unsteady, self.max_rows = seed, is_unsteady, max_rows

    def auto(self, num_depths: int) -> float:
        return self.run(AutoDraftLength(num_depths, clock=lambda: self.now), num_depths)

    def fixed(self, num_drafts: int) -> float:
        return self.run(DraftLength(num_drafts), num_drafts)

    def run(self, lengths: DraftLength, num_depths: int) -> float:
        """Tokens per second."""
        self.random, self.now, self.spent, self.tokens = Random(self.seed), 1.0, 0.0, 0
        self.lengths = lengths
        running: list[SimulatedSequence] = []
        started = 0
        while self.tokens < self.num_tokens:
            while len(running) < self.batch:  # the first ones are of any age
                random = Random(f"{self.seed} {started}")
                left = self.answer if self.tokens else random.randint(1, self.answer)
                running.append(SimulatedSequence(self.num_prompt, left, num_depths, random))
                started += 1
            plan = self._plan(running)
            self._target(plan)
            running = [sequence for sequence in running if not sequence.finish_reason]
            self._draft(plan)
        return self.tokens / self.spent

    def _plan(self, running: list[SimulatedSequence]) -> list[Segment]:
        plan, room = [], self.max_rows
        for sequence in sorted(running, key=lambda s: s.num_uncomputed > 1):  # decodes first
            whole = sequence.num_uncomputed + sequence.num_drafts
            if rows := min(whole, room):
                draws = 1 + sequence.num_drafts if rows == whole else 0
                plan.append(Segment(sequence, sequence.num_computed, rows, draws))
                room -= rows
        return plan

    def _spend(self, seconds: float) -> None:
        self.spent += seconds
        seconds *= 1 + 0.03 * self.random.gauss(0, 1)
        seconds *= 3 if self.random.random() < 0.02 else 1
        is_slow = self.is_unsteady and self.spent % SLOW_EVERY < SLOW_EVERY / 3
        self.now += seconds * (2 if is_slow else 1)

    def _target(self, plan: list[Segment]) -> None:
        rows = sum(segment.rows for segment in plan)
        self.lengths.call_starts()
        self._spend(self.costs.target(rows))
        draws = sum(segment.draws for segment in plan)
        self.lengths.target_ran(rows, rows - draws, sum(segment.draws > 0 for segment in plan))
        probability = self.acceptance(self.tokens)
        for segment in plan:
            sequence, drafted = segment.sequence, segment.sequence.num_drafts
            accepted = 0
            if drafted:
                chances = sequence.chances[sequence.num_known - self.num_prompt]
                while accepted < drafted and chances[accepted] < probability:
                    accepted += 1
            if drafted:
                self.lengths.verified(drafted, accepted)
            segment.accepted = accepted
            sequence.num_computed += segment.rows - drafted + accepted
            if segment.draws:
                sequence.num_known += accepted + 1
                self.tokens += accepted + 1
            sequence.num_drafts = 0
            if sequence.num_known >= sequence.end:
                sequence.finish_reason = "length"
                self.lengths.ended(sequence.prompts)
            if sequence.window is not None:
                sequence.window.verified(accepted)

    def _draft(self, plan: list[Segment]) -> None:
        lengths = self.lengths
        choose_lengths(lengths, plan, self.max_rows)
        rows_of_depth: list[int] = []
        segments: list[int] = []
        for segment in plan:
            sequence = segment.sequence
            if sequence.finish_reason or sequence.window is None or sequence.max_drafts == 0:
                continue
            num_drafts = min(sequence.max_drafts, lengths.num_drafts) if sequence.num_uncomputed == 1 else 0
            window = sequence.window.plan(sequence.num_computed, sequence.num_known, num_drafts)
            sequence.num_drafts = window.drafts
            segments += (0, 0, 0, 0, window.first, window.end, window.depths, window.drafts, window.num_known)
            if rows := window.end - window.first:
                rows_of_depth += [0] * (window.depths - len(rows_of_depth))
                for k in range(window.depths):
                    rows_of_depth[k] += rows
        if segments:
            lengths.call_starts()
            self._spend(self.costs.call + sum(self.costs.depth(rows) for rows in rows_of_depth))
            lengths.draft_ran(segments)

"""Prompt rows beside running answers: a lone prompt holds nobody up, a burst is not slowed down."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import pytest

from inkling.engine.pace import MIN_PROMPT_ROWS, StepPace

DECODE_ROWS, MOST = 40, 472  # rows of the answers' part of a step; of its prompts' at most
COSTS = {  # seconds of a step
    "linear": lambda rows: 5.0 + 0.6 * rows,
    "bandwidth, then arithmetic": lambda rows: max(30.0, 0.3 * rows),
}


class Serving:
    """Steps of answers and waiting prompt rows, by the clock of a cost model."""

    def __init__(self, seconds: Callable[[int], float]):
        self.now, self.seconds = 0.0, seconds
        self.pace = StepPace(lambda: self.now)
        self.steps: list[float] = []

    def step(self, decode_rows: int, waiting: int) -> int:
        """Prompt rows that the step takes."""
        prompt = min(waiting, self.pace.prompt_rows(decode_rows, MOST)) if waiting else 0
        self.pace.step_starts(decode_rows + prompt, decode_rows)
        self.steps.append(self.seconds(decode_rows + prompt))
        self.now += self.steps[-1]
        self.pace.step_ran()
        return prompt


@pytest.mark.parametrize("cost", COSTS)
def test_prompts_that_come_now_and_then_stall_no_step(cost: str) -> None:
    serving = Serving(COSTS[cost])
    serving.step(0, 60)
    waiting = 0
    for step in range(400):
        if step % 40 == 39:
            waiting = 400
        waiting -= serving.step(DECODE_ROWS, waiting)
        assert waiting == 0 or step % 40 not in range(20, 39), "a prompt took more than 20 steps"
    usual = median(serving.steps)
    assert usual == COSTS[cost](DECODE_ROWS)
    assert max(serving.steps) <= 2.5 * usual


def test_a_lasting_burst_of_prompts_gets_whole_steps() -> None:
    serving = Serving(COSTS["linear"])
    for _ in range(100):
        serving.step(DECODE_ROWS, 0)
    taken = [serving.step(DECODE_ROWS, 10_000) for _ in range(60)]
    assert taken[0] < 100
    assert taken[-1] == MOST


def test_prompts_without_answers_beside_them_are_not_held_back() -> None:
    serving = Serving(COSTS["linear"])
    for _ in range(100):
        serving.step(DECODE_ROWS, 0)
    assert serving.step(0, 10_000) == MOST
    assert serving.step(DECODE_ROWS, 10_000) == MOST  # the long steps are the usual ones now


def test_every_prompt_gets_on_whatever_its_rows_cost() -> None:
    serving = Serving(lambda rows: float(rows**3))
    for _ in range(100):
        serving.step(DECODE_ROWS, 0)
    assert serving.step(1000, 10_000) == MIN_PROMPT_ROWS

"""Device time of steps: counted while somebody asks for it, and no other."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from inkling.step_clock import ClockReader, StepClock

STEP_S = 0.01


def run(clock: StepClock, steps: int) -> None:
    for _ in range(steps):
        clock.start()
        time.sleep(STEP_S)
        clock.stop()


def test_steps_count_only_while_they_are_asked_for(tmp_path: Path) -> None:
    clock = StepClock(tmp_path / "clock", "cpu")
    reader = ClockReader(tmp_path / "clock")
    run(clock, 2)
    assert reader.read() == (0, 0.0)
    reader.ask(True)
    run(clock, 3)
    reader.ask(False)
    run(clock, 4)
    steps, seconds = reader.read()
    assert steps == 3 and seconds >= 3 * STEP_S


def test_a_step_that_fails_is_not_counted(tmp_path: Path) -> None:
    clock = StepClock(tmp_path / "clock", "cpu")
    reader = ClockReader(tmp_path / "clock")
    reader.ask(True)
    clock.start()  # and no stop
    run(clock, 2)
    assert reader.read()[0] == 2


def test_a_reader_without_a_model_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ClockReader(tmp_path / "clock")

"""What the benchmark of the served model says of rows and answers: bounds, differing tokens, the order of cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_serving import FIGURES, Table, ordered_cells
from benchmarks.gpu_serving_plot import curves, over_plain
from benchmarks.serving import bounds
from benchmarks.serving.answers import Answers, prompt
from benchmarks.serving.cells import Cell, refuse_differing
from benchmarks.serving.counters import Counters, Rounds
from benchmarks.serving.streams import StreamError


def row(batch: int, drafts: str, rate: float, context: int = 2048, **figures: object) -> dict[str, str]:
    given = {
        "context": context,
        "batch": batch,
        "drafts": drafts,
        "tokens_per_s": rate,
        "round_ms": 10.0,
    } | figures
    return dict.fromkeys(FIGURES, "") | {name: str(value) for name, value in given.items()}


def test_bounds_pass_at_their_value_and_miss_below() -> None:
    rows = [row(1, "0", 380), row(1, "3", 449), row(8, "0", 1000), row(8, "5", 1200), row(32, "0", 1000)]
    rows += [row(32, "3", 1790), row(32, "auto", 0.96 * 1790)]
    told = [r["bounds"] for r in bounds.verdicts(rows)]
    assert told[0] == "passed: plain tokens/s (stretch 440) 380 >= 380"
    assert told[1] == "MISSED: best tokens/s (stretch 540) 449 >= 450"
    assert told[2] == told[4] == ""
    assert told[3] == "passed: best over plain 1.2 >= 1.2"
    assert told[5].startswith("MISSED: best over plain 1.79") and told[6].startswith(
        "MISSED: auto over best 0.96"
    )


@pytest.mark.parametrize(
    ("batch", "drafts", "visible", "holds"),
    [(1, "0", 0.7, True), (1, "0", 0.71, False), (1, "3", 1.5, True), (1, "3", 1.51, False)]
    + [(8, "3", 1.0, True), (8, "3", 1.01, False), (32, "0", 0.5, True), (128, "0", 0.51, False)],
)
def test_visible_time_has_a_bound_of_its_own(batch: int, drafts: str, visible: float, holds: bool) -> None:
    (told,) = bounds.verdicts([row(batch, drafts, 1e6, 8192, visible_ms=visible)])
    assert told["bounds"].startswith("passed: visible" if holds else "MISSED: visible"), told["bounds"]


def test_a_failed_cell_is_missed_and_has_a_floor() -> None:
    failed = row(8, "3", 0, tokens_per_s="", error="3 tokens differ")
    (told,) = bounds.verdicts([failed])
    assert told["bounds"] == "MISSED: 3 tokens differ" and told["floor_ms"] == "11.00"


def test_bounds_are_stated_for_one_checkpoint_on_one_device() -> None:
    assert bounds.apply_to({"checkpoint": "synthetic:mini?seed=0", "gpu": "NVIDIA H200"})
    assert not bounds.apply_to({"checkpoint": "synthetic:mini?seed=0", "gpu": "none"})
    assert not bounds.apply_to({"checkpoint": "synthetic:micro", "gpu": "NVIDIA H200"})


def test_answers_survive_and_refuse_other_tokens(tmp_path: Path) -> None:
    file, source, cell = tmp_path / "answers.json", {"seed": 0}, Cell(2, 64, 3)
    known = Answers(file, source)
    refuse_differing(known, cell, [[1, 2, 3], [4, 5]])
    known.save()
    again = Answers(file, source)
    refuse_differing(again, cell, [[1, 2], [4, 5, 6]])
    with pytest.raises(StreamError, match="1 tokens of 1 streams differ: stream 1 from token 2"):
        refuse_differing(again, cell, [[1, 2, 3], [4, 5, 7, 8]])
    refuse_differing(again, cell, [[1, 2, 3], [4, 5, 6, 8]])  # the wrong answer was not kept
    refuse_differing(Answers(file, {"seed": 1}), cell, [[9]])


def test_prompts_are_distinct_and_the_same_in_every_process() -> None:
    assert prompt(0, 64, 1, 1000) == prompt(0, 64, 1, 1000)
    assert len({tuple(prompt(0, length, i, 1000)) for length in (64, 65) for i in range(50)}) == 100


def test_the_first_cells_are_those_that_matter_most() -> None:
    cells = ordered_cells([1, 8], [2048, 8192], [0, 3, 5], auto=False)
    assert [(c.batch, c.context, c.num_drafts) for c in cells] == [
        (1, 2048, 0),
        (1, 2048, 3),
        (8, 2048, 0),
        (8, 2048, 3),
        (1, 2048, 5),
        (8, 2048, 5),
        (1, 8192, 0),
        (8, 8192, 0),
    ]
    assert {c.draft_label for c in ordered_cells([1, 8], [2048, 8192], [0, 3, 5], auto=True)} == {"auto"}


def test_a_run_goes_on_where_one_of_the_same_build_ended(tmp_path: Path) -> None:
    file, now = tmp_path / "rows.csv", {"date": "2026-12-01", "commit": "a"}
    table = Table(file, now | {"date": "2026-11-30"})
    table.add(row(1, "0", 100))
    table.add(row(1, "3", 100, error="the time ran out"))
    assert Table(file, now).has(Cell(1, 2048, 0))
    assert not Table(file, now).has(Cell(1, 2048, 3))
    assert not Table(file, now | {"commit": "b"}).has(Cell(1, 2048, 0))


def test_rounds_are_means_over_the_targets_calls() -> None:
    def counters(time: float, rounds: int) -> Counters:
        target = {
            "exec_count": rounds,
            "request_duration_us": 3e3 * rounds,
            "compute_infer_duration_us": 2e3 * rounds,
        }
        draft = {"request_duration_us": 1e3 * rounds, "compute_infer_duration_us": 500.0 * rounds}
        values = {("inkling_target", name): value for name, value in target.items()}
        return Counters(time, values | {("inkling_mtp", name): value for name, value in draft.items()})

    rounds = Rounds.between(counters(10.0, 100), counters(10.1, 120))
    assert rounds.count == 20 and rounds.round_ms == pytest.approx(5.0)
    assert (rounds.target_ms, rounds.draft_ms, rounds.between_ms) == pytest.approx((3.0, 1.0, 2.5))


def test_curves_leave_failed_cells_out() -> None:
    rows = [row(8, "0", 100), row(1, "0", 50), row(1, "3", 75), row(8, "3", 1, error="x"), row(1, "0", 9, 64)]
    found = curves(rows, "2048")
    assert found == {"0": {1: 50.0, 8: 100.0}, "3": {1: 75.0}}
    assert over_plain(found)["3"] == {1: 1.5}

"""The benchmarks of the served model run from end to end: a small synthetic model on the CPU, then transformers on it."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.server
ROOT = Path(__file__).parents[2]
CHECKPOINT = ("--checkpoint", "synthetic:tiny?seed=0", "--device", "cpu", "--commit", "test")
SMALL = ("--batches", "1", "--batches", "2", "--contexts", "40", "--drafts", "0", "--drafts", "3")
SMALL += ("--servers", "fixed", "--num-tokens", "24", "--warm-tokens", "4", "--room", "200", "--rows", "128")
SMALL += ("--max-rounds", "1", "--client-processes", "2", "--setting", "threads=1")


def run(name: str, *options: object) -> str:
    command = [sys.executable, "-m", f"benchmarks.{name}", *CHECKPOINT, *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def rows(table: Path) -> list[dict[str, str]]:
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_served_model_is_measured_and_compared_with_transformers(tmp_path: Path) -> None:
    served, answers, theirs = (
        tmp_path / "served.csv",
        tmp_path / "answers.json",
        tmp_path / "transformers.csv",
    )
    out = run("gpu_serving", "--table", served, "--answers", answers, *SMALL)
    assert "0 tokens differ, 8 prompts x 128 tokens, drafts [0, 3]" in out
    cells = {(row["batch"], row["drafts"]): row for row in rows(served)}
    assert list(cells) == [("1", "0"), ("1", "3"), ("2", "0"), ("2", "3")]
    for (_, drafts), row in cells.items():
        assert not row["error"]
        empty = [name for name, value in row.items() if not value]
        assert set(empty) <= {"error", "triton"}, empty
        assert (float(row["accepted_length"]) > 1.5) == (drafts == "3")
        assert float(row["draft_infer_ms"]) == 0 or drafts == "3"
    out = run("gpu_serving", "--table", served, "--answers", answers, *SMALL)  # nothing is left to do
    assert len(rows(served)) == 4 and "server ready" not in out
    out = run(
        "transformers_gpu", "--table", theirs, "--served", served, "--answers", answers, "--num-tokens", 24
    )
    forced, plain, mtp = rows(theirs)[:8], *rows(theirs)[8:]
    assert [(row["differing"], row["tokens"]) for row in forced] == [("0", "128")] * 8
    assert all(float(row["largest_difference"]) < 1e-3 for row in forced)
    assert plain["equal_to_served"] == mtp["equal_to_served"] == "1.000"
    assert float(plain["accepted_length"]) == 1 and float(mtp["accepted_length"]) > 2
    assert float(plain["served_tokens_per_s"]) == float(cells["1", "0"]["tokens_per_s"])

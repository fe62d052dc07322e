"""The benchmarks of the served model run from end to end on the CPU: a small synthetic model, then transformers."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.server
ROOT = Path(__file__).parents[2]
CHECKPOINT = ["--checkpoint", "synthetic:tiny?seed=0", "--device", "cpu", "--commit", "test"]
CELLS = "--batches 1 --batches 2 --contexts 40 --drafts 0 --drafts 3 --servers fixed"
SIZES = (
    "--num-tokens 24 --warm-tokens 16 --gate-prompts 2 --gate-tokens 32 --max-rounds 1 --room 200 --rows 128"
)
SMALL = f"{CELLS} {SIZES} --client-processes 2 --setting threads=1".split()


def run(name: str, *options: object) -> str:
    command = [sys.executable, "-m", f"benchmarks.{name}", *CHECKPOINT, *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def rows(table: Path) -> list[dict[str, str]]:
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_served_model_is_measured_and_compared_with_transformers(tmp_path: Path) -> None:
    served, answers, theirs = (tmp_path / name for name in ("served.csv", "answers.json", "transformers.csv"))
    out = run("gpu_serving", "--table", served, "--answers", answers, *SMALL)
    assert "0 tokens differ, 2 prompts x 32 tokens, drafts [0, 3]" in out
    cells = {(row["batch"], row["drafts"]): row for row in rows(served)}
    assert list(cells) == [("1", "0"), ("1", "3"), ("2", "0"), ("2", "3")]
    for (_, drafts), row in cells.items():
        assert not row["error"]
        empty = [name for name, value in row.items() if not value]
        assert set(empty) <= {"error", "triton"}, empty
        assert (float(row["accepted_length"]) > 1.5) == (drafts == "3")
        for time in ("draft_infer_ms", "device_draft_ms"):
            assert (float(row[time]) > 0) == (drafts == "3"), time
    run("transformers_gpu", "--table", theirs, "--served", served, "--answers", answers, "--num-tokens", 24)
    forced, plain, mtp = rows(theirs)[:2], *rows(theirs)[2:]
    assert [(row["differing"], row["tokens"]) for row in forced] == [("0", "32")] * 2
    assert all(float(row["largest_difference"]) < 1e-3 for row in forced)
    assert plain["equal_to_served"] == mtp["equal_to_served"] == "1.000"
    assert float(plain["accepted_length"]) == 1 and float(mtp["accepted_length"]) > 2
    assert float(plain["served_tokens_per_s"]) == float(cells["1", "0"]["tokens_per_s"])

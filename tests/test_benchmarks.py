"""Every benchmark starts: what it imports is there, and nothing hides a package of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = sorted(p.stem for p in (ROOT / "benchmarks").glob("*.py") if "typer.run(" in p.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_shows_its_options(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--help" in done.stdout

"""Targets of the Makefile, run with the interpreter of the tests in place of ``.venv``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


def make(tmp_path: Path, target: str, **variables: str) -> str:
    """What ``make TARGET`` prints; it must succeed. Nothing is installed."""
    stamp = tmp_path / "installed"
    stamp.touch()
    given = {"BIN": str(BIN), "STAMP": str(stamp), **variables}
    done = subprocess.run(
        ["make", target, *(f"{name}={value}" for name, value in given.items())],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout

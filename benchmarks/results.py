"""Rows of a benchmark: appended to its CSV file, as history is data, and printed; and what they were measured on."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def git_commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:  # no git here
        found = ""
    return found or "unknown"


def processor() -> str:
    models = {
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    }
    return f"{', '.join(sorted(models)) or platform.processor()}, {os.cpu_count()} cores"


def append_rows(table: Path, conditions: Mapping[str, object], rows: Sequence[Mapping[str, object]]) -> None:
    """Appends ``rows``, each after the ``conditions`` it was measured in; a new file gets a header."""
    is_new = not table.exists()
    with table.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*conditions, *rows[0]])
        if is_new:
            writer.writeheader()
        writer.writerows({**conditions, **row} for row in rows)


def read_rows(table: Path, conditions: Mapping[str, object]) -> list[dict[str, str]]:
    """The rows measured in these ``conditions``; none when there is no such file."""
    if not table.exists():
        return []
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if all(row.get(name) == str(value) for name, value in conditions.items())]


def print_table(rows: Sequence[Mapping[str, object]]) -> None:
    """``rows`` of the same columns as a Markdown table."""
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")

"""Rows of a benchmark: appended to its CSV file, as history is data, and printed."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path


def append_rows(table: Path, conditions: Mapping[str, object], rows: Sequence[Mapping[str, object]]) -> None:
    """Appends ``rows``, each after the ``conditions`` it was measured in; a new file gets a header."""
    is_new = not table.exists()
    with table.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*conditions, *rows[0]])
        if is_new:
            writer.writeheader()
        writer.writerows({**conditions, **row} for row in rows)


def print_table(rows: Sequence[Mapping[str, object]]) -> None:
    """``rows`` of the same columns as a Markdown table."""
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")

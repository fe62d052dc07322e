"""One picture of ``gpu_serving.csv``: ``python -m benchmarks.gpu_serving_plot``; needs ``pip install -e .[bench]``.

Left, tokens per second of all streams by their number, a line for each number of drafts; right, the same over plain
decoding.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.serving.answers import TABLE

Curves = dict[str, dict[int, float]]  # drafts -> streams -> tokens per second


def curves(rows: Sequence[dict[str, str]], context: str) -> Curves:
    """Of the rows without error; a later row of a cell replaces an earlier one."""
    found: Curves = {}
    for row in rows:
        if row["context"] == context and not row["error"]:
            found.setdefault(row["drafts"], {})[int(row["batch"])] = float(row["tokens_per_s"])
    return {drafts: dict(sorted(points.items())) for drafts, points in sorted(found.items())}


def over_plain(found: Curves) -> Curves:
    plain = found.get("0", {})
    return {
        drafts: {batch: rate / plain[batch] for batch, rate in points.items() if batch in plain}
        for drafts, points in found.items()
    }


def main(
    table: Annotated[Path, typer.Option(help="of gpu_serving")] = TABLE,
    image: Annotated[Path, typer.Option(help="PNG file")] = TABLE.with_suffix(".png"),
    context: Annotated[int, typer.Option(help="prompt tokens")] = 2048,
    commit: Annotated[str, typer.Option(help="whose rows; default: of the last row")] = "",
) -> None:
    """Draws the rows of one commit."""
    from matplotlib.figure import Figure

    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    commit = commit or rows[-1]["commit"]
    mine = [row for row in rows if row["commit"] == commit]
    found = curves(mine, str(context))
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, lines in ((left, found), (right, over_plain(found))):
        for drafts, points in lines.items():
            axes.plot(list(points), list(points.values()), marker="o", label=f"N={drafts}")
        batches = sorted({batch for points in lines.values() for batch in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_xlabel("streams")
        axes.grid(alpha=0.3)
    left.set_yscale("log")
    left.set_ylabel("tokens/s, all streams")
    left.legend()
    right.set_ylabel("over N=0")
    last = mine[-1]
    figure.suptitle(
        f"{last['checkpoint']}, {last['gpu']}, {last['dtype']}, {context} prompt tokens, commit {commit}"
    )
    figure.savefig(image, dpi=150)
    print(image)


if __name__ == "__main__":
    typer.run(main)

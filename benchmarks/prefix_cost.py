"""What prefix reuse costs when nothing hits: demo checkpoint, CPU, in process, prompts without a common prefix.

Engines with and without it take turns on the same prompts, new ones every round, in turns of who goes first; both
give the same tokens. Seconds are CPU time of the one thread that runs everything. Rows go to
``benchmarks/prefix_cost.csv``. Exits with 1 when the bound is missed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from benchmarks.draft_length import CHECKPOINT, ROOT, Models, run
from benchmarks.results import append_rows, print_table
from inkling.settings import Settings
from inkling.text import load_tokenizer

TABLE = Path(__file__).with_suffix(".csv")
LENGTHS = (40, 400)  # of prompts
BOUND = 0.97  # of the tokens per second without prefix reuse


def compare(models: Models, ids: list[int], length: int, rounds: int, requests: int, num_tokens: int) -> dict:
    block = Settings(str(CHECKPOINT)).prefix_block
    engines = {"off": models.engine(), "on": models.engine(prefix_block=block)}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        random = Random(f"{length} {number}")
        prompts = [random.sample(ids, length) for _ in range(requests)]
        turns = list(engines.items())[:: 1 if number % 2 else -1]
        most = models.deployment.num_draft_tokens
        measured = {name: run(engine, prompts, most, num_tokens, time.thread_time) for name, engine in turns}
        if measured["on"][1] != measured["off"][1]:
            sys.exit(f"prompts of {length}: the tokens differ; nothing is reported")
        for name, (seconds, answers) in measured.items():
            if number:  # the first round warms up
                rates[name].append(sum(map(len, answers)) / seconds)
    assert engines["on"].scheduler.prefixes.num_hits == 0, "a prompt hit"
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    return {
        "prompt": length,
        "off_tokens_per_cpu_s": f"{statistics.median(rates['off']):.1f}",
        "on_tokens_per_cpu_s": f"{statistics.median(rates['on']):.1f}",
        "median_ratio": f"{statistics.median(ratios):.3f}",
        "lowest": f"{min(ratios):.3f}",
        "highest": f"{max(ratios):.3f}",
    }


def main(
    rounds: Annotated[
        int, typer.Option(help="rounds that count; the median of their ratios is reported")
    ] = 7,
    requests: Annotated[int, typer.Option(help="of a round, 8 at a time")] = 8,
    num_tokens: Annotated[int, typer.Option(help="of an answer")] = 32,
) -> None:
    tokenizer = load_tokenizer(CHECKPOINT)
    entries = json.loads((ROOT / "demo" / "prompts.json").read_text())
    ids = [token for entry in entries for token in tokenizer.encode(entry["text"]).ids]
    models = Models(threads=1, streams=8)
    rows = [compare(models, ids, length, rounds, requests, num_tokens) for length in LENGTHS]
    conditions = {"date": datetime.now(UTC).date().isoformat(), "cores": os.cpu_count(), "rounds": rounds}
    append_rows(TABLE, conditions | {"requests": requests, "tokens": num_tokens}, rows)
    print_table(rows)
    missed = [row for row in rows if float(row["median_ratio"]) < BOUND]
    for row in missed:
        print(
            f"MISSED: prompts of {row['prompt']}: {row['median_ratio']} of the rate without (bound {BOUND})"
        )
    sys.exit(bool(missed))


if __name__ == "__main__":
    typer.run(main)

"""Speed on the CPU, demo checkpoint: speculation, transformers, and eight streams. ``make bench``.

Everything is compared side by side in one run: each pair alternates, round by round, on the same prompts. First the
gate: greedy tokens must be equal with drafting off, with every N that is timed, and in transformers. Rows go to
``benchmarks/cpu.csv`` with hardware, versions and commit; the table is printed as Markdown.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.results import ROOT, append_rows, git_commit, processor
from inkling.client import stream_http
from inkling.server import RunningServer, ServerOptions
from inkling.settings import Settings
from inkling.text import load_tokenizer

CHECKPOINT = ROOT / "demo" / "checkpoint"
TABLE = Path(__file__).with_suffix(".csv")
MAX_TOKENS = 96
N = 3
STREAMS = 8


@dataclass
class Measured:
    """Tokens per second of each round, and the accepted length where there was one."""

    name: str
    rates: list[float]
    accepted_length: float = 1.0

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


def generate_http(url: str, ids: list[int], num_drafts: int) -> tuple[list[int], int]:
    """Tokens, and how many of them were accepted drafts."""
    request = {
        "input_ids": ids,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "num_draft_tokens": num_drafts,
        "return_perf_metrics": True,
    }
    responses = list(stream_http(url, request))
    return [t for r in responses for t in r["output_ids"]], responses[-1]["total_accepted_draft_tokens"]


def transformers_generate() -> Callable[[list[int]], list[int]]:
    """Greedy ``generate`` of transformers in this process, fp32, on the same weights, with its best attention."""
    from transformers import InklingConfig, InklingForConditionalGeneration, InklingVisionConfig

    config = InklingConfig.from_pretrained(CHECKPOINT)
    tower = {"patch_size": 4, "num_hidden_layers": 4, "text_hidden_size": config.text_config.hidden_size}
    config.vision_config = InklingVisionConfig(**tower)  # unused; the default one takes 1.5 TB
    model = InklingForConditionalGeneration.from_pretrained(
        CHECKPOINT, config=config, dtype=torch.float32
    ).eval()

    def generate(ids: list[int]) -> list[int]:
        tokens = torch.tensor([ids])
        with torch.inference_mode():
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                min_new_tokens=MAX_TOKENS,
                max_new_tokens=MAX_TOKENS,
                pad_token_id=0,
            )
        return out[0, len(ids) :].tolist()

    return generate


def best_threads(run: Callable[[list[int]], object], prompts: list[list[int]]) -> int:
    """Sets the number of torch threads, one or all cores, with which ``run`` is fastest here."""
    rates = {}
    for threads in {1, os.cpu_count() or 1}:
        torch.set_num_threads(threads)
        rates[threads] = timed(run, prompts)
    best = max(rates, key=rates.get)
    torch.set_num_threads(best)
    return best


def timed(run: Callable[[list[int]], object], prompts: list[list[int]], streams: int = 1) -> float:
    """Tokens per second over all prompts, ``streams`` at a time."""
    start = time.perf_counter()
    if streams == 1:
        for ids in prompts:
            run(ids)
    else:
        with ThreadPoolExecutor(streams) as clients:
            list(clients.map(run, prompts))
    return len(prompts) * MAX_TOKENS / (time.perf_counter() - start)


def main(
    rounds: Annotated[int, typer.Option(help="rounds of each pair; the median counts")] = 3,
    num_prompts: Annotated[int, typer.Option(help="held-out prompts, at most 40")] = 40,
    threads: Annotated[int, typer.Option(help="torch threads of each model; 0: every core")] = 0,
    table: Annotated[Path, typer.Option(help="CSV file that the rows are appended to")] = TABLE,
) -> None:
    tokenizer = load_tokenizer(CHECKPOINT)
    entries = json.loads((ROOT / "demo" / "prompts.json").read_text())[:num_prompts]
    prompts = [tokenizer.encode(entry["text"]).ids for entry in entries]
    settings = Settings(checkpoint=str(CHECKPOINT), threads=threads, draft_length="fixed")
    ports = ServerOptions(http_port=0, grpc_port=0, metrics_port=0)
    reference = transformers_generate()
    with RunningServer(settings, ports) as server:
        url = server.http_url
        accepted = gate(url, prompts, reference)
        reference_threads = best_threads(reference, prompts[:2])
        off = Measured("N=0, HTTP, 1 stream", [])
        on = Measured(f"N={N}, HTTP, 1 stream", [], accepted)
        golden = Measured(f"transformers generate, in process, {reference_threads} threads", [])
        many = Measured(f"N={N}, HTTP, {STREAMS} streams", [], accepted)
        for _ in range(rounds):
            off.rates.append(timed(lambda ids: generate_http(url, ids, 0), prompts))
            on.rates.append(timed(lambda ids: generate_http(url, ids, N), prompts))
            golden.rates.append(timed(reference, prompts))
            many.rates.append(timed(lambda ids: generate_http(url, ids, N), prompts, STREAMS))
    report([off, on, golden, many], settings, rounds, num_prompts, table)
    for name, ratio, bound in (
        (f"N={N} over N=0, one stream", on.median / off.median, 1.5),
        (f"N={N} over transformers", on.median / golden.median, 2.0),
        (f"{STREAMS} streams over one", many.median / on.median, 2.0),
    ):
        print(f"{name}: {ratio:.2f}x (bound {bound}x){'' if ratio >= bound else ' MISSED'}")


def gate(url: str, prompts: list[list[int]], reference: Callable[[list[int]], list[int]]) -> float:
    """Ends the run unless all three give the same tokens; returns the mean accepted length."""
    num_tokens = num_accepted = 0
    for number, ids in enumerate(prompts):
        plain, _ = generate_http(url, ids, 0)
        drafted, accepted = generate_http(url, ids, N)
        if not plain == drafted == reference(ids):
            sys.exit(f"prompt {number}: the tokens differ; nothing is timed")
        num_tokens, num_accepted = num_tokens + len(drafted), num_accepted + accepted
    return num_tokens / (num_tokens - num_accepted)


def report(measured: list[Measured], settings: Settings, rounds: int, num_prompts: int, table: Path) -> None:
    conditions = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": git_commit(),
        "hardware": processor(),
        "threads": settings.num_threads,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "tritonserver": "2.51.0",
        "prompts": num_prompts,
        "tokens": MAX_TOKENS,
        "rounds": rounds,
    }
    rows = [
        {
            "what": m.name,
            "tokens_per_s": f"{m.median:.1f}",
            "lowest": f"{min(m.rates):.1f}",
            "highest": f"{max(m.rates):.1f}",
            "accepted_length": f"{m.accepted_length:.2f}",
        }
        for m in measured
    ]
    append_rows(table, conditions, rows)
    print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    print("| what | tokens/s | lowest-highest | accepted length |\n|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['what']} | {row['tokens_per_s']} | {row['lowest']}-{row['highest']} | {row['accepted_length']} |"
        )


if __name__ == "__main__":
    typer.run(main)

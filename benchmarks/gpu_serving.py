"""Speed of the real server, gRPC streams on its own machine: ``python -m benchmarks.gpu_serving``.

First the gate: every number of drafts gives the same tokens. Then cells, the important ones first: streams of
distinct random prompts, measured while all of them decode; prompts are in the time to first token alone. The tokens
of every stream are compared with all others of its prompt; a cell with a differing one has no figures. The numbers
of drafts are chosen request by request; only ``auto`` wants a server of its own. Prefix reuse is off: every prompt is
computed. Device time comes from a few more rounds after those that are timed, so that counting it slows no figure.

A row is written as it comes. Started again with the same table and answers, a run goes on where it ended. Exits with
1 when a bound is missed (they are stated for ``synthetic:mini`` on one H200) or a cell failed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.results import append_rows, git_commit, print_table, read_rows
from benchmarks.serving import bounds
from benchmarks.serving.answers import ANSWERS, TABLE, Answers
from benchmarks.serving.cells import Cell, Load, Window, measure, refuse_differing
from benchmarks.serving.conditions import conditions, installed
from benchmarks.serving.streams import Clients, StreamError
from inkling.client import stream_grpc
from inkling.config import ModelConfig
from inkling.memory import sequence_bytes
from inkling.server import RunningServer, ServerOptions
from inkling.settings import Settings

DRAFTS = (0, 3, 5, 8, 1)
MAX_FAILED = 2  # cells in a row; then the server is taken to be lost
NUM_TOP = 20  # likeliest tokens kept of each position, for ``benchmarks.transformers_gpu``
FIGURES = (
    "rounds",
    "tokens_per_s",
    "lowest",
    "highest",
    "tokens_per_s_user",
    "token_ms",
    "ttft_ms",
    "ttft_max_ms",
    "gap_ms",
    "gap_p99_ms",
    "tokens_per_chunk",
    "accepted_length",
    "round_ms",
    "target_ms",
    "draft_ms",
    "target_infer_ms",
    "draft_infer_ms",
    "between_ms",
    "device_target_ms",
    "device_draft_ms",
    "visible_ms",
    "busy",
    "error",
)
SHOWN = (
    "context",
    "batch",
    "drafts",
    "tokens_per_s",
    "tokens_per_s_user",
    "accepted_length",
    "ttft_ms",
    "gap_ms",
)
SHOWN += ("gap_p99_ms", "round_ms", "floor_ms", "visible_ms", "busy", "bounds")


def ordered_cells(
    batches: Sequence[int], contexts: Sequence[int], drafts: Sequence[int], auto: bool
) -> list[Cell]:
    """The cells of one server, those first whose rows matter most: short contexts, few streams, few drafts.

    Longer contexts than the first are measured plain, and with the deployment's choice.
    """
    if auto:
        return [Cell(batch, context, None) for context in contexts for batch in batches]
    short, *longer = contexts
    first = [n for n in drafts if n in DRAFTS[:2]]
    cells = [Cell(batch, short, n) for batch in batches for n in first]
    cells += [Cell(batch, short, n) for batch in batches for n in drafts if n not in first]
    return cells + [Cell(batch, context, 0) for context in longer for batch in batches]


def gate(url: str, load: Load, context: int, drafts: Sequence[int]) -> None:
    """Raises StreamError unless all numbers of drafts give the same tokens."""
    for cell in (Cell(load.gate_prompts, context, n) for n in sorted(drafts)):
        answers = [
            [token for r in responses for token in r["output_ids"]] for responses in ask(url, load, cell, {})
        ]
        refuse_differing(load.answers, cell, answers)
    told = f"{load.gate_prompts} prompts x {load.gate_tokens} tokens, drafts {sorted(drafts)}"
    print(f"0 tokens differ, {told}", flush=True)


def keep_scores(url: str, load: Load, context: int, num_drafts: int) -> None:
    """Answers again, with the log probs of the likeliest tokens, for ``benchmarks.transformers_gpu``."""
    cell = Cell(load.gate_prompts, context, num_drafts)
    scored = []
    for index, responses in enumerate(ask(url, load, cell, {"num_top_log_probs": NUM_TOP})):
        ids = [token for response in responses for token in response["output_ids"]]
        top = [row for response in responses for row in json.loads(response["top_log_probs"])]
        scored.append({"context": context, "index": index, "ids": ids, "top": top})
    refuse_differing(load.answers, cell, [answer["ids"] for answer in scored])
    load.answers.scored[:] = scored
    load.answers.save()


def ask(url: str, load: Load, cell: Cell, more: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The responses of each stream of the cell, all together, to their ends. ``more``: inputs."""

    def responses(index: int) -> list[dict[str, Any]]:
        request = cell.request(load.seed, index, load.vocab_size, load.gate_tokens) | more
        return list(stream_grpc(url, request, load.round_s))

    with ThreadPoolExecutor(cell.batch) as threads:
        return list(threads.map(responses, range(cell.batch)))


def row_of(cell: Cell, windows: Sequence[Window], error: str) -> dict[str, str]:
    """Medians over the windows, as the table has them."""
    figures = [window.figures() for window in windows]
    row = cell.key | dict.fromkeys(FIGURES, "") | {"rounds": str(len(windows)), "error": error}
    for name in set().union(*figures):
        row[name] = f"{statistics.median(f[name] for f in figures if name in f):.4g}"
    if figures:
        rates = [f["tokens_per_s"] for f in figures]
        row |= {"lowest": f"{min(rates):.4g}", "highest": f"{max(rates):.4g}"}
    return row


class Table:
    """The rows of one build and machine: written as they come, read back when a run goes on."""

    def __init__(self, file: Path, conditions: dict[str, str]):
        self._file, self._conditions = file, conditions
        same = {name: value for name, value in conditions.items() if name != "date"}
        rows = [row for row in read_rows(file, same) if not row["error"]]
        self.rows = [{name: value for name, value in row.items() if name not in conditions} for row in rows]

    def has(self, cell: Cell) -> bool:
        return any(cell.key.items() <= row.items() for row in self.rows)

    def add(self, row: dict[str, str]) -> None:
        append_rows(self._file, self._conditions, [row])
        self.rows.append(row)


def _say(line: str) -> None:
    if " request id=" not in line:
        print(line, flush=True)


@contextmanager
def started(settings: Settings) -> Iterator[RunningServer]:
    options = ServerOptions(http_port=0, grpc_port=0, metrics_port=0)
    begin = time.monotonic()
    with RunningServer(settings, options, report=_say) as server:
        print(f"{settings.draft_length} server ready after {time.monotonic() - begin:.1f} s", flush=True)
        yield server


def run_cells(
    server: RunningServer, load: Load, cells: Sequence[Cell], table: Table, last_start: float
) -> None:
    num_failed = 0  # in a row
    for cell in cells:
        name = f"context {cell.context} batch {cell.batch} drafts {cell.draft_label}"
        if time.monotonic() > last_start or num_failed == MAX_FAILED:
            print(
                f"{name}: {'out of time' if num_failed < MAX_FAILED else 'given up'}, not measured",
                flush=True,
            )
            continue
        windows: list[Window] = []
        error, begin = "", time.monotonic()
        try:
            windows = measure(server, load, cell)
        except StreamError as failure:
            error = str(failure)
        num_failed = num_failed + 1 if error else 0
        row = row_of(cell, windows, error)
        table.add(row)
        load.answers.save()
        shown = ", ".join(f"{key} {row[key]}" for key in SHOWN[3:-1] if row.get(key))
        print(f"{name}: {error or shown} ({time.monotonic() - begin:.1f} s)", flush=True)


def report(table: Table, measured_in: dict[str, str]) -> bool:
    """Whether no cell failed and no bound was missed."""
    rows = table.rows
    if bounds.apply_to(measured_in):
        rows = bounds.verdicts(rows)
    print(", ".join(f"{name} {value}" for name, value in measured_in.items()))
    print_table([{name: row.get(name, "") for name in SHOWN} for row in rows])
    return not any(row["error"] or "MISSED" in row.get("bounds", "") for row in rows)


def settings_of(
    checkpoint: str, device: str, load: Load, batch: int, drafts: int, rows: int, more: list[str]
) -> Settings:
    """Caches for ``batch`` sequences of the whole context; ``rows``: of a step. ``more``: NAME=VALUE of settings."""
    values: dict[str, object] = {
        "checkpoint": checkpoint,
        "device": device,
        "num_draft_tokens": drafts,
        "max_context": load.max_context,
        "max_running_sequences": batch,
        "max_tokens_per_step": rows,
        "max_prompt_chunk": rows,
        "prefix_cache": "off",
    }
    settings = Settings.from_values(values | dict(pair.split("=", 1) for pair in more))
    dtype = getattr(torch, settings.torch_dtype_name)
    config = ModelConfig.from_dir(checkpoint)
    each = sequence_bytes(config, load.max_context, drafts, dtype, max_chunk=rows)
    return replace(settings, cache_bytes=(batch + 1) * each)


def main(
    checkpoint: Annotated[str, typer.Option(help="directory, or synthetic:NAME")] = "synthetic:mini?seed=0",
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    table: Annotated[Path, typer.Option(help="CSV file the rows are appended to")] = TABLE,
    answers: Annotated[
        Path, typer.Option(help="tokens served so far; transformers_gpu reads them")
    ] = ANSWERS,
    batches: Annotated[list[int], typer.Option(help="streams at a time")] = (1, 8, 32, 128),
    contexts: Annotated[list[int], typer.Option(help="prompt tokens; beyond the first: plain and auto")] = (
        2048,
        8192,
    ),
    drafts: Annotated[list[int], typer.Option(help="numbers of drafts, 0 among them")] = DRAFTS,
    servers: Annotated[list[str], typer.Option(help="draft lengths: fixed, auto")] = ("fixed", "auto"),
    num_tokens: Annotated[int, typer.Option(help="measured, of each stream")] = 256,
    warm_tokens: Annotated[int, typer.Option(help="of each stream, before that")] = 64,
    room: Annotated[int, typer.Option(help="positions beyond the longest prompt")] = 2048,
    rows: Annotated[int, typer.Option(help="max_tokens_per_step")] = 2048,
    max_rounds: Annotated[int, typer.Option(help="of a cell; the median counts")] = 3,
    learning_rounds: Annotated[int, typer.Option(help="of a cell of auto, before them: it learns")] = 3,
    cell_s: Annotated[float, typer.Option(help="no round of a cell starts later")] = 12.0,
    round_s: Annotated[float, typer.Option(help="a round that takes longer is given up")] = 60.0,
    minutes: Annotated[float, typer.Option(help="no cell starts later")] = 60.0,
    gate_prompts: Annotated[int, typer.Option(help="compared first, and scored for transformers_gpu")] = 8,
    gate_tokens: Annotated[int, typer.Option(help="of each of those")] = 128,
    client_processes: Annotated[int, typer.Option(help="that read the streams")] = 8,
    seed: Annotated[int, typer.Option(help="of the prompts")] = 0,
    setting: Annotated[list[str], typer.Option(help="NAME=VALUE of the server, repeatable")] = (),
    commit: Annotated[str, typer.Option(help="shown in the rows; default: git describe")] = "",
) -> None:
    """Measures the server and appends a row for each cell."""
    last_start = time.monotonic() + 60 * minutes
    config, most = ModelConfig.from_dir(checkpoint), max(batches)
    source = {"checkpoint": checkpoint, "device": device, "seed": seed, "commit": commit or git_commit()}
    with Clients(most, min(most, client_processes)) as clients:
        limits = (max(contexts) + room, num_tokens, warm_tokens, max_rounds, learning_rounds, cell_s, round_s)
        load = Load(
            clients, Answers(answers, source), seed, config.vocab_size, *limits, gate_prompts, gate_tokens
        )
        settings = settings_of(checkpoint, device, load, most, max(drafts), rows, list(setting))
        measured_in = conditions(checkpoint, device, settings.torch_dtype_name, source["commit"])
        measured_in |= {"triton": installed("triton"), "tritonserver": "2.51.0", "tokens": str(num_tokens)}
        measured_in |= {"seed": str(seed), "settings": " ".join(setting)}
        kept = Table(table, measured_in)
        for length in servers:
            cells = [c for c in ordered_cells(batches, contexts, drafts, length == "auto") if not kept.has(c)]
            if cells:
                with started(replace(settings, draft_length=length)) as server:
                    if length == "fixed":
                        gate(server.grpc_url, load, contexts[0], drafts)
                        keep_scores(server.grpc_url, load, contexts[0], max(drafts))
                    run_cells(server, load, cells, kept, last_start)
    sys.exit(not report(kept, measured_in))


if __name__ == "__main__":
    typer.run(main)

"""Decoding rounds of the CUDA runners in this process: ``python -m benchmarks.gpu_rounds CHECKPOINT``.

A round is one target step and one draft step for the whole batch. Of each, the time that the two calls take, what the
GPU needs for it (the same graphs replayed one behind the other), and the rest, which a client sees: ``visible``. The
engine's own time between the calls is a column of its own, since a server spends it in another process. Rows are
printed and appended as they come; a part that outlasts its limit gives what it has.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from random import Random
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.engine import NoReply
from benchmarks.results import append_rows
from inkling.deployment import Deployment
from inkling.engine.channel import Session
from inkling.engine.loop import Engine
from inkling.engine.pages import Model
from inkling.engine.request import GenerateRequest, StopRules
from inkling.engine.scheduler import EngineLimits
from inkling.model.cuda_draft import CudaDraftRunner
from inkling.model.cuda_graphs import StepGraphs
from inkling.model.cuda_runner import CudaTargetRunner
from inkling.model.load import runner_sizes
from inkling.model.weights import load_draft, load_target
from inkling.protocol import KEY_WORDS
from inkling.settings import Settings

SESSION = Session(np.zeros(KEY_WORDS, np.int32), 1)
WARM_ROUNDS, MOST_ROUNDS = 10, 200
REPLAYS = 20  # of a graph, to time it alone
ROOT = Path(__file__).parents[1]


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


class Runners:
    """Target and draft of a checkpoint; fewer drafts than ``num_drafts`` are a matter of the requests."""

    def __init__(self, checkpoint: str, num_drafts: int, slots: int, context: int, rows: int):
        values = {
            "checkpoint": checkpoint, "dtype": "bfloat16", "num_draft_tokens": num_drafts, "max_context": context,
            "max_running_sequences": slots, "max_tokens_per_step": rows, "cache_bytes": 16 << 30,
            "prefix_cache": "off", "draft_length": "fixed",
        }  # fmt: skip
        self.deployment = Deployment.of(Settings.from_values(values))
        self.config = self.deployment.config

    def load(self) -> None:
        checkpoint, depths = self.deployment.settings.checkpoint, self.deployment.num_draft_tokens
        load = {"dtype": torch.bfloat16, "device": "cuda"}
        weights = load_target(checkpoint, self.config, **load)
        say(f"weights of the target: {torch.cuda.memory_allocated() / 1e9:.2f} GB")
        rows = self.deployment.settings.max_tokens_per_step
        sizes = runner_sizes(self.deployment, Model.TARGET, SESSION.generation)
        self.target = CudaTargetRunner(self.config, weights, **sizes, max_tokens_per_step=rows)
        self.draft = None
        if depths:
            draft = load_draft(checkpoint, self.config, depths, **load)
            sizes = runner_sizes(self.deployment, Model.DRAFT, SESSION.generation)
            shared = weights.embed, weights.head
            self.draft = CudaDraftRunner(self.config, draft, *shared, **sizes, max_tokens_per_step=rows)
        say(f"with caches and buffers: {torch.cuda.memory_allocated() / 1e9:.2f} GB")


@dataclass
class Timed:
    """A runner's calls, timed; ``keys``: the graphs that were replayed."""

    call: Callable
    graphs: StepGraphs
    seconds: list[float] = field(default_factory=list)
    keys: Counter[Hashable] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._replay, self.graphs.replay = self.graphs.replay, self.replay

    def replay(self, key: Hashable) -> None:
        self.keys[key] += 1
        self._replay(key)

    def step(self, *arguments: object) -> object:
        start = time.perf_counter()
        result = self.call(*arguments)
        self.seconds.append(time.perf_counter() - start)
        return result

    def forget(self) -> None:
        self.seconds.clear()
        self.keys.clear()

    def finish(self) -> None:
        self.graphs.replay = self._replay


def gpu_seconds(timed: Timed) -> float:
    """Of a call: each of its graphs many times in a row, weighted by how often it came."""
    total = 0.0
    for key, times in timed.keys.items():
        with timed.graphs.stream():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for run in range(REPLAYS + 3):
                if run == 3:
                    start.record()
                timed._replay(key)
            end.record()
            end.synchronize()
        total += times * start.elapsed_time(end) / REPLAYS / 1e3
    return total / max(1, len(timed.seconds))


def measure(runners: Runners, batch: int, num_drafts: int, context: int, limit_s: float) -> dict[str, object]:
    """Prompts of ``context`` tokens, then rounds of decoding, as many as fit."""
    deployment = runners.deployment
    limits = EngineLimits.of(deployment.settings, deployment.max_context, deployment.num_draft_tokens)
    target = Timed(runners.target.step, runners.target.graphs)
    draft = Timed(runners.draft.step, runners.draft.graphs) if runners.draft is not None else None
    engine = Engine(limits, deployment.layout, target, draft, SESSION)
    random, left = Random(batch), deployment.max_context - context
    begin = time.monotonic()
    for _ in range(batch):
        ids = tuple(random.randrange(runners.config.vocab_size) for _ in range(context))
        engine.submit(GenerateRequest(ids, stop=StopRules(left), num_draft_tokens=num_drafts), NoReply())
    while any(s.num_uncomputed != 1 for s in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    prompt_s = time.monotonic() - begin
    for _ in range(WARM_ROUNDS):
        engine.step()
    for timed in filter(None, (target, draft)):
        timed.forget()
    tokens, rounds, start = _emitted(engine), [], time.monotonic()
    while len(rounds) < MOST_ROUNDS and time.monotonic() - start < limit_s:
        if min(s.max_tokens - s.num_emitted for s in engine.scheduler.running) <= 2 * (num_drafts + 1):
            break
        began = time.perf_counter()
        engine.step()
        rounds.append(time.perf_counter() - began)
    assert rounds and len(engine.scheduler.running) == batch, "sequences ended while timed"
    tokens = _emitted(engine) - tokens
    row = _row(runners, target, draft, rounds, tokens)
    return {"batch": batch, "drafts": num_drafts, "context": context, "prompts_s": f"{prompt_s:.2f}", **row}


def _emitted(engine: Engine) -> int:
    return sum(sequence.num_emitted for sequence in engine.scheduler.running)


def _row(
    runners: Runners, target: Timed, draft: Timed | None, rounds: list[float], tokens: int
) -> dict[str, object]:
    calls = sum(target.seconds) / len(rounds)
    gpu = target_gpu = gpu_seconds(target)
    target.finish()
    if draft is not None and draft.seconds:
        calls += sum(draft.seconds) / len(rounds)
        share = len(draft.seconds) / len(rounds)
        gpu += share * gpu_seconds(draft)
        draft.finish()
    sequences = len(target.seconds) and tokens / len(rounds)
    milliseconds = {
        "calls_ms": calls, "gpu_ms": gpu, "gpu_target_ms": target_gpu, "visible_ms": calls - gpu,
        "engine_ms": sum(rounds) / len(rounds) - calls, "median_round_ms": statistics.median(rounds),
    }  # fmt: skip
    return {
        "rounds": len(rounds),
        **{name: f"{1e3 * value:.3f}" for name, value in milliseconds.items()},
        "tokens_per_round": f"{sequences:.2f}",
        "tokens_per_s_of_calls": f"{tokens / len(rounds) / calls:.0f}",
        "graphed": f"{sum(n for k, n in target.keys.items() if len(k) == 2) / len(target.seconds):.2f}",
    }


def main(
    checkpoint: Annotated[str, typer.Argument(help="directory, or synthetic:micro?seed=0")],
    batches: Annotated[str, typer.Option(help="running sequences, comma-separated")] = "1,8,32",
    drafts: Annotated[str, typer.Option(help="drafts of each request, comma-separated")] = "0,1,3",
    context: Annotated[int, typer.Option(help="prompt tokens of each sequence")] = 2048,
    rows: Annotated[int, typer.Option(help="rows of one target call")] = 2048,
    cell_seconds: Annotated[float, typer.Option(help="limit of the timed rounds of one cell")] = 3.0,
    minutes: Annotated[float, typer.Option(help="no cell starts later than this")] = 6.0,
    table: Annotated[Path, typer.Option(help="CSV file the rows are appended to")] = Path("gpu_rounds.csv"),
) -> None:
    """Times rounds at every batch and number of drafts and appends the rows to a table."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device: rounds are timed on a GPU")
    deadline = time.monotonic() + 60 * minutes
    sizes = [int(batch) for batch in batches.split(",")]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    conditions = {
        "date": datetime.now(UTC).date().isoformat(), "commit": commit.stdout.strip(),
        "device": torch.cuda.get_device_name(), "checkpoint": checkpoint,
    }  # fmt: skip
    lengths = [int(number) for number in drafts.split(",")]
    runners = Runners(checkpoint, max(lengths), max(sizes), context + 1024, rows)
    runners.load()
    for runner in filter(None, (runners.target, runners.draft)):
        runner.capture(say)
    say(f"with graphs: {torch.cuda.memory_reserved() / 1e9:.2f} GB reserved")
    for batch, num_drafts in product(sizes, lengths):
        if time.monotonic() > deadline:
            say("out of time")
            return
        row = measure(runners, batch, num_drafts, context, cell_seconds)
        append_rows(table, conditions, [row])
        say(", ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    typer.run(main)

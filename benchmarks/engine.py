"""The engine alone: null models answer at once, in process and over the server's calls between models.

A round is one step of one sequence: a target call and a draft call for the whole batch, N drafts verified for each
sequence. In process: rounds per second. Over BLS: seconds a round takes beyond the engine's own time, beside the two
bare calls of a round, timed in the same server without an engine. Rows go to ``benchmarks/engine.csv``.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import tritonclient.http
import typer

from benchmarks.results import append_rows, print_table
from inkling import tritonserver
from inkling.client import stream_http
from inkling.engine.channel import Session
from inkling.engine.loop import Engine
from inkling.engine.null_models import NullDraft, NullTarget
from inkling.engine.outbox import Chunk
from inkling.engine.pages import CacheLayout, PoolLayout
from inkling.engine.request import GenerateRequest, StopRules
from inkling.engine.scheduler import EngineLimits
from inkling.protocol import KEY_WORDS
from inkling.server import RunningServer, ServerOptions
from inkling.settings import Settings

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "demo" / "checkpoint"  # its shapes and its tokenizer; no weights are read
NULL_REPOSITORY = Path(__file__).with_name("null_repository")
TABLE = Path(__file__).with_suffix(".csv")
N = 3
BATCHES = (1, 64)
PROMPT = list(range(3, 13))
CONTEXT = 4096
BOUND = 20_000  # sequence-rounds per second in process, at 64 sequences


class NoReply:
    def send(self, chunk: Chunk) -> None:
        if chunk.error is not None:
            raise chunk.error

    def is_cancelled(self) -> bool:
        return False


def null_engine(batch: int, auto: bool, draft_token: int) -> Engine:
    limits = EngineLimits(CONTEXT, batch, 512, batch, N, auto_draft_length=auto)
    pools = tuple(PoolLayout(16, 1 + batch * (CONTEXT // 16 + 64)) for _ in range(3))
    session = Session(np.zeros(KEY_WORDS, np.int32), 1)
    return Engine(limits, CacheLayout(512, N, pools, pools), NullTarget(), NullDraft(draft_token), session)


def in_process(batch: int, rounds: int, auto: bool = False, draft_token: int = 2) -> float:
    """Seconds of a step of ``batch`` sequences. A ``draft_token`` other than 2 never stands."""
    engine = null_engine(batch, auto, draft_token)
    request = GenerateRequest(tuple(PROMPT), stop=StopRules(CONTEXT - len(PROMPT)), num_draft_tokens=N)
    for _ in range(batch):
        engine.submit(request, NoReply(), stream=True)
    for _ in range(5):  # prompts
        engine.step()
    start = time.perf_counter()
    for _ in range(rounds):
        engine.step()
        engine.sender.send_ready()
    seconds = (time.perf_counter() - start) / rounds
    assert len(engine.scheduler.running) == batch, "sequences ended while timed; lower the rounds"
    return seconds


def served(url: str, batch: int, rounds: int) -> float:
    """Seconds of a step of ``batch`` sequences in the server. All drafts stand: N + 1 tokens a round."""
    request = {"input_ids": PROMPT, "max_tokens": rounds * (N + 1), "ignore_eos": True, "stream": False}

    def run(_: int) -> int:
        return sum(len(response["output_ids"]) for response in stream_http(url, request))

    with ThreadPoolExecutor(batch) as clients:
        start = time.perf_counter()
        tokens = list(clients.map(run, range(batch)))
        seconds = time.perf_counter() - start
    assert tokens == [rounds * (N + 1)] * batch, "an answer has another length"
    return seconds / rounds


def bare_calls(url: str, batch: int, rounds: int) -> float:
    """Median seconds of one target and one draft call with the tensors of such a step."""
    inputs = []
    for name, value in (("BATCH", batch), ("NUM_DRAFTS", N), ("ROUNDS", rounds)):
        tensor = tritonclient.http.InferInput(name, [1], "INT32")
        tensor.set_data_from_numpy(np.array([value], np.int32))
        inputs.append(tensor)
    client = tritonclient.http.InferenceServerClient(url, network_timeout=120.0)
    seconds = client.infer("bls_probe", inputs).as_numpy("SECONDS")
    client.close()
    return float(np.median(seconds))


def over_bls(rounds: int, repeats: int) -> dict[int, tuple[float, float, float]]:
    """By batch: seconds of a step in process, in the server, and of its two bare calls; medians."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        shutil.copytree(tritonserver.model_repository(), repository)
        shutil.copytree(NULL_REPOSITORY, repository, dirs_exist_ok=True)
        settings = Settings(
            str(CHECKPOINT),
            num_draft_tokens=N,
            draft_length="fixed",
            max_context=CONTEXT,
            max_running_sequences=max(BATCHES),
        )
        options = ServerOptions(http_port=0, grpc_port=0, metrics_port=0)
        with RunningServer(settings, options, model_repository=repository, report=print) as server:
            measured = {batch: ([], [], []) for batch in BATCHES}
            for _ in range(repeats):
                for batch, (local, remote, bare) in measured.items():
                    local.append(in_process(batch, rounds))
                    remote.append(served(server.http_url, batch, rounds))
                    bare.append(bare_calls(server.http_url, batch, rounds))
    return {batch: tuple(map(statistics.median, times)) for batch, times in measured.items()}


def report(rows: list[dict[str, object]]) -> None:
    conditions = {"date": datetime.now(UTC).date().isoformat(), "machine": platform.machine()}
    conditions |= {"cores": os.cpu_count(), "python": platform.python_version(), "N": N}
    append_rows(TABLE, conditions, rows)
    print_table(rows)


def main(
    rounds: Annotated[int, typer.Option(help="of a measurement")] = 500,
    repeats: Annotated[int, typer.Option(help="of each measurement; the median counts")] = 3,
    bls: Annotated[bool, typer.Option(help="also measure over the server's calls")] = True,
) -> None:
    rows = []
    for name, options in (
        ("all drafts stand", {}),
        ("no draft stands", {"draft_token": 3}),
        ("length auto", {"auto": True}),
    ):
        for batch in BATCHES:
            step = statistics.median(in_process(batch, rounds, **options) for _ in range(repeats))
            rows.append(_row(f"in process, {name}", batch, step))
    if bls:
        for batch, (local, remote, bare) in over_bls(rounds, repeats).items():
            rows.append(_row("served", batch, remote))
            rows.append(_row("served beyond in process", batch, remote - local))
            rows.append(_row("bare target and draft call", batch, bare))
    report(rows)
    rate = next(row["sequence_rounds_per_s"] for row in rows if row["batch"] == max(BATCHES))
    print(f"{rate} sequence-rounds/s (bound {BOUND}){'' if rate >= BOUND else ' MISSED'}")


def _row(what: str, batch: int, seconds: float) -> dict[str, object]:
    return {
        "what": what,
        "batch": batch,
        "us_per_step": round(seconds * 1e6),
        "sequence_rounds_per_s": round(batch / seconds) if seconds > 0 else 0,
    }


if __name__ == "__main__":
    typer.run(main)

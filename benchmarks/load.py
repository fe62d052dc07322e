"""The server under load: 1 to 64 streams, then steady streams while long prompts arrive. Demo checkpoint, CPU.

First the gate: the tokens of every prompt with the default drafts are those with drafting off. Then closed loops of
1, 2, 4, .. streams take turns, round by round; every count answers the same prompts, the more streams the more
often. Then steady streams are timed chunk by chunk, alone and while a prompt of 400 tokens arrives every second,
each with ids of its own, so that none starts from a cached prefix.

The clients are threads of this process and share the cores with the server; the share they take is in the table.
They speak HTTP: a gRPC stream of the python client costs a thread more. Tokens per second of the server's CPU time
are given beside those of the clock: they move less when others use the machine. Rows go to ``benchmarks/load.csv``.
Exits with 1 when a bound is missed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from benchmarks.results import append_rows, print_table
from inkling.client import stream_http
from inkling.server import RunningServer, ServerOptions
from inkling.settings import Settings
from inkling.text import load_tokenizer

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "demo" / "checkpoint"
TABLE = Path(__file__).with_suffix(".csv")
MIN_GAIN = 0.95  # of the tokens per second of half the streams
MAX_GAP = 3.0  # the 99th percentile of the time between chunks, in medians
STEADY, LONG_PROMPT, LONG_ANSWER, EVERY_S = 8, 400, 16, 1.0
WARM_UP_S = 2.0  # of steady streams: their prompts


@dataclass
class Measured:
    """Rounds of one load."""

    rates: list[float] = field(default_factory=list)  # tokens per second
    shares: list[float] = field(default_factory=list)  # of one core, taken by the clients
    cpu_rates: list[float] = field(default_factory=list)  # tokens per second of the server's CPU time

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def answer(url: str, ids: list[int], num_tokens: int, **inputs: int) -> list[int]:
    request = {"input_ids": ids, "max_tokens": num_tokens, "ignore_eos": True, **inputs}
    return [token for response in stream_http(url, request) for token in response["output_ids"]]


def gate(url: str, prompts: list[list[int]], num_tokens: int) -> None:
    """Ends the run unless all prompts at once, drafted, give the tokens that each gives alone and undrafted."""
    alone = [answer(url, ids, num_tokens, num_draft_tokens=0) for ids in prompts]
    with ThreadPoolExecutor(len(prompts)) as clients:
        together = list(clients.map(lambda ids: answer(url, ids, num_tokens), prompts))
    for number, (expected, tokens) in enumerate(zip(alone, together, strict=True)):
        if tokens != expected:
            sys.exit(f"prompt {number}: the tokens differ; nothing is timed")


def cpu_seconds(group: int) -> float:
    """User and system time so far of all threads of the processes of a group."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            words = stat.read_text().rpartition(")")[2].split()
            if int(words[2]) == group:
                ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def closed_loop(
    url: str, group: int, prompts: list[list[int]], streams: int, num_tokens: int, measured: Measured
) -> None:
    """Two requests a stream, but every prompt once at least: 16 prompts make whole waves of any count."""
    requests = prompts * -(-2 * streams // len(prompts))
    start, cpu, server_cpu = time.perf_counter(), time.process_time(), cpu_seconds(group)
    with ThreadPoolExecutor(streams) as clients:
        answers = list(clients.map(lambda ids: answer(url, ids, num_tokens), requests))
    seconds = time.perf_counter() - start
    assert all(len(tokens) == num_tokens for tokens in answers), "an answer has another length"
    measured.rates.append(len(answers) * num_tokens / seconds)
    measured.cpu_rates.append(len(answers) * num_tokens / (cpu_seconds(group) - server_cpu))
    measured.shares.append((time.process_time() - cpu) / seconds)


def curve(
    url: str, group: int, prompts: list[list[int]], counts: list[int], rounds: int, num_tokens: int
) -> list[dict]:
    loads = {streams: Measured() for streams in counts}
    for _ in range(rounds):
        for streams, measured in loads.items():
            closed_loop(url, group, prompts, streams, num_tokens, measured)
    rows = [
        {
            "what": "closed loop",
            "streams": streams,
            "tokens_per_s": f"{measured.rate:.1f}",
            "lowest": f"{min(measured.rates):.1f}",
            "highest": f"{max(measured.rates):.1f}",
            "tokens_per_cpu_s": f"{statistics.median(measured.cpu_rates):.1f}",
            "clients_share": f"{statistics.median(measured.shares):.2f}",
        }
        for streams, measured in loads.items()
    ]
    for half, streams in pairwise(counts):
        rows[counts.index(streams)]["ratio"] = f"{loads[streams].rate / loads[half].rate:.3f}"
    return rows


def chunk_gaps(
    url: str, prompts: list[list[int]], seconds: float, arrivals: Callable[[float], None]
) -> list[float]:
    """Seconds between the chunks of ``STEADY`` streams, while ``arrivals(seconds)`` sends what else arrives."""
    ends = time.perf_counter() + WARM_UP_S + seconds

    def steady(number: int) -> list[float]:
        request = {"input_ids": prompts[number % len(prompts)], "max_tokens": 3000, "ignore_eos": True}
        times = []
        with closing(stream_http(url, request)) as responses:  # closed early: cancelled
            for _ in responses:
                times.append(time.perf_counter())
                if times[-1] > ends:
                    break
            else:
                sys.exit("a steady stream ended while it was timed; lower --seconds")
        return [late - early for early, late in pairwise(times) if early > ends - seconds]

    with ThreadPoolExecutor(STEADY) as clients:
        streams = [clients.submit(steady, number) for number in range(STEADY)]
        time.sleep(WARM_UP_S)
        arrivals(seconds)
        return [gap for stream in streams for gap in stream.result()]


def long_prompts(url: str, prompts: list[list[int]], seconds: float) -> None:
    """A prompt every ``EVERY_S``, whatever became of those before: demo prompts one after another, shuffled."""
    random, threads = Random(0), []
    for _ in range(int(seconds / EVERY_S)):
        ids = [token for part in random.sample(prompts, len(prompts)) for token in part][:LONG_PROMPT]
        if len(ids) < LONG_PROMPT:
            sys.exit(
                f"the prompts together have {len(ids)} tokens, {LONG_PROMPT} are needed; raise --num-prompts"
            )
        threads.append(threading.Thread(target=answer, args=(url, ids, LONG_ANSWER)))
        threads[-1].start()
        time.sleep(EVERY_S)
    for thread in threads:
        thread.join()


def gaps(url: str, prompts: list[list[int]], seconds: float) -> list[dict]:
    rows = []
    for what, arrivals in (
        ("steady streams", time.sleep),
        ("steady streams, long prompts arrive", lambda s: long_prompts(url, prompts, s)),
    ):
        times = chunk_gaps(url, prompts, seconds, arrivals)
        median, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
        figures = {"gap_ms": f"{median * 1e3:.1f}", "gap_p99_ms": f"{p99 * 1e3:.1f}"}
        rows.append({"what": what, "streams": STEADY, **figures, "ratio": f"{p99 / median:.2f}"})
    return rows


def report(rows: list[dict], conditions: dict[str, object]) -> bool:
    """Whether all bounds hold."""
    names = [
        "what",
        "streams",
        "tokens_per_s",
        "lowest",
        "highest",
        "tokens_per_cpu_s",
        "clients_share",
        "gap_ms",
        "gap_p99_ms",
        "ratio",
    ]
    rows = [{name: row.get(name, "") for name in names} for row in rows]
    append_rows(TABLE, conditions, rows)
    print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    print_table(rows)
    missed = []
    for row in rows:
        if row["what"] == "closed loop" and row["ratio"] and float(row["ratio"]) < MIN_GAIN:
            missed.append(f"{row['streams']} streams have {row['ratio']} of half as many (bound {MIN_GAIN})")
        if row["what"].endswith("arrive") and float(row["ratio"]) > MAX_GAP:
            missed.append(f"the 99th percentile of the gaps is {row['ratio']} medians (bound {MAX_GAP})")
    print("\n".join(f"MISSED: {line}" for line in missed) or "all bounds hold")
    return not missed


def main(
    rounds: Annotated[int, typer.Option(help="of all counts; the median is reported")] = 3,
    max_streams: Annotated[int, typer.Option(help="of the closed loops; 0: none of them")] = 64,
    num_tokens: Annotated[int, typer.Option(help="of an answer")] = 64,
    num_prompts: Annotated[int, typer.Option(help="held-out prompts, at most 40")] = 16,
    seconds: Annotated[float, typer.Option(help="of steady streams; 0: none of them")] = 20.0,
    max_running: Annotated[int, typer.Option(help="max_running_sequences of the server")] = 64,
    draft_length: Annotated[str, typer.Option(help="draft_length of the server")] = "auto",
) -> None:
    tokenizer = load_tokenizer(CHECKPOINT)
    entries = json.loads((ROOT / "demo" / "prompts.json").read_text())[:num_prompts]
    prompts = [tokenizer.encode(entry["text"]).ids for entry in entries]
    settings = Settings(str(CHECKPOINT), max_running_sequences=max_running, draft_length=draft_length)
    counts = [2**k for k in range(max_streams.bit_length())]
    rows = []
    with RunningServer(settings, ServerOptions(http_port=0, grpc_port=0, metrics_port=0)) as server:
        gate(server.http_url, prompts, num_tokens)
        if counts:
            rows += curve(server.http_url, server.pid, prompts, counts, rounds, num_tokens)
        if seconds:
            rows += gaps(server.http_url, prompts, seconds)
    conditions = {"date": datetime.now(UTC).date().isoformat(), "cores": os.cpu_count()}
    conditions |= {"threads": settings.num_threads, "max_running": max_running, "draft_length": draft_length}
    conditions |= {"prompts": num_prompts, "tokens": num_tokens, "rounds": rounds, "seconds": seconds}
    sys.exit(not report(rows, conditions))


if __name__ == "__main__":
    typer.run(main)

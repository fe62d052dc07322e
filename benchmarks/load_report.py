"""perf_analyzer against a local server over gRPC streams: closed loops, then Poisson arrivals. ``make load``.

Requests differ in prompt, length and sampling (``mixed_requests``, or a file in perf_analyzer's format). The same
request must get the same text at every load: nothing is reported otherwise. First, one stream is measured by turns with
the client of ``benchmarks.cpu`` on its requests: both must agree. Figures go to ``load_report.csv`` and ``.png``.

- time to first token: from the request to its first response, prompt and queue included.
- time per output token: from first to last response, over the tokens after the first response.
- time between chunks: between two responses of one request; a response holds the tokens of a step or more.
- goodput: requests per second that kept the bounds on the first two.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import cpu
from benchmarks.perf_analyzer import Answer, run
from benchmarks.results import ROOT, append_rows, git_commit, print_table, processor
from inkling.server import RunningServer, ServerOptions, load_settings
from inkling.text import load_tokenizer

LENGTHS = (16, 32, 48, 64)  # max_tokens, in turn
SAMPLING = (
    {},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 20},
    {"num_draft_tokens": 0},
)
FRACTIONS = (0.25, 0.5, 0.75)  # of the closed loops' highest request rate, for Poisson arrivals


@dataclass(frozen=True)
class Bounds:
    time_to_first_token: float  # seconds
    time_per_output_token: float

    def hold(self, answer: Answer) -> bool:
        return (
            answer.time_to_first_token <= self.time_to_first_token
            and (answer.time_per_output_token or 0.0) <= self.time_per_output_token
        )


def mixed_requests(prompts: list[str]) -> dict[str, list]:
    """perf_analyzer's input data: one request a prompt; all lengths with all kinds of sampling, seeded."""
    requests = []
    for number, prompt in enumerate(prompts):
        settings = SAMPLING[number // len(LENGTHS) % len(SAMPLING)]
        seed = {"seed": number} if "temperature" in settings else {}
        values = {"text_input": prompt, "max_tokens": LENGTHS[number % len(LENGTHS)], **settings, **seed}
        requests.append(values | {"stream": True, "ignore_eos": True, "return_num_output_tokens": True})
    return {"data": [{name: [value] for name, value in request.items()} for request in requests]}


def cpu_requests(prompts: list[list[int]]) -> dict[str, list]:
    """The requests of ``cpu.generate_http``, whose answers have ``cpu.MAX_TOKENS`` tokens each."""
    same = {"max_tokens": cpu.MAX_TOKENS, "ignore_eos": True, "num_draft_tokens": cpu.N, "stream": True}
    same |= {"return_perf_metrics": True, "return_num_output_tokens": True}
    entries = [{name: [value] for name, value in same.items()} for _ in prompts]
    for entry, ids in zip(entries, prompts, strict=True):
        entry["input_ids"] = {"content": ids, "shape": [len(ids)]}
    return {"data": entries}


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that ``share`` of all do not exceed; NaN for none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def seconds(answers: list[Answer]) -> float:
    return max(a.times[-1] for a in answers) - min(a.start for a in answers)


def token_rate(answers: list[Answer]) -> float:
    return sum(a.num_tokens for a in answers) / seconds(answers)


def figures(load: str, value: float, answers: list[Answer], bounds: Bounds) -> dict[str, object]:
    """One row: milliseconds, but rates a second."""
    times = {
        "ttft": [a.time_to_first_token for a in answers],
        "tpot": [t for a in answers if (t := a.time_per_output_token) is not None],
        "gap": [gap for a in answers for gap in a.gaps],
    }
    row = {"load": load, "value": f"{value:g}", "requests": len(answers)}
    row["tokens_per_s"] = f"{token_rate(answers):.1f}"
    row["requests_per_s"] = f"{len(answers) / seconds(answers):.2f}"
    for name, values in times.items():
        row |= {f"{name}_p{p}_ms": f"{1e3 * percentile(values, p / 100):.1f}" for p in (50, 99)}
    return row | {"goodput": f"{sum(map(bounds.hold, answers)) / seconds(answers):.2f}"}


def check_texts(answers: list[Answer], texts: dict[str, str]) -> None:
    """Ends the run when a request got another text than before; ``texts`` holds those before, by prompt."""
    for answer in answers:
        if texts.setdefault(answer.prompt, answer.text) != answer.text:
            sys.exit(f"the answer to {answer.prompt[:60]!r} differs between loads; nothing is reported")


def compare(server: RunningServer, folder: Path, prompts: list[list[int]], rounds: int) -> float:
    """By how much perf_analyzer's tokens per second of one stream exceed those of the client of ``benchmarks.cpu``.

    The median over rounds of the two in turn: what else the machine does changes from round to round, not within one.
    """
    data = folder / "cpu.json"
    data.write_text(json.dumps(cpu_requests(prompts)))
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(cpu.timed(lambda ids: cpu.generate_http(server.http_url, ids, cpu.N), prompts))
        theirs.append(token_rate(run(server.grpc_url, data, ["--concurrency-range", "1"], len(prompts))))
    medians = f"benchmarks.cpu {statistics.median(ours):.1f}, perf_analyzer {statistics.median(theirs):.1f} tokens/s"
    difference = statistics.median(theirs[k] / ours[k] - 1 for k in range(rounds))
    print(f"one stream, medians of {rounds}: {medians}", flush=True)
    print(f"within a round they differ by {difference:+.1%} (median)", flush=True)
    return difference


def measure(
    url: str, data: Path, counts: list[int], rates: list[float], num: int, bounds: Bounds
) -> list[dict]:
    """Rows of the closed loops, then of Poisson arrivals; no ``rates``: from the best closed loop."""
    rows: list[dict] = []
    texts: dict[str, str] = {}

    def load(name: str, value: float, options: list[str], num_requests: int) -> None:
        answers = run(url, data, options, num_requests)
        check_texts(answers, texts)
        rows.append(figures(name, value, answers, bounds))
        print(f"{name} {value:g}: {rows[-1]['tokens_per_s']} tokens/s", file=sys.stderr, flush=True)

    for count in counts:
        load("streams", count, ["--concurrency-range", str(count)], max(num, 2 * count))
    best = max(float(row["requests_per_s"]) for row in rows)
    for rate in rates or [round(fraction * best, 2) for fraction in FRACTIONS]:
        arrivals = ["--request-rate-range", str(rate), "--request-distribution", "poisson"]
        load("poisson", rate, arrivals, max(num, math.ceil(rate)))  # perf_analyzer refuses less than a second
    return rows


def plot(rows: list[dict], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 3, figsize=(12, 6.5), layout="constrained")
    curves = {"tokens/s": ["tokens_per_s"], "time to first token, ms": ["ttft_p50_ms", "ttft_p99_ms"]}
    curves["time between chunks, ms"] = ["gap_p50_ms", "gap_p99_ms"]
    axes = {"streams": "streams", "poisson": "Poisson arrivals, requests/s"}
    for line, (load, label) in zip(panels, axes.items(), strict=True):
        chosen = [row for row in rows if row["load"] == load]
        for panel, (title, names) in zip(line, curves.items(), strict=True):
            for name in names:
                xs, ys = ([float(row[key]) for row in chosen] for key in ("value", name))
                panel.plot(xs, ys, marker="o", label=name)
            panel.set(xlabel=label, title=title, ylim=(0, None))
            panel.legend()
    figure.savefig(file, dpi=80)


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",") if word]


def main(
    concurrency: Annotated[str, typer.Option(help="streams of the closed loops")] = "1,2,4,8,16,32",
    rates: Annotated[str, typer.Option(help="requests/s; empty: 25, 50, 75 % of the best closed loop")] = "",
    num_requests: Annotated[int, typer.Option(help="of each load, and two a stream at least")] = 24,
    data: Annotated[Path | None, typer.Option(help="requests in perf_analyzer's format")] = None,
    checkpoint: Annotated[Path, typer.Option(help="other settings: INKLING_<SETTING>")] = cpu.CHECKPOINT,
    rounds: Annotated[int, typer.Option(help="of the comparison with benchmarks.cpu; 0: none")] = 5,
    num_prompts: Annotated[int, typer.Option(help="of the comparison")] = 8,
    agreement: Annotated[float, typer.Option(help="of the two clients: largest relative difference")] = 0.15,
    ttft_bound_ms: Annotated[float, typer.Option(help="goodput: time to first token")] = 1000.0,
    tpot_bound_ms: Annotated[float, typer.Option(help="goodput: time per output token")] = 50.0,
    out: Annotated[Path, typer.Option(help="folder of load_report.csv and .png")] = Path(__file__).parent,
) -> None:
    counts = [int(count) for count in numbers(concurrency)]
    bounds = Bounds(ttft_bound_ms / 1e3, tpot_bound_ms / 1e3)
    given = {"checkpoint": checkpoint, "max_running_sequences": max(16, *counts)}
    settings = load_settings(given)
    prompts = [entry["text"] for entry in json.loads((ROOT / "demo" / "prompts.json").read_text())]
    ports = ServerOptions(http_port=0, grpc_port=0, metrics_port=0)
    with tempfile.TemporaryDirectory() as name, RunningServer(settings, ports) as server:
        if data is None:
            data = Path(name) / "mixed.json"
            data.write_text(json.dumps(mixed_requests(prompts)))
        difference = 0.0
        if rounds:
            encode = load_tokenizer(str(checkpoint)).encode
            ids = [encode(prompt).ids for prompt in prompts[:num_prompts]]
            difference = compare(server, Path(name), ids, rounds)
        rows = measure(server.grpc_url, data, counts, numbers(rates), num_requests, bounds)
    conditions = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": git_commit(),
        "hardware": processor(),
    }
    conditions |= {"cores": os.cpu_count(), "threads": settings.num_threads, "device": settings.device}
    conditions |= {"ttft_bound_ms": ttft_bound_ms, "tpot_bound_ms": tpot_bound_ms}
    append_rows(out / "load_report.csv", conditions, rows)
    plot(rows, out / "load_report.png")
    print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    print_table(rows)
    if abs(difference) > agreement:
        sys.exit(f"MISSED: the clients differ by {difference:+.1%} at one stream (bound {agreement:.0%})")


if __name__ == "__main__":
    typer.run(main)

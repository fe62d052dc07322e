"""The promise through the real server on a GPU: ``python -m tests.cuda.server_promise --out DIR``.

Every request runs with each number of drafts, by both ways of the hidden states, with and without CUDA graphs; half
of a configuration before a restart of the server, half after it. Caches are small, so that sequences are preempted,
prompts share beginnings, so that prefixes are hit, and each start has another budget of prompt rows. All answers to a
request must have the same tokens. On the way: what the GPU holds against the plan, and that spec_ensemble has not
opened it where hidden states travel by the ring.

A line is printed, and a record appended to DIR/records.jsonl, as each half ends; started again with the same DIR, a
run goes on where it ended. Exits with 1 when anything differs. ``--device cpu`` tries the script itself.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from inkling import process_group
from inkling.config import ModelConfig
from inkling.deployment import Deployment
from inkling.protocol import DRAFT_MODEL, ENSEMBLE_MODEL, TARGET_MODEL, Kind
from inkling.server import RunningServer, ServerOptions
from inkling.settings import Settings
from tests.cuda.promise_clients import ask, ask_all

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "checkpoint"
CHECKPOINTS = (str(DEMO), "synthetic:micro?seed=0")
DRAFTS = (0, 1, 3, 8)
SLOTS, CONTEXT, STEP_ROWS = 64, 2048, 512
FULL_PAGES = 36  # of the small cache: of micro one answer in fifteen is preempted, one in six has a prefix hit
PREEMPTED = 0.05  # of the answers at least, and as many prefix hits, where there are enough to tell
PROCESSES = 4  # of clients
SLOW_STOP_S = 8.0  # a stop that takes longer is explained by the server's own lines
SOLO = 12  # requests that run alone, to compare what is accepted of their drafts
PLAN_TOLERANCE = 0.03
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"temperature": 0.8},
    {"temperature": 1.1, "top_k": 40},
    {"temperature": 0.9, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3},
)


@dataclass(frozen=True)
class Part:
    """One configuration of the server, and which half of its requests."""

    checkpoint: str
    transport: str
    graphs: str
    num_requests: int
    half: int

    @property
    def key(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Record:
    answers: int = 0
    tokens: int = 0
    differing_tokens: int = 0
    differing_drafts: int = 0  # solo requests of which another number of drafts was accepted
    errors: int = 0
    accepted: int = 0
    seconds: float = 0.0
    ready_s: float = 0.0
    stop_s: float = 0.0
    planned: int = 0  # bytes
    used: int = 0  # bytes of the GPU after the requests; 0 on the CPU
    gpu_files: dict[str, int] | None = None  # /dev/nvidia* of each process
    preemptions: int = 0
    prefix_hits: int = 0
    failure: str = ""

    def faults(self, part: Part) -> list[str]:
        faults = [f"{name} {value}" for name in ("differing_tokens", "differing_drafts", "errors")
                  if (value := getattr(self, name))]  # fmt: skip
        faults += [self.failure] if self.failure else []
        if self.used and abs(self.used - self.planned) > PLAN_TOLERANCE * self.used:
            faults.append(f"plan off by {(self.planned - self.used) / self.used:+.1%}")
        if self.answers >= 400 and min(self.preemptions, self.prefix_hits) < PREEMPTED * self.answers:
            faults.append(f"{self.preemptions} preemptions and {self.prefix_hits} prefix hits prove little")
        if part.transport == "ring" and self.gpu_files and self.gpu_files[ENSEMBLE_MODEL]:
            faults.append(f"{ENSEMBLE_MODEL} opened the GPU")
        return faults


class Answers:
    """The first answer to each request of a checkpoint; all others must be equal. Kept in a file."""

    def __init__(self, file: Path):
        self._file = file
        self._known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def differing(self, key: str, value: list[int]) -> int:
        """Elements in which ``value`` differs from what is known."""
        known = self._known.setdefault(key, value)
        return sum(a != b for a, b in zip(known, value, strict=False)) + abs(len(known) - len(value))

    def save(self) -> None:
        self._file.write_text(json.dumps(self._known))


def requests_of(checkpoint: str, count: int) -> list[dict[str, Any]]:
    """Inputs by index, the same in every run: half of them begin like others, and most answers reach another page."""
    random = Random(checkpoint)
    config = ModelConfig.from_dir(checkpoint)
    texts = _texts(checkpoint)

    def some_ids(length: int) -> list[int]:
        if not texts:
            return random.choices(range(config.vocab_size), k=length)
        text = random.choice(texts)
        start = random.randrange(max(1, len(text) - length))
        return text[start : start + length]

    trunks = [some_ids(random.randint(66, 90)) for _ in range(8)]
    requests = []
    for index in range(count):
        trunk = random.choice(trunks) if index % 2 else []
        length = random.choice((1, 2, 7, 30, random.randint(1, 60)))
        inputs = {"input_ids": trunk + some_ids(length) or [1], "seed": index, "stream": index % 4 < 2}
        inputs["max_tokens"] = random.randint(40, 80)
        inputs |= {"ignore_eos": index % 3 > 0, "return_perf_metrics": True}
        requests.append(inputs | SAMPLING[index % len(SAMPLING)])
    return requests


def _texts(checkpoint: str) -> list[list[int]]:
    """Ids of real text for the demo, whose drafts then are accepted."""
    if checkpoint != str(DEMO):
        return []
    from inkling.text import load_tokenizer

    tokenizer = load_tokenizer(checkpoint)
    prompts = json.loads((DEMO.parent / "prompts.json").read_text())
    ids = [token for prompt in prompts for token in tokenizer.encode(prompt["text"]).ids]
    return [ids[start : start + 2000] for start in range(0, len(ids), 1000)]


def settings_of(part: Part, device: str) -> Settings:
    # the same in all first halves: solo requests are compared, and a draft may depend on how a prompt was cut
    chunk = 64 if part.half == 0 else Random(part.key).choice((0, 7, 33, 200, STEP_ROWS))
    settings = Settings(
        part.checkpoint,
        device=device,
        threads=1,
        max_context=CONTEXT,
        max_running_sequences=SLOTS,
        max_tokens_per_step=STEP_ROWS,
        max_prompt_chunk=chunk,
        prefix_block=64,
        draft_length="fixed",
        hidden_transport=part.transport,
        cuda_graphs=part.graphs,
    )
    return replace(settings, cache_bytes=_small_cache(settings))


def _small_cache(settings: Settings) -> int:
    """Bytes with which the pools of full attention have FULL_PAGES."""
    low, high = 0, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        try:
            layout = Deployment.of(replace(settings, cache_bytes=middle)).layout
            pages = max(layout.target[Kind.FULL].num_pages, layout.draft[Kind.FULL].num_pages)
        except Exception:  # too small for any
            pages = 0
        low, high = (middle, high) if pages < FULL_PAGES else (low, middle)
    return high


def run_part(part: Part, device: str, clients: int, answers: Answers) -> Record:
    settings = settings_of(part, device)
    deployment = Deployment.of(settings)
    record = Record(planned=deployment.plan.total_bytes)
    requests = requests_of(part.checkpoint, part.num_requests)
    drafts = [n for n in DRAFTS if n <= deployment.num_draft_tokens]
    pairs = list(product(range(part.num_requests), drafts))
    Random(part.checkpoint + part.transport + part.graphs).shuffle(pairs)
    pairs = pairs[part.half :: 2]
    before, start = gpu_used(device), time.monotonic()
    server = RunningServer(settings, ServerOptions(http_port=0, grpc_port=0, metrics_port=0), report=_say)
    with server:
        record.ready_s = time.monotonic() - start
        print(f"    ready after {record.ready_s:.1f} s, {len(pairs)} answers to come", flush=True)
        urls = f"http://{server.http_url}", f"grpc://{server.grpc_url}"
        if part.half == 0:
            for index in range(min(SOLO, part.num_requests)):
                response = ask(urls[0], requests[index] | {"num_draft_tokens": drafts[-1]})
                counts = [response["drafted"], response["accepted"]]
                record.differing_drafts += bool(answers.differing(f"solo {index}", counts))
        jobs = [
            {"key": (i, n), "url": urls[i % 4 == 0], "inputs": requests[i] | {"num_draft_tokens": n}}
            for i, n in pairs
        ]
        start = time.monotonic()
        threads = max(1, clients // PROCESSES)
        ask_all(jobs, PROCESSES, threads, lambda response: _count(record, answers, response))
        record.seconds = time.monotonic() - start
        record.errors += len(jobs) - record.answers - record.errors  # a client that died
        record.used = gpu_used(device) - before
        record.gpu_files = gpu_files(server.pid)
        start = time.monotonic()
    record.stop_s = time.monotonic() - start
    if record.stop_s > SLOW_STOP_S:
        print("\n".join(f"    {line}" for line in _stopping(server)), flush=True)
    _read_totals(record, server)
    return record


def _say(line: str) -> None:
    """What is worth a line of the device's output: no progress, no request."""
    if not re.search(r"loading|\d+ of \d+ graphs| request id=", line):
        print("   ", line, flush=True)


def _stopping(server: RunningServer) -> list[str]:
    """The server's lines from the signal on, but for tables."""
    lines = list(server.log)
    first = next((i for i, line in enumerate(lines) if "Waiting for in-flight" in line), len(lines) - 20)
    return [line for line in lines[max(0, first) :] if not line.startswith(("+", "|"))][:60]


def _count(record: Record, answers: Answers, response: dict[str, Any]) -> None:
    if "error" in response:
        record.errors += 1
        if record.errors < 4:
            print(f"    request {response['key']}: {response['error']}", flush=True)
        return
    ids = response["ids"]
    differing = answers.differing(str(response["key"][0]), ids)
    if differing and record.differing_tokens < 50:
        print(f"    request {response['key']}: {differing} of {len(ids)} tokens differ", flush=True)
    record.answers += 1
    record.tokens += len(ids)
    record.differing_tokens += differing
    record.accepted += response["accepted"]


def _read_totals(record: Record, server: RunningServer) -> None:
    """What spec_ensemble says when it is drained."""
    for line in server.log:
        if line.startswith(f"{ENSEMBLE_MODEL}: totals "):
            totals = json.loads(line.partition("totals ")[2])
            record.preemptions, record.prefix_hits = totals["preemptions"], totals["prefix_hits"]


def gpu_used(device: str) -> int:
    """Bytes in use on GPU 0, by all processes; 0 on the CPU."""
    if device == "cpu":
        return 0
    query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) << 20


def gpu_files(server_pid: int) -> dict[str, int]:
    """Open files and mappings of /dev/nvidia* by process: the server's and the three models'."""
    counts = {}
    for member in process_group.members(server_pid):
        if not member.is_zombie:
            command = Path(f"/proc/{member.pid}/cmdline").read_text()
            models = [m for m in (TARGET_MODEL, DRAFT_MODEL, ENSEMBLE_MODEL) if f"/{m}/" in command]
            counts[models[0] if models else "tritonserver"] = sum(
                "/dev/nvidia" in name for name in _opened(member.pid)
            )
    return counts


def _opened(pid: int) -> Iterator[str]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            yield os.readlink(descriptor)
        except OSError:  # closed meanwhile
            continue
    yield from Path(f"/proc/{pid}/maps").read_text().splitlines()


def parts_of(checkpoints: list[str], requests: int, dlpack_requests: int, graphs: list[str]) -> list[Part]:
    """The ring first, then tensors through the server, each half before the next configuration."""
    ways = [("ring", g, requests) for g in graphs] + [("dlpack", graphs[0], dlpack_requests)]
    return [
        Part(checkpoint, *way, half)
        for way in ways
        for checkpoint in checkpoints
        for half in (0, 1)
        if way[2] > 0
    ]


def main(
    out: Annotated[Path, typer.Option(help="folder of records and answers")],
    checkpoint: Annotated[list[str], typer.Option(help="directory, or synthetic:NAME")] = CHECKPOINTS,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    requests: Annotated[int, typer.Option(help="by the ring")] = 1000,
    dlpack_requests: Annotated[int, typer.Option(help="by tensors through the server")] = 200,
    graphs: Annotated[list[str], typer.Option(help="on, off")] = ("on", "off"),
    clients: Annotated[int, typer.Option(help="requests at a time")] = 2 * SLOTS,
    minutes: Annotated[float, typer.Option(help="no half starts later")] = 60.0,
) -> None:
    """Runs the parts that have no record yet; exits with 1 when one has a fault."""
    out.mkdir(parents=True, exist_ok=True)
    file, deadline = out / "records.jsonl", time.monotonic() + 60 * minutes
    done = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        key, values = json.loads(line)
        done[key] = Record(**values)
    faulty = unmeasured = 0
    for part in parts_of(list(checkpoint), requests, dlpack_requests, list(graphs)):
        name = f"{Path(part.checkpoint).name} {part.transport} graphs {part.graphs} half {part.half + 1}"
        if part.key not in done:
            if time.monotonic() > deadline:
                print(f"{name}: out of time", flush=True)
                unmeasured += 1
                continue
            print(f"{name}:", flush=True)
            answers = Answers(
                out / f"answers-{Path(part.checkpoint).name.replace(':', '-').split('?')[0]}.json"
            )
            try:
                record = run_part(part, device, clients, answers)
            except Exception as error:  # the other parts say more
                record = Record(failure=f"{type(error).__name__}: {error}")
            else:
                with file.open("a") as records:
                    records.write(json.dumps([part.key, asdict(record)]) + "\n")
                answers.save()
            done[part.key] = record
        record = done[part.key]
        faults = record.faults(part)
        faulty += bool(faults)
        shown = {key: value for key, value in asdict(record).items() if value}
        print(f"{name}: {'; '.join(faults) or 'ok'}\n    {shown}", flush=True)
    print(f"{faulty} halves with faults, {unmeasured} not run", flush=True)
    sys.exit(faulty > 0 or unmeasured > 0)


if __name__ == "__main__":
    typer.run(main)

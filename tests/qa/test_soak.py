"""Hours of clients in minutes: short answers from 32 streams, with every way to leave, on one real server.

``make qa`` runs three minutes, ``make soak-serve`` thirty, which also bound the slope of each process's resident
memory over the requests of the last twenty and go to ``benchmarks/soak_serve.csv``.
"""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from random import Random

import numpy as np
import pytest

from benchmarks.results import ROOT, append_rows, git_commit, print_table, processor
from inkling.config import ModelConfig
from inkling.protocol import MODELS
from tests.qa.conftest import THREADS, resident_bytes, sizes
from tests.qa.soak_questions import PREFIX_BLOCK, questions
from tests.qa.soak_traffic import STREAMS, Traffic
from tests.server.conftest import ServeCommand
from tests.server.test_metrics import settled

TABLE = ROOT / "benchmarks" / "soak_serve.csv"
SEED = 0
WARM_UP_S = 45.0  # of traffic: the caches are full, each process has what it works with
MAX_GROWTH = 64.0  # MiB of all processes together, after the warm-up of the short run
MAX_SLOPE = {"tritonserver": 4.0}  # MiB per 10,000 requests
MAX_SLOPE_OF_OURS = 1.0
MAX_DRIFT = 0.02  # of the accepted length, between the first minute and the last
NUM_BLOCKS, T_975 = 20, 2.101  # Student's t, of NUM_BLOCKS - 2 degrees of freedom
MIB = 1 << 20
# All drafts always: ``auto`` has next to none at so many streams, and the accepted length would follow the clock.
# Caches so small that they are full within the warm-up, and prefixes go as others come.
OPTIONS = (
    *("--draft-length", "fixed", "--prefix-block", str(PREFIX_BLOCK), "--max-context", "512"),
    *("--max-running-sequences", str(STREAMS), "--cache-bytes", str(128 * MIB), "--threads", THREADS),
)


@dataclass(frozen=True)
class Line:
    """A slope and the half width of its 95 % interval."""

    slope: float
    margin: float


def fit(x: np.ndarray, y: np.ndarray) -> Line:
    """Least squares over the means of NUM_BLOCKS blocks of consecutive samples, [n] each. Neighbours in time are alike:
    the interval is widened by the correlation r of each block's residual with the next one's, as for an AR(1) process,
    by sqrt((1 + r) / (1 - r))."""
    means = [np.array([part.mean() for part in np.array_split(values, NUM_BLOCKS)]) for values in (x, y)]
    x, y = (values - values.mean() for values in means)
    slope = (x @ y) / (x @ x)
    rest = y - slope * x
    r = min(max((rest[1:] @ rest[:-1]) / max(rest @ rest, 1e-12), 0.0), 0.9)
    error = np.sqrt(rest @ rest / (NUM_BLOCKS - 2) / (x @ x) * (1 + r) / (1 - r))
    return Line(float(slope), float(T_975 * error))


class Memory:
    """Resident bytes of the server's processes, and of ``inkling serve``, about once a second."""

    def __init__(self, command: ServeCommand, traffic: Traffic):
        self._traffic = traffic
        self.pids = {"tritonserver": command.server_pid, **{model: command.stub(model) for model in MODELS}}
        self.pids["inkling serve"] = command.process.pid
        self.seconds: list[float] = []
        self.requests: list[int] = []
        self.mib: dict[str, list[float]] = {name: [] for name in self.pids}

    async def sample(self) -> None:
        """Until it is cancelled."""
        start = time.monotonic()
        while True:
            self.seconds.append(time.monotonic() - start)
            self.requests.append(self._traffic.num_requests)
            for name, pid in self.pids.items():
                self.mib[name].append(resident_bytes(pid) / MIB)
            await asyncio.sleep(1.0)

    def minutes(self) -> list[dict[str, object]]:
        """What each minute began with."""
        firsts = [
            i for i, seconds in enumerate(self.seconds) if int(seconds / 60) > int(self.seconds[i - 1] / 60)
        ]
        return [
            {"minute": round(self.seconds[i] / 60), "requests": self.requests[i]}
            | {f"{name} MiB": round(mib[i], 1) for name, mib in self.mib.items()}
            for i in firsts
        ]

    def rows(self, since_s: float) -> list[dict[str, object]]:
        """One for each process, of the samples since then; slopes in MiB per 10,000 requests."""
        first = next(i for i, seconds in enumerate(self.seconds) if seconds >= since_s)
        x = np.array(self.requests[first:]) / 1e4
        rows = []
        for name, mib in self.mib.items():
            line = fit(x, np.array(mib[first:]))
            rows.append(
                {
                    "process": name,
                    "first_mib": round(mib[first], 1),
                    "last_mib": round(mib[-1], 1),
                    "mib_per_10k": round(line.slope, 3),
                    "lowest": round(line.slope - line.margin, 3),
                    "highest": round(line.slope + line.margin, 3),
                    "bound": MAX_SLOPE.get(name, MAX_SLOPE_OF_OURS),
                }
            )
        return rows


async def soak(traffic: Traffic, memory: Memory, command: ServeCommand, seconds: float) -> dict[str, int]:
    """Returns the regions of shared memory, with their sizes, after the warm-up."""
    sampling = asyncio.create_task(memory.sample())
    running = asyncio.create_task(traffic.run(seconds))
    await asyncio.sleep(WARM_UP_S)
    regions = sizes(command)
    await running
    sampling.cancel()
    return regions


def run(command: ServeCommand, checkpoint: Path, minutes: int) -> tuple[Traffic, Memory]:
    """All but what memory does."""
    random = Random(SEED)
    asked = questions(checkpoint, random)
    command.wait_ready()
    traffic = Traffic(command, asked, ModelConfig.from_dir(checkpoint).vocab_size, random)
    memory = Memory(command, traffic)
    regions = asyncio.run(soak(traffic, memory, command, 60.0 * minutes))
    print(f"\n{traffic.num_requests} requests in {minutes} min: {dict(traffic.done)}")
    print_table(memory.minutes())
    print(
        "accepted length of each minute:", *(f"{tally.mean_accepted_length:.3f}" for tally in traffic.minutes)
    )
    assert not traffic.faults, (len(traffic.faults), traffic.faults[:10])
    series = settled(command)
    assert series["num_requests_running", ()] == series["num_requests_waiting", ()] == 0
    assert sizes(command) == regions
    assert {member.pid for member in command.processes()} == set(memory.pids.values()) - {command.process.pid}
    command.signal(signal.SIGTERM)
    assert command.wait_stopped() == 0, command.log_text()
    assert command.leftovers() == []
    first, last = (traffic.minutes[minute].mean_accepted_length for minute in (0, minutes - 1))
    assert abs(last - first) <= MAX_DRIFT * first
    return traffic, memory


def test_a_slope_lies_in_its_interval() -> None:
    random = np.random.default_rng(0)
    x = np.linspace(0, 6, 1200)
    for slope in (0.0, 3.0):
        line = fit(x, slope * x + random.normal(size=x.size))
        assert abs(line.slope - slope) <= line.margin < 0.1


@pytest.mark.qa
def test_three_minutes_lose_nothing(serve, demo_checkpoint) -> None:
    command = serve("--checkpoint", str(demo_checkpoint), *OPTIONS)
    _, memory = run(command, demo_checkpoint, 3)
    rows = memory.rows(WARM_UP_S)
    print_table(rows)
    grown = sum(row["last_mib"] - row["first_mib"] for row in rows)
    print(f"{grown:.1f} MiB grown in all")
    assert grown <= MAX_GROWTH


@pytest.mark.soak_serve
@pytest.mark.timeout(2700)
def test_thirty_minutes_lose_nothing_and_keep_their_memory(serve, demo_checkpoint) -> None:
    """The bound is on the estimated slope; the interval is printed beside it."""
    minutes = 30
    command = serve("--checkpoint", str(demo_checkpoint), *OPTIONS)
    traffic, memory = run(command, demo_checkpoint, minutes)
    rows = memory.rows(60.0 * (minutes - 20))
    print_table(rows)
    accepted = [traffic.minutes[minute].mean_accepted_length for minute in (0, minutes - 1)]
    conditions = {
        "date": datetime.now(UTC).date(),
        "commit": git_commit(),
        "hardware": processor(),
        "torch": version("torch"),
        "pytriton": version("nvidia-pytriton"),
        "minutes": minutes,
        "streams": STREAMS,
        "requests": traffic.num_requests,
        "accepted_first": round(accepted[0], 3),
        "accepted_last": round(accepted[1], 3),
    }
    append_rows(TABLE, conditions, rows)
    assert not [row for row in rows if row["mib_per_10k"] > row["bound"]]

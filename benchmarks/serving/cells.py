"""One cell: so many streams with so many drafts, all decoding, measured through the server's gRPC streams."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.serving.answers import Answers, prompt
from benchmarks.serving.counters import Counters, Rounds
from benchmarks.serving.streams import Answer, Clients, StreamError
from inkling.protocol import DRAFT_MODEL, TARGET_MODEL
from inkling.run_folder import RunFolder
from inkling.server import RunningServer
from inkling.step_clock import ClockReader

SETTLE_S = 0.3  # for the server to see that the last streams are gone


@dataclass(frozen=True)
class Cell:
    batch: int
    context: int  # prompt tokens of each stream
    num_drafts: int | None  # None: the deployment chooses, step by step

    @property
    def draft_label(self) -> str:
        return "auto" if self.num_drafts is None else str(self.num_drafts)

    @property
    def key(self) -> dict[str, str]:
        """What a row of the table says of its cell."""
        return {"context": str(self.context), "batch": str(self.batch), "drafts": self.draft_label}

    def request(self, seed: int, index: int, vocab_size: int, max_tokens: int) -> dict[str, Any]:
        inputs = {
            "input_ids": prompt(seed, self.context, index, vocab_size),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "return_perf_metrics": True,
        }
        return inputs if self.num_drafts is None else inputs | {"num_draft_tokens": self.num_drafts}


@dataclass(frozen=True)
class Load:
    """What all cells of a run share."""

    clients: Clients
    answers: Answers
    seed: int
    vocab_size: int
    max_context: int
    num_tokens: int  # measured, of every stream
    warm_tokens: int  # of every stream before that
    max_rounds: int
    learning_rounds: int  # before those, where the deployment chooses
    cell_s: float  # no round of a cell starts later
    round_s: float  # a round that takes longer is given up
    gate_prompts: int
    gate_tokens: int  # of each of those


@dataclass(frozen=True)
class Window:
    """Between two times all streams decoded; before the first they had computed their prompts."""

    start: float
    end: float
    rounds: Rounds
    answers: Sequence[Answer]
    device_ms: tuple[float, float] | None  # of a round, target and draft; measured after the window

    @property
    def _chunks(self) -> list[list]:
        return [[c for c in a.chunks if self.start < c.time <= self.end] for a in self.answers]

    def figures(self) -> dict[str, float]:
        """Milliseconds and counts by the name of their column."""
        first = [a.chunks[0].time - a.sent for a in self.answers]
        chunks = self._chunks
        gaps = [late.time - early.time for stream in chunks for early, late in pairwise(stream)]
        num_tokens = sum(c.num_tokens for stream in chunks for c in stream)
        # chunks after the first of a stream: what was accepted between the two is known
        followed = sum(c.num_tokens for stream in chunks for c in stream[1:])
        accepted = sum(stream[-1].num_accepted - stream[0].num_accepted for stream in chunks)
        per_token = (self.end - self.start) * len(self.answers) / num_tokens
        figures = {
            "tokens_per_s": num_tokens / (self.end - self.start),
            "tokens_per_s_user": 1 / per_token,
            "token_ms": 1e3 * per_token,
            "ttft_ms": 1e3 * statistics.median(first),
            "ttft_max_ms": 1e3 * max(first),
            "gap_ms": 1e3 * statistics.median(gaps),
            "gap_p99_ms": 1e3 * float(np.percentile(gaps, 99)),
            "tokens_per_chunk": num_tokens / sum(map(len, chunks)),
            "accepted_length": followed / max(1, followed - accepted),
        }
        rounds = asdict(self.rounds) | {"between_ms": self.rounds.between_ms}
        figures |= {name: value for name, value in rounds.items() if name.endswith("_ms")}
        if self.device_ms is not None:
            busy = sum(self.device_ms)
            figures |= {"device_target_ms": self.device_ms[0], "device_draft_ms": self.device_ms[1]}
            figures |= {"busy": busy / self.rounds.round_ms, "visible_ms": self.rounds.round_ms - busy}
        return figures


class Clocks:
    """Device time of the steps of both models, counted only while it is asked for."""

    def __init__(self, folder: RunFolder):
        self._readers = [ClockReader(folder.clock(model)) for model in (TARGET_MODEL, DRAFT_MODEL)]

    def ask(self, is_wanted: bool) -> np.ndarray:
        """float64 [2, 2]: (steps, seconds) of target and draft so far."""
        for reader in self._readers:
            reader.ask(is_wanted)
        return np.array([reader.read() for reader in self._readers])


def measure(server: RunningServer, load: Load, cell: Cell) -> list[Window]:
    """Rounds of the cell. Raises StreamError when a stream fails, or a token differs from the known answer."""
    for _ in range(load.learning_rounds if cell.num_drafts is None else 0):
        _measure_once(server, load, cell)
        time.sleep(SETTLE_S)
    windows: list[Window] = []
    last_start = time.monotonic() + load.cell_s
    while not windows or (len(windows) < load.max_rounds and time.monotonic() < last_start):
        windows.append(_measure_once(server, load, cell))
        time.sleep(SETTLE_S)
    return windows


def _measure_once(server: RunningServer, load: Load, cell: Cell) -> Window:
    room = load.max_context - cell.context
    clocks = Clocks(RunFolder.of_server(server.settings.run_root, server.pid))
    deadline = time.monotonic() + load.round_s
    requests = [cell.request(load.seed, i, load.vocab_size, room) for i in range(cell.batch)]
    load.clients.start(server.grpc_url, requests, load.round_s)
    try:
        load.clients.wait_for(1 + load.warm_tokens, deadline)
        first, counts = Counters.read(server.metrics_url), load.clients.counts
        load.clients.wait_for(counts + load.num_tokens, deadline)
        last, counts = Counters.read(server.metrics_url), load.clients.counts
        before = clocks.ask(True)
        load.clients.wait_for(counts + load.warm_tokens, deadline)
        steps, seconds = (clocks.ask(False) - before).T
    except StreamError as error:
        told = {a.error for a in load.clients.stop() if a.error}
        raise StreamError("; ".join([str(error), *sorted(told)])) from None
    answers = load.clients.stop()
    refuse_differing(load.answers, cell, [answer.ids for answer in answers])
    device_ms = tuple(1e3 * seconds / steps[0]) if steps[0] else None
    return Window(first.time, last.time, Rounds.between(first, last), answers, device_ms)


def refuse_differing(known: Answers, cell: Cell, answers: Sequence[Sequence[int]]) -> None:
    """Raises StreamError unless the tokens of streams 0, 1, .. are those already known for their prompts."""
    found = {i: known.differing(cell.context, i, ids) for i, ids in enumerate(answers)}
    found = {i: positions for i, positions in found.items() if positions}
    if found:
        first = ", ".join(f"{i} from token {positions[0]}" for i, positions in list(found.items())[:4])
        total = sum(map(len, found.values()))
        raise StreamError(f"{total} tokens of {len(found)} streams differ: stream {first}")

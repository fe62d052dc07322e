"""The automatic draft length beside every fixed one: demo checkpoint, CPU, in process, 1, 8 and 32 streams.

All take turns every few answers, forwards and backwards, on the same prompts; the automatic one keeps what it has
learnt, as a server does. Each is compared with it within a turn, and what is far behind after the first rounds is
timed no longer. Every length must give the same tokens in every turn. With ``--cpu-clock`` seconds are CPU time of
the one thread that runs everything, for the automatic length, too: a busy machine moves them less. The table is
printed as Markdown and added to ``benchmarks/draft_length.csv``. Exits with 1 when the bound is missed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.results import append_rows, print_table
from inkling.deployment import Deployment
from inkling.engine.channel import Session
from inkling.engine.draft_length import AutoDraftLength
from inkling.engine.loop import Engine
from inkling.engine.outbox import Chunk
from inkling.engine.request import GenerateRequest, StopRules
from inkling.engine.scheduler import EngineLimits
from inkling.model.load import load_draft_runner, load_target_runner
from inkling.model.shared_weights import SharedWeights
from inkling.protocol import KEY_WORDS
from inkling.settings import Settings
from inkling.text import load_tokenizer

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "demo" / "checkpoint"
TABLE = Path(__file__).with_suffix(".csv")
STREAMS = (1, 8, 32)
BOUND = 0.97  # of the best fixed length
PROBE_ROUNDS, HOPELESS = 4, 0.85  # a fixed length with less of the best one's rate after them drops out
GENERATION = 1
Clock = Callable[[], float]  # seconds


class Tokens:
    """A reply that keeps the token ids."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def send(self, chunk: Chunk) -> None:
        if chunk.error is not None:
            raise chunk.error
        self.ids += chunk.ids

    def is_cancelled(self) -> bool:
        return False


class Models:
    """Target and depths, loaded once; engines take turns on them."""

    def __init__(self, threads: int, streams: int):
        settings = Settings(str(CHECKPOINT), threads=threads, max_running_sequences=streams, max_context=512)
        self.deployment = Deployment.of(settings)
        self.target = load_target_runner(self.deployment, generation=GENERATION)
        weights = self.target.model.weights
        shared = SharedWeights(weights.embed, weights.head)
        self.draft = load_draft_runner(self.deployment, shared, generation=GENERATION)

    def engine(self, auto: bool = False, clock: Clock = time.perf_counter, prefix_block: int = 0) -> Engine:
        deployment = self.deployment
        limits = EngineLimits(
            deployment.max_context,
            deployment.settings.max_running_sequences,
            deployment.settings.max_tokens_per_step,
            1000,
            deployment.num_draft_tokens,
            auto_draft_length=auto,
            prefix_block=prefix_block,
        )
        session = Session(np.zeros(KEY_WORDS, np.int32), GENERATION)
        engine = Engine(limits, deployment.layout, self.target, self.draft, session)
        if auto:
            engine.scheduler.lengths = AutoDraftLength(deployment.num_draft_tokens, clock)
        return engine


def run(
    engine: Engine, prompts: list[list[int]], num_drafts: int, max_tokens: int, clock: Clock
) -> tuple[float, list]:
    """Seconds for all prompts, as many at a time as the engine has slots; and the tokens."""
    engine._to_target.reset()  # another engine has used the models since
    engine._to_draft.reset()
    replies = [Tokens() for _ in prompts]
    start = clock()
    for ids, reply in zip(prompts, replies, strict=True):
        request = GenerateRequest(tuple(ids), stop=StopRules(max_tokens), num_draft_tokens=num_drafts)
        engine.submit(request, reply)
    while engine.step():
        pass
    engine.sender.send_ready()
    return clock() - start, [reply.ids for reply in replies]


def compare(
    streams: int, rounds: int, prompts: list[list[int]], max_tokens: int, threads: int, clock: Clock
) -> list[dict]:
    models = Models(threads, streams)
    most = models.deployment.num_draft_tokens
    engines = {str(n): (models.engine(False, clock), n) for n in range(most + 1)}
    engines["auto"] = (models.engine(True, clock), most)
    seconds: dict[str, list[list[float]]] = {name: [] for name in engines}  # of every turn, round by round
    play_round(engines, streams, prompts, max_tokens, clock)  # warms up, and the automatic length learns
    for number in range(rounds):
        order = dict(reversed(engines.items())) if number % 2 else engines
        taken, tokens = play_round(order, streams, prompts, max_tokens, clock)
        for name, turns in taken.items():
            seconds[name].append(turns)
        if number + 1 == PROBE_ROUNDS:
            shares = beside_auto(seconds)
            enough = HOPELESS * shares[best_fixed(shares)]
            engines = {name: e for name, e in engines.items() if name == "auto" or shares[name] >= enough}
    beside = beside_auto(seconds)
    best = best_fixed({name: beside[name] for name in engines})
    rows = []
    for name, taken in seconds.items():
        rates = [tokens / sum(turns) for turns in taken]
        rows.append(
            {
                "rounds": len(rates),
                "streams": streams,
                "length": name,
                "tokens_per_s": f"{statistics.median(rates):.1f}",
                "lowest": f"{min(rates):.1f}",
                "highest": f"{max(rates):.1f}",
                "of_best_fixed": f"{beside[name] / beside[best]:.3f}",
            }
        )
    return rows


def play_round(
    engines: dict[str, tuple[Engine, int]],
    streams: int,
    prompts: list[list[int]],
    max_tokens: int,
    clock: Clock,
) -> tuple[dict[str, list[float]], int]:
    """Seconds of each in every turn, and the tokens of all turns. They take turns every few answers."""
    turn = 2 * streams  # prompts
    repeated = prompts * -(-turn // len(prompts))
    seconds, tokens = {name: [] for name in engines}, 0
    for first in range(0, len(repeated), turn):
        expected = None
        for name, (engine, num_drafts) in engines.items():
            taken, ids = run(engine, repeated[first : first + turn], num_drafts, max_tokens, clock)
            expected = expected or ids
            if ids != expected:
                sys.exit(f"length {name}, {streams} streams: the tokens differ; nothing is reported")
            seconds[name].append(taken)
        tokens += sum(map(len, expected))
    return seconds, tokens


def best_fixed(shares: dict[str, float]) -> str:
    return max(shares.keys() - {"auto"}, key=shares.__getitem__)


def beside_auto(seconds: dict[str, list[list[float]]]) -> dict[str, float]:
    """The rate of each, as a share of the automatic length's.

    The machine's speed drifts, so times are compared within a turn only: of each turn, the median over the rounds of
    the time as a share of the automatic length's; the turns count by what that takes.
    """
    automatic = seconds["auto"]
    weights = [statistics.median(turns) for turns in zip(*automatic, strict=True)]
    shares = {}
    for name, rounds in seconds.items():
        ratios = [
            [taken / auto for taken, auto in zip(*both, strict=True)]
            for both in zip(rounds, automatic, strict=False)
        ]
        medians = [statistics.median(turn) for turn in zip(*ratios, strict=True)]
        shares[name] = sum(weights) / sum(w * m for w, m in zip(weights, medians, strict=True))
    return shares


def main(
    rounds: Annotated[int, typer.Option(help="rounds that count; medians are reported")] = 9,
    num_prompts: Annotated[int, typer.Option(help="held-out prompts, at most 40")] = 16,
    max_tokens: Annotated[int, typer.Option(help="of an answer")] = 64,
    threads: Annotated[int, typer.Option(help="torch threads; 0: half of the cores")] = 1,
    streams: Annotated[list[int], typer.Option(help="at a time")] = STREAMS,
    cpu_clock: Annotated[bool, typer.Option(help="seconds are CPU time of the one thread")] = False,
) -> None:
    if cpu_clock and threads != 1:
        sys.exit(f"threads is {threads}; the CPU time of one thread says nothing with more than 1")
    clock = time.thread_time if cpu_clock else time.perf_counter
    tokenizer = load_tokenizer(CHECKPOINT)
    entries = json.loads((ROOT / "demo" / "prompts.json").read_text())[:num_prompts]
    prompts = [tokenizer.encode(entry["text"]).ids for entry in entries]
    rows = [row for s in streams for row in compare(s, rounds, prompts, max_tokens, threads, clock)]
    conditions = {"date": datetime.now(UTC).date().isoformat(), "cores": os.cpu_count(), "threads": threads}
    conditions |= {"clock": clock.__name__}
    conditions |= {"prompts": num_prompts, "tokens": max_tokens}
    append_rows(TABLE, conditions, rows)
    print_table(rows)
    missed = [row for row in rows if row["length"] == "auto" and float(row["of_best_fixed"]) < BOUND]
    for row in missed:
        print(
            f"MISSED: {row['streams']} streams: auto has {row['of_best_fixed']} of the best (bound {BOUND})"
        )
    sys.exit(bool(missed))


if __name__ == "__main__":
    typer.run(main)

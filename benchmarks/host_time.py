"""What a round costs the host: the engine and the CUDA runners with everything that a device would do left out.

``python -m benchmarks.host_time`` needs no GPU. Graphs do nothing, tokens are zeros, and drafts are random, so that
three of four stand. Milliseconds of a round, by batch and drafts: of the engine, of the two calls, and of their sum.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import time
from collections.abc import Hashable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Annotated
from unittest.mock import patch

import numpy as np
import typer

from benchmarks.engine import NoReply
from benchmarks.results import print_table
from inkling.deployment import Deployment
from inkling.engine.channel import Session
from inkling.engine.loop import Engine
from inkling.engine.pages import Model
from inkling.engine.request import GenerateRequest, StopRules
from inkling.engine.scheduler import EngineLimits
from inkling.protocol import KEY_WORDS, Kind
from inkling.settings import Settings

CHECKPOINT = Path(__file__).parents[1] / "demo" / "checkpoint"
SESSION = Session(np.zeros(KEY_WORDS, np.int32), 1)
CONTEXT, PROMPT, SLOTS, MOST_DRAFTS, WARM = 4096, 512, 32, 4, 20
ACCEPTANCE = 0.75  # of each draft
QUIET = 0.1  # the share of rounds faster than the one that counts: others share the machine


def load(checkpoint: Path) -> tuple[Deployment, list]:
    """Target and draft runner on the CPU whose graphs and draws launch nothing."""
    import torch

    from inkling.model.cuda_draft import CudaDraftRunner
    from inkling.model.cuda_graphs import StepGraphs
    from inkling.model.cuda_runner import CudaTargetRunner
    from inkling.model.weights import load_draft, load_target

    class NoGraphs(StepGraphs):
        def __contains__(self, key: Hashable) -> bool:
            return None not in key

        def replay(self, key: Hashable) -> None:
            pass

    values = {
        "checkpoint": str(checkpoint), "dtype": "bfloat16", "num_draft_tokens": MOST_DRAFTS, "max_context": CONTEXT,
        "max_running_sequences": SLOTS, "max_tokens_per_step": 2048, "draft_length": "fixed",
    }  # fmt: skip
    deployment = Deployment.of(Settings.from_values(values))
    config, options = deployment.config, {"dtype": torch.bfloat16, "device": "cpu"}
    target = load_target(checkpoint, config, **options)
    depths = load_draft(checkpoint, config, MOST_DRAFTS, **options)
    runners = [
        CudaTargetRunner(config, target, **sizes(deployment, Model.TARGET)),
        CudaDraftRunner(config, depths, target.embed, target.head, **sizes(deployment, Model.DRAFT)),
    ]
    for runner in runners:
        runner.graphs = NoGraphs(runner.stream, runner.graphs.run, runner.graphs.what)
    guesses = np.random.default_rng(0).random((1024, *runners[1].drafts.shape)) > ACCEPTANCE
    guesses, turn = torch.from_numpy(guesses.astype(np.int32)), iter(range(1 << 60))
    runners[0]._run_layers = runners[1]._run_chain = lambda *arguments: None
    runners[1].graphs.replay = lambda key: runners[1].drafts.copy_(guesses[next(turn) % 1024])
    return deployment, runners


def sizes(deployment: Deployment, model: Model) -> dict:
    settings = deployment.settings
    pools = dict(zip(Kind, deployment.layout.pools(model), strict=True))
    return {
        "generation": SESSION.generation,
        "num_slots": settings.max_running_sequences,
        "max_context": deployment.max_context,
        "num_draft_tokens": deployment.num_draft_tokens,
        "page_size": {kind: pool.page_size for kind, pool in pools.items()},
        "num_pages": {kind: pool.num_pages for kind, pool in pools.items()},
        "max_tokens_per_step": settings.max_tokens_per_step,
    }


def measure(
    deployment: Deployment,
    runners: list,
    batch: int,
    drafts: int,
    rounds: int,
    profiler: cProfile.Profile | None,
) -> dict[str, object]:
    """Of ``rounds`` decoding rounds, in milliseconds."""
    seconds: dict[str, float] = {}

    def timed(name: str, call):
        def run(*arguments):
            start = time.thread_time()
            result = call(*arguments)
            seconds[name] = time.thread_time() - start
            return result

        return run

    class Client:
        def __init__(self, name: str, runner: object):
            self.step = timed(name, runner.step)

    clients = [Client(name, runner) for name, runner in zip(("target", "draft"), runners, strict=True)]
    limits = EngineLimits.of(deployment.settings, deployment.max_context, deployment.num_draft_tokens)
    engine, random = Engine(limits, deployment.layout, *clients, SESSION), Random(0)
    for _ in range(batch):
        ids = tuple(random.randrange(1, 4096) for _ in range(PROMPT))
        engine.submit(
            GenerateRequest(ids, stop=StopRules(CONTEXT), num_draft_tokens=drafts), NoReply(), stream=True
        )
    while any(s.num_uncomputed != 1 for s in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    rows = []
    gc.collect()
    for index in range(WARM + rounds):
        if profiler is not None and index == WARM:
            profiler.enable()
        seconds = {"target": 0.0, "draft": 0.0}
        start = time.thread_time()
        engine.step()
        total = time.thread_time() - start
        engine.sender.send_ready()
        if index >= WARM:
            rows.append((total - sum(seconds.values()), seconds["target"], seconds["draft"], total))
    if profiler is not None:
        profiler.disable()
    assert len(engine.scheduler.running) == batch, "sequences ended while timed; fewer rounds"
    values = [f"{1e3 * np.quantile(column, QUIET):.3f}" for column in zip(*rows, strict=True)]
    return {"batch": batch, "drafts": drafts} | dict(
        zip(("engine ms", "target ms", "draft ms", "round ms"), values, strict=True)
    )


def main(
    batches: Annotated[str, typer.Option(help="running sequences, comma-separated")] = "1,8,32",
    drafts: Annotated[str, typer.Option(help="drafts of each request, comma-separated")] = "0,3",
    rounds: Annotated[int, typer.Option(help="of a measurement")] = 400,
    profile: Annotated[int, typer.Option(help="so many functions of the profile of each cell")] = 0,
) -> None:
    """Times the host's part of decoding rounds."""
    launches = ("cuda_draws.head_draw", "cuda_pass.assign_pages", "cuda_pass.fill_rows")
    with ExitStack() as stack:
        for name in launches:
            stack.enter_context(patch(f"inkling.model.{name}", lambda *arguments: None))
        deployment, runners = load(CHECKPOINT)
        rows = []
        for batch in map(int, batches.split(",")):
            for number in map(int, drafts.split(",")):
                profiler = cProfile.Profile() if profile else None
                rows.append(measure(deployment, runners, batch, number, rounds, profiler))
                if profiler is not None:
                    pstats.Stats(profiler).sort_stats("tottime").print_stats(profile)
    print_table(rows)


if __name__ == "__main__":
    typer.run(main)

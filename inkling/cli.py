"""Serve an Inkling checkpoint, generate from a running server, check a checkpoint, plan its memory."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TextIO

import typer

from inkling.errors import InklingError, SettingsError
from inkling.synthetic import is_synthetic

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

_CHECKPOINT = "checkpoint directory, or synthetic:NAME?seed=0"
Setting = Annotated[int | None, typer.Option(help="see docs/settings.md")]


@app.command()
def serve(
    checkpoint: Annotated[str | None, typer.Option(help=_CHECKPOINT)] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda")] = None,
    gpu: Annotated[int | None, typer.Option(help="which of the GPUs that CUDA shows")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16")] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="N, drafts per step; -1: every depth")] = None,
    draft_length: Annotated[str | None, typer.Option(help="fixed: N a step; auto: at most N, learnt")] = None,
    max_context: Annotated[int | None, typer.Option(help="positions of one sequence")] = None,
    max_running_sequences: Setting = None,
    max_tokens_per_step: Setting = None,
    max_prompt_chunk: Setting = None,
    max_queued_requests: Setting = None,
    cache_bytes: Annotated[int | None, typer.Option(help="bytes for all caches")] = None,
    prefix_cache: Annotated[str | None, typer.Option(help="on or off: reuse of cached prefixes")] = None,
    prefix_block: Setting = None,
    cuda_graphs: Annotated[str | None, typer.Option(help="on or off")] = None,
    hidden_transport: Annotated[str | None, typer.Option(help="ring or dlpack")] = None,
    threads: Annotated[
        int | None, typer.Option(help="torch threads of a model; 0: half of the cores")
    ] = None,
    load_timeout_s: Setting = None,
    log_format: Annotated[str | None, typer.Option(help="text, json or off: a line a request")] = None,
    step_timeout_s: Setting = None,
    run_dir: Annotated[str | None, typer.Option(help="parent of the run folder")] = None,
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0: every interface")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="0: a free one")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0: a free one")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="0: a free one")] = 8002,
    drain_timeout: Annotated[float, typer.Option(help="seconds that open requests get on Ctrl-C")] = 60.0,
    restart: Annotated[
        int, typer.Option(help="times the server is replaced when a process of it is lost; 0: exit then")
    ] = 0,
    log_verbose: Annotated[int, typer.Option(help="1 or more: the server's whole log")] = 0,
) -> None:
    """Run the Triton server in the foreground. Ctrl-C drains and stops it; a second one stops it at once.

    Settings not given here come from INKLING_SETTINGS and INKLING_<SETTING>.
    """
    settings_given = {
        "checkpoint": checkpoint,
        "device": device,
        "gpu": gpu,
        "dtype": dtype,
        "num_draft_tokens": num_draft_tokens,
        "draft_length": draft_length,
        "max_context": max_context,
        "max_running_sequences": max_running_sequences,
        "max_tokens_per_step": max_tokens_per_step,
        "max_prompt_chunk": max_prompt_chunk,
        "max_queued_requests": max_queued_requests,
        "cache_bytes": cache_bytes,
        "prefix_cache": prefix_cache,
        "prefix_block": prefix_block,
        "cuda_graphs": cuda_graphs,
        "hidden_transport": hidden_transport,
        "threads": threads,
        "load_timeout_s": load_timeout_s,
        "log_format": log_format,
        "step_timeout_s": step_timeout_s,
        "run_dir": run_dir,
    }
    from inkling.server import RunningServer, ServerOptions, load_settings
    from inkling.supervisor import supervise

    options = ServerOptions(host, http_port, grpc_port, metrics_port, drain_timeout, log_verbose=log_verbose)

    starts = count()

    def serve_once() -> None:
        settings = load_settings(settings_given)
        with RunningServer(settings, options, report=_note, restarts=next(starts)) as server:
            addresses = f"http://{server.http_url} grpc://{server.grpc_url}"
            weights = " synthetic weights" if is_synthetic(server.settings.checkpoint) else ""
            _print(f"ready {addresses} metrics http://{server.metrics_url}/metrics{weights}", sys.stdout)
            server.wait()

    with _errors_exit(), _stop_signals() as received:
        with suppress(KeyboardInterrupt):
            supervise(serve_once, restart, _note)
        if len(received) > 1:
            raise typer.Exit(128 + received[-1])  # cut off; a drained stop is a success


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="text to continue")],
    url: Annotated[str, typer.Option(help="grpc://host:port or http://host:port")] = "grpc://127.0.0.1:8001",
    max_tokens: Annotated[int, typer.Option()] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy")] = 0.0,
    top_k: Annotated[int | None, typer.Option()] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="0 turns drafting off")] = None,
) -> None:
    """Stream a completion from a running server; the last line says how well drafting went."""
    from inkling.client import TALLIED, Tally, stream

    inputs: dict[str, Any] = {"text_input": prompt, "max_tokens": max_tokens, "temperature": temperature}
    optional = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    optional["num_draft_tokens"] = num_draft_tokens
    inputs |= {name: value for name, value in optional.items() if value is not None}
    with _errors_exit():
        tally = Tally.of(printed(stream(url, inputs | TALLIED)))
    _note(str(tally))


@app.command()
def health(
    url: Annotated[str, typer.Option(help="http://host:port")] = "http://127.0.0.1:8000",
    timeout: Annotated[float, typer.Option(help="seconds for the whole answer")] = 10.0,
) -> None:
    """Ask a running server for three tokens through all three models; exits 1 with the reason if none come."""
    from inkling.health import ailment

    if reason := ailment(url.removeprefix("http://").rstrip("/"), timeout):
        _note(f"error: {reason}")
        raise typer.Exit(1)
    print("healthy")


@app.command()
def check(directory: Annotated[Path, typer.Argument(help=_CHECKPOINT)]) -> None:
    """Check every tensor of a checkpoint and print its sizes; exits 1 when a rule is broken."""
    from inkling.check import check_checkpoint

    report = check_checkpoint(directory)
    print(report.render())
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def plan(
    directory: Annotated[str, typer.Argument(help=_CHECKPOINT)],
    device: Annotated[str | None, typer.Option(help="cpu or cuda")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16")] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="N; -1: every depth")] = None,
    max_context: Annotated[int | None, typer.Option(help="positions of one sequence")] = None,
    max_running_sequences: Setting = None,
    max_tokens_per_step: Setting = None,
    hidden_transport: Annotated[str | None, typer.Option(help="ring or dlpack")] = None,
    cuda_graphs: Annotated[str | None, typer.Option(help="on or off")] = None,
    cache_bytes: Annotated[int | None, typer.Option(help="bytes for all caches")] = None,
    memory_bytes: Annotated[int, typer.Option(help="of the device: caches get what is left; 0: ask it")] = 0,
    sequence_length: Annotated[int, typer.Option(help="tokens; 0: the longest that is served")] = 0,
) -> None:
    """Print where the memory of a deployment goes and how many sequences fit."""
    from inkling.deployment import Deployment
    from inkling.server import load_settings

    settings_given = {
        "checkpoint": directory,
        "device": device,
        "dtype": dtype,
        "num_draft_tokens": num_draft_tokens,
        "max_context": max_context,
        "max_running_sequences": max_running_sequences,
        "max_tokens_per_step": max_tokens_per_step,
        "hidden_transport": hidden_transport,
        "cuda_graphs": cuda_graphs,
        "cache_bytes": cache_bytes,
    }
    with _errors_exit():
        if cache_bytes and memory_bytes:
            raise SettingsError("give cache_bytes or memory_bytes, and not both")
        deployment = Deployment.of(load_settings(settings_given), memory_bytes=memory_bytes)
        print(deployment.plan.render(sequence_length or deployment.max_context))


def printed(responses: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Pass responses through; print their texts as they come, and a line's end after the last."""
    for response in responses:
        print(response.get("text_output", ""), end="", flush=True)
        yield response
    print()


def _note(line: str) -> None:
    _print(line, sys.stderr)


def _print(line: str, stream: TextIO) -> None:
    with suppress(OSError):  # a full disk is no reason to stop
        print(line, file=stream, flush=True)


@contextmanager
def _errors_exit() -> Iterator[None]:
    try:
        yield
    except InklingError as error:
        _note(f"error: {error}")
        raise typer.Exit(1) from None


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM raise KeyboardInterrupt, twice at most: a third must not cut cleaning up short."""
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) <= 2:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

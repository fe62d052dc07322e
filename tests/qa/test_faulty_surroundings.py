"""Too little memory, a full disk, a taken port, a file that shrinks, a clock that jumps."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from inkling import tritonserver
from inkling.client import stream_grpc
from inkling.server import RunningServer, ServerOptions
from inkling.settings import Settings
from tests.qa.conftest import ANSWERED_S, NUM_TOKENS, PROMPT, THREADS, Expected
from tests.server.streams import OpenStream

pytestmark = pytest.mark.qa
PRIVATE_MOUNTS = ("unshare", "--mount")


def assert_refused(command, *words: str) -> None:
    """Before ``ready``, with the reason, and nothing is left."""
    assert command.wait_stopped() == 1
    assert command.output.read_text() == ""
    assert all(word in command.log_text() for word in words), command.log_text()
    assert list(command.folder.iterdir()) == []


def test_caches_beyond_the_memory_are_refused(serve, tiny_checkpoint) -> None:
    sizes = (
        "--cache-bytes",
        str(1 << 42),
        "--max-running-sequences",
        "100000",
        "--max-tokens-per-step",
        "4096",
    )
    assert_refused(
        serve("--checkpoint", str(tiny_checkpoint), *sizes), "the caches take", "lower cache_bytes"
    )


def test_too_little_shared_memory_is_refused(serve, tiny_checkpoint) -> None:
    if subprocess.run([*PRIVATE_MOUNTS, "true"], capture_output=True).returncode:
        pytest.skip("a private /dev/shm needs `unshare --mount`, which is not allowed here")
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'  # docker's default size
    wrapper = (*PRIVATE_MOUNTS, "sh", "-c", mount, "sh")
    command = serve("--checkpoint", str(tiny_checkpoint), wrapper=wrapper)
    assert_refused(command, "/dev/shm has 64 MiB free; the three models need 192 MiB", "--shm-size")


@pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
def test_a_taken_port_is_refused_and_its_owner_undisturbed(
    serve, undisturbed, name: str, tiny_checkpoint
) -> None:
    number = getattr(undisturbed, f"{name}_url").split(":")[1]
    command = serve("--checkpoint", str(tiny_checkpoint), f"--{name}-port", number)
    assert_refused(command, f"{name}_port is {number} on 127.0.0.1", "choose another")


def test_a_log_that_cannot_be_written_stops_nothing(serve, tiny_checkpoint, expected) -> None:
    command = serve(
        "--checkpoint",
        str(tiny_checkpoint),
        "--threads",
        THREADS,
        "--log-verbose",
        "1",
        log=Path("/dev/full"),
    )
    command.wait_ready()
    for _ in range(5):  # verbose: a pipe that nobody reads would be full by now
        expected.check(command)
    command.signal(signal.SIGTERM)
    assert command.wait_stopped() == 0
    assert command.leftovers() == []


def test_a_checkpoint_that_is_cut_under_a_running_server(
    serve, tiny_checkpoint, expected, check_new_server, tmp_path
) -> None:
    """Right tokens or an error, and nobody waits for ever; a server with the whole checkpoint is right again."""
    copy = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint, copy)
    command = serve("--checkpoint", str(copy), "--threads", THREADS)
    command.wait_ready()
    fault = time.monotonic()
    for file in copy.glob("*.safetensors"):
        with file.open("r+b") as stream:
            stream.truncate(100)
    stream = OpenStream(command.grpc_url, NUM_TOKENS)
    stream.join(ANSWERED_S)
    assert stream.ended - fault < ANSWERED_S
    if stream.error is None:
        expected.check(command)
        command.signal(signal.SIGTERM)
    print(f"after the cut: {stream.error or 'the right tokens'}")
    assert command.wait_stopped() == (0 if stream.error is None else 1)
    assert command.leftovers() == []
    check_new_server()


JUMP = """
import os as _os, time as _time
_wall_clock = _time.time
_time.time = lambda: _wall_clock() + (float(open(FILE).read()) if _os.path.exists(FILE) else 0.0)
"""


def test_a_wall_clock_that_jumps_changes_no_answer_and_no_deadline(
    tiny_checkpoint, expected: Expected, tmp_path
) -> None:
    """Injected into the three model processes: their wall clock goes an hour ahead, then back, in an answer."""
    repository = tmp_path / "models"
    shutil.copytree(tritonserver.model_repository(), repository)
    jump = tmp_path / "jump"
    for model in repository.glob("*/1/model.py"):
        code = model.read_text()
        future = "from __future__ import annotations\n"
        assert code.count(future) == 1
        model.write_text(code.replace(future, future + JUMP.replace("FILE", repr(str(jump)))))
    settings = Settings(checkpoint=str(tiny_checkpoint), threads=int(THREADS))
    ports = ServerOptions(http_port=0, grpc_port=0, metrics_port=0)
    with RunningServer(settings, ports, model_repository=repository) as server:
        expected.check(server)
        long = OpenStream(server.grpc_url, 400)
        for offset in (3600.0, -3600.0):
            jump.write_text(str(offset))
            expected.check(server)
            inputs = {"input_ids": list(PROMPT), "max_tokens": 4000, "ignore_eos": True, "timeout_ms": 700}
            start = time.monotonic()
            responses = list(stream_grpc(server.grpc_url, inputs | {"return_finish_reason": True}))
            assert responses[-1]["finish_reason"] == "timeout" and 0.6 < time.monotonic() - start < 5.0
        long.join()
        assert long.error is None and len(long.ids) == 400
        assert server._failure() == ""

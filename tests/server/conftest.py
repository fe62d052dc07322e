"""Live servers. ``server`` serves the demo checkpoint for the whole session; others are started by hand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from inkling import process_group
from inkling.server import RunningServer, ServerOptions
from inkling.settings import Settings
from inkling.testing import write_random_checkpoint

ROOT = Path(__file__).parents[2]
INKLING = Path(sys.executable).with_name("inkling")
ANY_PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
START_S = STOP_S = 120.0


@pytest.fixture(scope="session")
def demo_checkpoint() -> Path:
    return ROOT / "demo" / "checkpoint"


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: loads in a moment, accepts no drafts."""
    directory = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(directory, tokenizer=True)
    return directory


def start(checkpoint: Path, **settings: object) -> RunningServer:
    options = ServerOptions(http_port=0, grpc_port=0, metrics_port=0)
    return RunningServer(Settings(checkpoint=str(checkpoint), **settings), options)


@pytest.fixture(scope="session")
def server(demo_checkpoint: Path) -> Iterator[RunningServer]:
    with start(demo_checkpoint) as running:
        yield running


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    """``start_server(checkpoint, **settings)``; the server stops at the end of the test."""
    with ExitStack() as running:
        yield lambda checkpoint, **settings: running.enter_context(start(checkpoint, **settings))


@dataclass
class ServeCommand:
    """A running ``inkling serve``, and what of it must be gone afterwards."""

    process: subprocess.Popen[bytes]
    folder: Path  # its run folder and its work folder are made here
    output: Path
    errors: Path

    def wait_ready(self) -> None:
        self.wait_for(lambda: self.output.read_text().endswith("\n"), "ready", START_S)
        ready, http, grpc, metrics, metrics_url, *_ = self.output.read_text().split()
        assert (ready, metrics) == ("ready", "metrics") and metrics_url.endswith("/metrics")
        self.http_url, self.grpc_url = http.removeprefix("http://"), grpc.removeprefix("grpc://")
        self.server_pid = int(next(self._run_folders()).name.split("-")[1])
        command = Path(f"/proc/{self.server_pid}/cmdline").read_text()
        self._regions = re.search(r"shm-region-prefix-name=(\w+)", command)[1]
        assert list(Path("/dev/shm").glob(self._regions + "*")), "the prefix of its regions was not found"

    def _run_folders(self) -> Iterator[Path]:
        return self.folder.glob("inkling-[0-9]*")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_for(self, holds: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            has_failed = (self.process.poll() or 0) > 0
            assert not has_failed, f"{what}: serve ended\n{self.errors.read_text()}"
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s\n{self.errors.read_text()}"
            time.sleep(0.02)

    def kill_stub(self, model: str) -> None:
        for member in self.processes():
            if f"/{model}/" in Path(f"/proc/{member.pid}/cmdline").read_text():
                os.kill(member.pid, signal.SIGKILL)

    @property
    def is_draining(self) -> bool:
        return any((folder / "drain").exists() for folder in self._run_folders())

    def wait_stopped(self) -> int:
        return self.process.wait(timeout=STOP_S)

    def processes(self) -> list[process_group.Member]:
        return [m for m in process_group.members(self.server_pid) if not m.is_zombie]

    def leftovers(self) -> list[object]:
        """Processes, shared-memory regions and folders that are still there."""
        return [*self.processes(), *Path("/dev/shm").glob(self._regions + "*"), *self.folder.iterdir()]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ServeCommand]]:
    """``serve(*options)`` runs the command with all its folders below one empty folder."""
    commands: list[ServeCommand] = []

    def run(*options: str) -> ServeCommand:
        folder = tmp_path / "run"
        folder.mkdir()
        output, errors = tmp_path / "output", tmp_path / "errors"
        with output.open("wb") as out, errors.open("wb") as err:
            process = subprocess.Popen(
                [INKLING, "serve", *ANY_PORTS, "--run-dir", str(folder), *options],
                env=os.environ | {"TMPDIR": str(folder)},
                stdout=out,
                stderr=err,
            )
        commands.append(ServeCommand(process, folder, output, errors))
        return commands[-1]

    yield run
    for command in commands:
        if command.process.poll() is None:
            command.signal(signal.SIGTERM)
            command.wait_stopped()

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    regions: list[str] = field(default_factory=list)  # prefixes of their names, one a start

    @classmethod
    def start(
        cls, base: Path, *options: str, wrapper: tuple[str, ...] = (), log: Path | None = None
    ) -> ServeCommand:
        """``base``: for its folders and its output. ``wrapper``: runs it. ``log``: in place of a file."""
        folder = base / "run"
        folder.mkdir(exist_ok=True)
        output, errors = base / "output", log or base / "errors"
        with output.open("wb") as out, errors.open("wb") as err:
            process = subprocess.Popen(
                [*wrapper, INKLING, "serve", *ANY_PORTS, "--run-dir", str(folder), *options],
                env=os.environ | {"TMPDIR": str(folder)},
                stdout=out,
                stderr=err,
            )
        return cls(process, folder, output, errors)

    def wait_ready(self, start: int = 1) -> None:
        """Of the ``start``-th start, counted from 1."""
        self.wait_for(lambda: self.output.read_text().count("\n") == start, f"ready, start {start}", START_S)
        ready, http, grpc, metrics, metrics_url, *_ = self.output.read_text().splitlines()[-1].split()
        assert (ready, metrics) == ("ready", "metrics") and metrics_url.endswith("/metrics")
        self.http_url, self.grpc_url = http.removeprefix("http://"), grpc.removeprefix("grpc://")
        self.metrics_url = metrics_url.removeprefix("http://").removesuffix("/metrics")
        (run_folder,) = self.run_folders()
        self.server_pid = int(run_folder.name.split("-")[1])
        command = Path(f"/proc/{self.server_pid}/cmdline").read_text()
        self.regions.append(re.search(r"shm-region-prefix-name=(\w+)", command)[1])
        assert list(Path("/dev/shm").glob(self.regions[-1] + "*")), "the prefix of its regions was not found"

    def run_folders(self) -> list[Path]:
        return list(self.folder.glob("inkling-[0-9]*"))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def log_text(self) -> str:
        return self.errors.read_text() if self.errors.is_file() else ""

    def wait_for(self, holds: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            has_failed = (self.process.poll() or 0) > 0
            assert not has_failed, f"{what}: serve ended\n{self.log_text()}"
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s\n{self.log_text()}"
            time.sleep(0.02)

    def stub(self, model: str) -> int:
        """The pid of a model's process."""
        (pid,) = (
            m.pid for m in self.processes() if f"/{model}/" in Path(f"/proc/{m.pid}/cmdline").read_text()
        )
        return pid

    @property
    def is_draining(self) -> bool:
        return any((folder / "drain").exists() for folder in self.run_folders())

    def wait_stopped(self) -> int:
        return self.process.wait(timeout=STOP_S)

    def processes(self) -> list[process_group.Member]:
        return [m for m in process_group.members(self.server_pid) if not m.is_zombie]

    def shared_memory(self) -> list[Path]:
        return [path for prefix in self.regions for path in Path("/dev/shm").glob(prefix + "*")]

    def leftovers(self) -> list[object]:
        """Processes, shared-memory regions and folders that are still there."""
        named = [pid for prefix in self.regions for pid in process_group.with_word(prefix)]
        return [*self.processes(), *named, *self.shared_memory(), *self.folder.iterdir()]

    def end(self) -> None:
        """For a test that failed half-way."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            self.wait_stopped()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ServeCommand]]:
    """``serve(*options)`` runs the command with all its folders below one empty folder."""
    with ExitStack() as running:

        def run(*options: str, **how: Any) -> ServeCommand:
            command = ServeCommand.start(tmp_path, *options, **how)
            running.callback(command.end)
            return command

        yield run

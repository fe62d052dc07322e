"""Run the Triton server on the model repository: start, wait until ready, drain, stop, leave nothing behind.

``inkling serve``, the tests and the benchmarks all go through ``RunningServer``. Three things belong to a
server and go with it: its process group (tritonserver and the three python stubs), its shared-memory regions
(their names begin alike) and two folders (with settings and backends; the run folder of the models). Of a server
whose starter was killed, the next start removes them.

Draining: ``drain`` in the run folder asks ``spec_ensemble`` to refuse new requests; once every request has
got its last response, cancelled ones included, it answers with ``drained``. Only after that the server gets
SIGTERM: a server that has it refuses the calls between the models and so cannot finish a request.

A server that lost a model process is never continued: Triton cannot start one again, and stays ready.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from inkling import leftovers, process_group, tritonserver
from inkling.deployment import Deployment
from inkling.health import ailment, status
from inkling.liveness import ANSWER_S, CALLED_MODELS, ServerWatch, Watch
from inkling.protocol import MODELS
from inkling.run_folder import RunFolder
from inkling.settings import ENV_FILE, ENV_PREFIX, Settings
from inkling.synthetic import SyntheticName, is_synthetic
from inkling.tritonserver import ServerError, ServerLostError

BROKEN_DRAIN_S = 5.0  # for a server that lost target or draft: its engine answers within 2 s
LOAD_FAILURE_S = 5.0  # a server whose model failed to load ends within this, with a better reason
CANCEL_S = 6.0  # for cancelling what a drain leaves open
SELF_TEST_S = 60.0
EXIT_TIMEOUT_S = (
    10  # of a server that others stop; a cancelled stream or an idle client makes it take them all
)
UNLOAD_S = 3.0  # for the models of a drained server; nothing is lost with what is killed then
SENT_S = 0.1  # between the last response handed to the server and the client's having it
NO_GPU = 1000.0  # a compute capability that none has
LOG_LINES = 10_000  # kept in memory
ANY_MEMORY = 1 << 50  # bytes: only the models' processes open a GPU, and see whether the caches fit
MAX_FILES = 1 << 20  # a connection is a file
STACK_BYTES = 256 << 20  # of a thread, reserved only: server 2.51.0 lays out HTTP bodies there and dies at 4 MiB in 8
_LOG_LINE = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ ")
# What the server prints beside its log: tables of options, and these.
_BARE_LINE = re.compile(r"\s*$|[+|]|Signal \(|error: creating server|Error: Failed to initialize NVML")
_LOAD_FAILURE = re.compile(r"failed to load '(\w+)' version \d+: (?:\w+: )?(.*?)(?:\\n\\nAt:.*)?\"?$")
_PR_SET_PDEATHSIG = 1  # prctl(2)
_RESTRICTED_APIS = "model-repository,shared-memory,trace,logging"  # nothing here needs them


@dataclass(frozen=True)
class ServerOptions:
    """How the server listens and stops. Port 0: a free one is chosen."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    drain_timeout_s: float = 60.0  # requests still open after this are cancelled
    shared_memory_bytes: int = 64 << 20  # of each model's region; one that never grows never remaps
    thread_pool_size: int = 32  # of each model: every call between models and every send holds one thread
    log_verbose: int = 0


class RunningServer:
    """A server with the three models, as a context manager.

    ``http_url``, ``grpc_url`` and ``metrics_url`` are ``host:port``, the form tritonclient takes. ``report``
    gets every line worth showing: what the models print, and the server's warnings once it is ready. ``log``
    holds the last lines of everything. Entering raises ServerError when the server does not become ready.
    """

    def __init__(
        self,
        settings: Settings,
        options: ServerOptions | None = None,
        *,
        model_repository: Path | None = None,
        report: Callable[[str], None] = lambda line: None,
        restarts: int = 0,  # servers that failed before this one
    ):
        self.settings = replace(settings, checkpoint=_absolute(settings.checkpoint))
        self.options = options or ServerOptions()
        self.model_repository = model_repository or tritonserver.model_repository()
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self.is_ready = False
        self._report = report
        self._restarts = restarts
        self._region_prefix = f"inkling_{secrets.token_hex(6)}_"
        self._process: subprocess.Popen[str] | None = None
        self._work: Path | None = None
        self._run_folder: RunFolder | None = None
        self._died = 0.0  # when a model's process was first seen dead, monotonic seconds; 0: never
        self._watches: list[ServerWatch | Watch] = []  # of the server, and of the model processes once ready
        self._lost = ""  # the server or the model whose process is given up

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid  # also the id of its process group

    def __enter__(self) -> RunningServer:
        try:
            self.start()
        except BaseException:  # an interrupt while loading, too, must leave nothing behind
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when the three models have answered a request. Call it in the main thread: the server ends with its
        starter."""
        if threading.current_thread() is not threading.main_thread():
            raise ServerError("a server ends with the thread that started it; start it in the main thread")
        installation = tritonserver.find_installation(os.environ)
        tritonserver.check_numpy(np.__version__, installation.server_version)
        leftovers.remove_leftovers(self.settings.run_root, self._report)
        check_shared_memory(3 * self.options.shared_memory_bytes)
        with ExitStack() as held:  # the ports stay bound until just before the server binds them
            host, options = self.options.host, self.options
            ports = [
                _reserve_port(held, host, name, getattr(options, name))
                for name in ("http_port", "grpc_port", "metrics_port")
            ]
            if len(set(ports)) < len(ports):
                raise ServerError(f"http_port, grpc_port and metrics_port are {ports}; they must differ")
            self.http_url, self.grpc_url, self.metrics_url = (f"{_reachable(host)}:{port}" for port in ports)
            Deployment.of(self.settings, memory_bytes=ANY_MEMORY)  # the models would refuse it three times, and late
            self._work = leftovers.make_work_folder(self._region_prefix)
            backends = installation.link_backends(self._work / "backends")
            command = [str(installation.executable), *self._flags(ports, backends)]
            environ = server_environment(os.environ, installation, self._work / "settings.toml")
            (self._work / "settings.toml").write_text(self.settings.to_toml())
        libc = ctypes.CDLL(None)  # before the fork: the child must not load anything

        def prepare() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # no server without its serve
            _raise_limit(resource.RLIMIT_NOFILE, MAX_FILES)
            _raise_limit(resource.RLIMIT_STACK, STACK_BYTES)

        self._process = subprocess.Popen(
            command,
            cwd=self._work,  # an empty folder: the stub puts it first on its import path
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a terminal's Ctrl-C reaches serve only
            preexec_fn=prepare,
        )
        self._run_folder = RunFolder.of_server(self.settings.run_root, self.pid)
        if self._restarts:
            self._run_folder.note_restarts(self._restarts)
        self._reader = threading.Thread(target=self._read_log, name="server log", daemon=True)
        self._reader.start()
        self._watches = [ServerWatch(self.pid, self.http_url)]
        while not self._answers_ready():
            self._check_alive()
            time.sleep(0.05)
        timeout_s = self.settings.step_timeout_s
        self._watches += [Watch(self._run_folder, model, timeout_s) for model in MODELS]
        self._test_models()
        self.is_ready = True

    def wait(self) -> None:
        """Blocks while the server serves. Raises ServerLostError when it or a model ends, hangs or is stopped."""
        while not (reason := self._failure()):
            time.sleep(1.0)
        raise ServerLostError(reason)

    def stop(self) -> None:
        """Drain, stop, clean up. An interrupt on the way cuts the rest short but for the cleaning up."""
        try:
            if self.is_ready and self._process is not None and self._process.poll() is None:
                if not (self._lost or self._failure()):
                    self._drain(self.options.drain_timeout_s)
                    self._terminate()
                elif self._lost in CALLED_MODELS:  # the others can answer the open requests with the reason
                    self._drain(BROKEN_DRAIN_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the whole process group at once and remove what belonged to it."""
        if self._process is not None:
            process_group.kill(self.pid)
            self._process.wait()
            self._reader.join(timeout=5.0)
            leftovers.remove_regions(self._region_prefix)
        if self._run_folder is not None:
            self._run_folder.remove()
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)

    def _drain(self, timeout_s: float) -> None:
        folder = self._run_folder
        if folder is None or not folder.path.is_dir():
            return
        folder.ask_drain(timeout_s)
        deadline = time.monotonic() + timeout_s + CANCEL_S
        while not folder.drained.exists() and self._process.poll() is None:
            if time.monotonic() > deadline:
                self._report(f"requests still open after {timeout_s:g} s are cut off")
                return
            time.sleep(0.05)
        time.sleep(SENT_S)

    def _terminate(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + UNLOAD_S
        while self._has_stubs() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _has_stubs(self) -> bool:
        return self._process.poll() is None and any(
            m.parent == self.pid for m in process_group.members(self.pid)
        )

    def _test_models(self) -> None:
        """One request through all three."""
        if reason := ailment(self.http_url, SELF_TEST_S):
            self._check_alive()
            raise ServerError(f"the models are loaded, but the first request failed: {reason}")

    def _check_alive(self) -> None:
        if reason := self._failure():
            raise ServerError(reason)

    def _failure(self) -> str:
        """Why the server cannot serve; empty while it can."""
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            self._reader.join(timeout=5.0)
            last = "\n".join(list(self.log)[-20:])
            ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            return load_failure(self.log) or f"the server's last lines:\n{last}\nthe server {ended}"
        is_silent = False  # the server: the models' processes wait for it, and are not to blame
        for watch in self._watches:
            if (reason := watch.trouble()) and not is_silent:
                self._lost = watch.lost
                return f"{reason}; the server cannot go on without it"
            is_silent = is_silent or watch.is_waiting
        for member in () if is_silent else process_group.members(self.pid):
            if member.is_zombie and member.parent == self.pid:
                self._died = self._died or time.monotonic()
                if time.monotonic() - self._died > LOAD_FAILURE_S:
                    return f"the process of a model ended (pid {member.pid}) while it loaded"
        return ""

    def _answers_ready(self) -> bool:
        return status(self.http_url, "/v2/health/ready", ANSWER_S) == 200

    def _read_log(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                line = line.rstrip("\n")
                self.log.append(line)
                if is_worth_showing(line, self.is_ready, self.options.log_verbose):
                    with suppress(OSError):  # a full disk: a server whose log nobody reads would block
                        self._report(line)

    def _flags(self, ports: list[int], backends: Path | None) -> list[str]:
        options, host = self.options, self.options.host
        flags = {
            "model-repository": self.model_repository,
            "model-control-mode": "none",
            "http-address": host,
            "grpc-address": host,
            "metrics-address": host,
            "http-port": ports[0],
            "grpc-port": ports[1],
            "metrics-port": ports[2],
            "exit-timeout-secs": EXIT_TIMEOUT_S,
            "log-verbose": options.log_verbose,
            "allow-gpu-metrics": str(self.settings.device == "cuda").lower(),
            "http-restricted-api": f"{_RESTRICTED_APIS}:admin-key={secrets.token_hex(16)}",  # nobody knows the key
            "grpc-restricted-protocol": f"{_RESTRICTED_APIS}:admin-key={secrets.token_hex(16)}",
        }
        if backends is not None:
            flags["backend-directory"] = backends
        if self.settings.device == "cuda":
            pool = self.settings.cuda_pool_bytes
            flags["cuda-memory-pool-byte-size"] = f"{self.settings.gpu}:{pool}"
            if not pool:  # no tensor of the server's is on a GPU; it would still open all that it may use
                flags["pinned-memory-pool-byte-size"] = 0
                flags["min-supported-compute-capability"] = NO_GPU
        python_backend = {
            "shm-default-byte-size": options.shared_memory_bytes,
            "shm-region-prefix-name": self._region_prefix,
            "thread-pool-size": options.thread_pool_size,
        }
        return [
            "--disable-auto-complete-config",  # it would import torch twice for each model
            *(f"--{name}={value}" for name, value in flags.items()),
            *(f"--backend-config=python,{name}={value}" for name, value in python_backend.items()),
        ]


def server_environment(
    environ: Mapping[str, str], installation: tritonserver.Installation, settings_file: Path
) -> dict[str, str]:
    """The server's environment. The settings file is complete: no other INKLING_ variable may override it."""
    kept = {name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)}
    return installation.environment(kept) | {ENV_FILE: str(settings_file)}


def load_settings(options: Mapping[str, object]) -> Settings:
    """Settings of the environment, overridden by the ``options`` that are not None. Raises SettingsError."""
    given = {ENV_PREFIX + name.upper(): str(value) for name, value in options.items() if value is not None}
    return Settings.load({**os.environ, **given})


def check_shared_memory(needed: int) -> None:
    """Python stubs die by SIGBUS when it runs out. Raises ServerError when less than ``needed`` bytes are free."""
    status = os.statvfs(leftovers.SHARED_MEMORY)
    free = status.f_bavail * status.f_frsize
    if free < needed:
        raise ServerError(
            f"{leftovers.SHARED_MEMORY} has {free >> 20} MiB free; the three models need {needed >> 20} MiB. "
            "Give it more (docker: --shm-size 2g)"
        )


def load_failure(log: deque[str]) -> str:
    """Why models did not load, from the server's log: one line a model, the target's reason first."""
    reasons = {}
    for line in log:
        if match := _LOAD_FAILURE.search(line):
            reasons[match[1]] = match[2].replace("\\n", "\n").replace('\\"', '"')
    order = [name for name in MODELS if name in reasons]
    return "\n".join(f"{name}: {reasons[name]}" for name in order)


def is_worth_showing(line: str, is_ready: bool, verbose: int) -> bool:
    """What the models print, always; the server's warnings once ready, before that they are about devices."""
    if verbose > 0:
        return True
    if _LOG_LINE.match(line):
        return is_ready and line[0] in "WEF"
    return not _BARE_LINE.match(line)


def _absolute(checkpoint: str) -> str:
    """As the model processes find it, which run in another folder. CheckpointError for a wrong synthetic name."""
    if is_synthetic(checkpoint):
        SyntheticName.parse(checkpoint)
        return checkpoint
    return str(Path(checkpoint).resolve())


def _raise_limit(limit: int, wanted: int) -> None:
    """To ``wanted``, or as far as this process may."""
    most = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


def _reachable(host: str) -> str:
    return "127.0.0.1" if host == "0.0.0.0" else host


def _reserve_port(held: ExitStack, host: str, name: str, port: int) -> int:
    """Bind ``port`` (0: any free one) until ``held`` closes. Raises ServerError when it is taken."""
    listener = held.enter_context(socket.socket())
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ports in TIME_WAIT are free
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        reason = f"{name} is {port} on {host}: {error}; choose another, or 0 for a free one"
        raise ServerError(reason) from error
    return listener.getsockname()[1]

"""Heartbeats of processes that are killed, stopped, hung or orphaned, as another process sees them."""

from __future__ import annotations

import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from inkling import liveness, process_group
from inkling.liveness import ServerWatch, Watch, watch
from inkling.run_folder import RunFolder
from inkling.server import RunningServer
from inkling.settings import Settings

MODEL = "some_model"
# Not in this process: a heartbeat changes how its process ends.
SCRIPT = f"""
import ctypes, sys, time
from pathlib import Path
from inkling.liveness import Heartbeat
from inkling.run_folder import RunFolder
heartbeat = Heartbeat(RunFolder(Path(sys.argv[1])), {MODEL!r})
print("ready", flush=True)
"""
IDLE = "time.sleep(60)"
HUNG = "ctypes.PyDLL(None).sleep(60)"  # holds the interpreter, unlike time.sleep
IN_A_STEP = "with heartbeat.step(): time.sleep(60)"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.fixture
def model(folder: RunFolder) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """``model(code)``: a process that has a heartbeat and then runs ``code``."""
    processes = []

    def start(code: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", SCRIPT + code, str(folder.path)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert processes[-1].stdout.readline() == b"ready\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def trouble_within(watched: Watch | ServerWatch, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while not (reason := watched.trouble()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return reason


def test_a_process_that_beats_is_well_and_its_file_is_private(folder, model) -> None:
    watched = Watch(folder, MODEL, step_timeout_s=60)
    assert watched.trouble() == "", "not there yet"
    model(IDLE)
    assert trouble_within(watched, 2.0) == ""
    assert folder.heartbeat(MODEL).stat().st_mode & 0o777 == 0o600


def test_a_killed_process_is_found_even_when_nobody_fetched_its_exit_status(folder, model) -> None:
    process = model(IDLE)
    watched = Watch(folder, MODEL, 60)
    process.kill()
    assert f"{MODEL} (pid {process.pid}) ended" in trouble_within(watched, 2.0)


def test_a_pid_that_was_used_again_is_not_taken_for_the_model(folder, model, monkeypatch) -> None:
    model(IDLE)
    watched = Watch(folder, MODEL, 60)
    assert watched.trouble() == ""
    monkeypatch.setattr(process_group, "start_time", lambda pid: "1")
    assert "ended" in watched.trouble()


def test_a_stopped_process_is_found_and_a_blink_is_not(folder, model) -> None:
    process = model(IDLE)
    watched = Watch(folder, MODEL, 60)
    process.send_signal(signal.SIGSTOP)
    assert trouble_within(watched, liveness.STOPPED_S / 2) == ""
    process.send_signal(signal.SIGCONT)
    assert trouble_within(watched, 2 * liveness.STOPPED_S) == ""
    process.send_signal(signal.SIGSTOP)
    assert "is stopped by a signal" in trouble_within(watched, 2 * liveness.STOPPED_S)


def test_a_process_that_holds_the_interpreter_is_found(folder, model, monkeypatch) -> None:
    monkeypatch.setattr(liveness, "SILENT_S", 1.0)
    model(HUNG)
    assert "hangs: no heartbeat for 1 s" in trouble_within(Watch(folder, MODEL, 60), 3.0)


def test_a_step_has_a_bound_and_no_step_has_none(folder, model) -> None:
    model(IN_A_STEP)
    assert "hangs: step 1 has taken" in trouble_within(Watch(folder, MODEL, 1), 3.0)
    model(IDLE)
    assert trouble_within(Watch(folder, MODEL, 1), 2.0) == ""


def test_a_watcher_that_did_not_run_blames_nobody(folder, model, monkeypatch) -> None:
    """Both may have been stopped: the model gets its whole time anew."""
    monkeypatch.setattr(liveness, "SILENT_S", 1.0)
    monkeypatch.setattr(liveness, "UNWATCHED_S", 0.5)
    model(HUNG)
    watched = Watch(folder, MODEL, 60)
    watched.trouble()
    time.sleep(2.0)
    assert watched.trouble() == ""
    assert "no heartbeat" in trouble_within(watched, 2.0)


def test_a_model_that_got_no_answer_says_so(folder, model) -> None:
    model("heartbeat.lost_model('inkling_mtp'); " + IDLE)
    watched = Watch(folder, MODEL, 60)
    assert "got no answer from inkling_mtp" in trouble_within(watched, 2.0)
    assert watched.lost == "inkling_mtp"


def test_whoever_waits_for_trouble_is_told_once(folder, model) -> None:
    process = model(IDLE)
    process.kill()
    told: list[str] = []
    watch([Watch(folder, "another", 60), Watch(folder, MODEL, 60)], told.append, period_s=0.01)
    assert told == [f"{MODEL} (pid {process.pid}) ended"]


class HealthHandler(BaseHTTPRequestHandler):
    """Answers while the server's ``well`` is set."""

    protocol_version = "HTTP/1.1"  # keeps connections

    def do_GET(self) -> None:  # noqa: N802
        self.server.well.wait()
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def http_server(monkeypatch) -> Iterator[socketserver.ThreadingTCPServer]:
    monkeypatch.setattr(liveness, "SILENT_S", 1.0)
    monkeypatch.setattr(liveness, "ANSWER_S", 0.2)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), HealthHandler) as server:
        server.daemon_threads, server.well = True, threading.Event()
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.well.set()
        server.shutdown()


def watch_of(server: socketserver.ThreadingTCPServer, pid: int) -> ServerWatch:
    return ServerWatch(pid, f"127.0.0.1:{server.server_address[1]}")


def test_a_server_that_answers_no_more_is_found_and_one_that_loads_is_not(http_server) -> None:
    watched = watch_of(http_server, os.getpid())
    assert trouble_within(watched, 2.0) == "", "it has not answered yet"
    assert not watched.is_waiting
    http_server.well.set()
    assert trouble_within(watched, 1.5) == "" and not watched.is_waiting
    http_server.well.clear()
    assert trouble_within(watched, 0.5) == "" and watched.is_waiting
    reason = trouble_within(watched, 3.0)
    assert reason == f"tritonserver (pid {os.getpid()}) hangs: no answer to a health request for 1 s"


class ModelInTrouble:
    """A watch whose model hangs; counts the looks at it."""

    lost, is_waiting, looks = "inkling_target", False, 0

    def trouble(self) -> str:
        self.looks += 1
        return "inkling_target hangs"


def test_models_are_watched_but_not_blamed_while_the_server_is_silent(http_server) -> None:
    server = RunningServer(Settings("synthetic:micro"))
    server._process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    model, watched = ModelInTrouble(), watch_of(http_server, server.pid)
    server._watches = [watched, model]
    try:
        http_server.well.set()
        assert trouble_within(watched, 0.1) == ""
        http_server.well.clear()
        assert server._failure() == "" and model.looks == 1
        http_server.well.set()
        assert server._failure().startswith("inkling_target hangs") and model.looks == 2
    finally:
        server._process.kill()
        server._process.wait()


@pytest.mark.parametrize("silent_s", [0.1, 10.0])
def test_a_stopped_server_is_found_and_not_taken_for_one_that_hangs(
    http_server, model, monkeypatch: pytest.MonkeyPatch, silent_s: float
) -> None:
    process = model(IDLE)
    http_server.well.set()
    watched = watch_of(http_server, process.pid)
    assert trouble_within(watched, 0.5) == ""
    monkeypatch.setattr(liveness, "SILENT_S", silent_s)
    process.send_signal(signal.SIGSTOP)
    reason = trouble_within(watched, 2 * liveness.STOPPED_S)
    assert reason == f"tritonserver (pid {process.pid}) is stopped by a signal"
    assert watched.lost == "tritonserver"


def test_a_process_ends_with_its_parent(folder) -> None:
    child = f"subprocess.Popen([sys.executable, '-c', {SCRIPT + IDLE!r}, sys.argv[1]]).pid"
    parent = f"import subprocess, sys, time; print({child}, flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", parent, str(folder.path)], stdout=subprocess.PIPE, text=True
    )
    pid = int(process.stdout.readline())
    assert process.stdout.readline() == "ready\n"
    assert process_group.state(pid) in "SR"
    process.kill()
    process.wait()
    process.stdout.close()  # not read to its end, which is the child's
    deadline = time.monotonic() + 5.0
    while process_group.state(pid) not in "ZX" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process_group.state(pid) in "ZX"


def test_the_end_of_a_process_takes_nothing_apart(folder) -> None:
    code = "import atexit; " + SCRIPT.replace("heartbeat =", "atexit.register(print, 'apart'); heartbeat =")
    done = subprocess.run([sys.executable, "-c", code, str(folder.path)], capture_output=True, check=True)
    assert done.stdout == b"ready\n"


def test_no_process_is_in_no_state() -> None:
    gone = 2**22 + 1
    assert process_group.state(gone) == process_group.start_time(gone) == ""
    assert not process_group.is_running(gone, "")
    assert process_group.is_running(os.getpid(), process_group.start_time(os.getpid()))

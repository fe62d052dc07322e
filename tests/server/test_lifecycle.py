"""``inkling serve`` from start to end: it says ready once, drains, and leaves nothing behind."""

from __future__ import annotations

import http.client
import os
import resource
import signal
import socket
from collections import deque
from pathlib import Path

import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from inkling import tritonserver
from inkling.client import ResponseError, stream_http
from inkling.server import (
    ServerOptions,
    check_shared_memory,
    is_worth_showing,
    load_failure,
    server_environment,
)
from inkling.tritonserver import Installation, ServerError, check_numpy, find_installation
from tests.server.streams import REQUEST, OpenStream

server_test = pytest.mark.server


def is_refused(http_url: str) -> bool:
    try:
        list(stream_http(http_url, REQUEST | {"max_tokens": 1}))
    except ResponseError as error:
        assert "about to stop" in str(error)
        return True
    return False


@server_test
def test_ctrl_c_drains_and_leaves_nothing_behind(serve, tiny_checkpoint):
    command = serve("--checkpoint", str(tiny_checkpoint))
    command.wait_ready()
    assert len(command.processes()) == 4  # tritonserver and three stubs
    open_stream = OpenStream(command.grpc_url, max_tokens=200)
    command.wait_for(lambda: open_stream.num_tokens > 0, "first token")
    command.signal(signal.SIGINT)
    command.wait_for(lambda: command.is_draining, "drain")
    command.wait_for(lambda: is_refused(command.http_url), "refusal of new requests")
    open_stream.join()
    assert (open_stream.num_tokens, open_stream.error) == (200, None)
    assert command.wait_stopped() == 0
    assert command.leftovers() == []


@server_test
def test_a_second_ctrl_c_cuts_requests_off_and_leaves_nothing_behind(serve, tiny_checkpoint):
    command = serve("--checkpoint", str(tiny_checkpoint))
    command.wait_ready()
    open_stream = OpenStream(command.grpc_url, max_tokens=3000)
    command.wait_for(lambda: open_stream.num_tokens > 0, "first token")
    command.signal(signal.SIGINT)
    command.wait_for(lambda: command.is_draining, "drain")
    command.signal(signal.SIGINT)
    assert command.wait_stopped() == 128 + signal.SIGINT
    open_stream.join()
    assert open_stream.error is not None and open_stream.num_tokens < 3000
    assert command.leftovers() == []


@server_test
def test_sigterm_stops_an_idle_server_which_may_open_many_files(serve, tiny_checkpoint):
    few = ("sh", "-c", 'ulimit -S -n 500 && exec "$@"', "sh")
    command = serve("--checkpoint", str(tiny_checkpoint), wrapper=few)
    command.wait_ready()
    soft, hard = resource.prlimit(command.server_pid, resource.RLIMIT_NOFILE)
    assert soft == hard > 500
    command.signal(signal.SIGTERM)
    assert command.wait_stopped() == 0
    assert command.output.read_text().count("\n") == 1, "more than the ready line"
    assert command.leftovers() == []


@server_test
def test_what_a_drain_leaves_open_is_cancelled(serve, tiny_checkpoint):
    command = serve(
        "--checkpoint", str(tiny_checkpoint), "--max-running-sequences", "1", "--drain-timeout", "1"
    )
    command.wait_ready()
    running, waiting = (OpenStream(command.grpc_url, max_tokens=4000) for _ in range(2))
    command.wait_for(lambda: running.num_tokens or waiting.num_tokens, "first token")
    command.signal(signal.SIGTERM)
    for stream in (running, waiting):
        stream.join()
        assert "not complete within 1 s" in str(stream.error)
    assert command.wait_stopped() == 0
    assert command.leftovers() == []


@server_test
def test_the_server_does_not_outlive_a_killed_serve(serve, tiny_checkpoint):
    command = serve("--checkpoint", str(tiny_checkpoint))
    command.wait_ready()
    command.signal(signal.SIGKILL)
    command.wait_stopped()
    command.wait_for(lambda: not command.processes(), "end of the server")


@server_test
def test_a_missing_checkpoint_ends_serve_with_the_reason(serve, tmp_path):
    missing = tmp_path / "nothing here"
    command = serve("--checkpoint", str(missing))
    assert command.wait_stopped() == 1
    assert command.output.read_text() == ""
    errors = command.errors.read_text()
    assert errors == f"error: {missing}/config.json: file is 'missing'; every checkpoint has one; name its directory\n"
    assert list(command.folder.iterdir()) == []


@pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
def test_a_taken_port_is_refused_before_the_server_starts(serve, tmp_path, name):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        command = serve("--checkpoint", str(tmp_path), f"--{name}-port", str(port))
        assert command.wait_stopped() == 1
    assert f"{name}_port is {port} on 127.0.0.1: " in command.errors.read_text()
    assert list(command.folder.iterdir()) == []


def test_an_unknown_setting_is_refused(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("INKLING_CHECKPIONT", "x")
    command = serve("--checkpoint", str(tmp_path))
    assert command.wait_stopped() == 1
    assert "unknown setting 'checkpiont'" in command.errors.read_text()


@pytest.mark.parametrize(
    ("numpy_version", "server_version", "is_refused"),
    [
        ("1.26.4", "2.51.0", False),
        ("2.0.0", "2.51.0", True),
        ("2.3.1", "2.9.0", True),
        ("2.3.1", "2.52.0", False),
        ("2.3.1", "3.0.0", False),
        ("2.3.1", "", False),  # not known: a server on PATH that does not say
    ],
)
def test_numpy_2_is_refused_with_a_stub_that_predates_it(numpy_version, server_version, is_refused):
    if not is_refused:
        check_numpy(numpy_version, server_version)
        return
    with pytest.raises(ServerError, match=rf"numpy is {numpy_version}.*server {server_version}.*numpy<2"):
        check_numpy(numpy_version, server_version)


def test_the_packaged_server_is_found_with_its_version():
    installation = find_installation({"PATH": ""})
    assert installation.executable.is_file()
    assert installation.server_version == "2.51.0"


def test_a_server_on_path_brings_its_own_backends(tmp_path, monkeypatch):
    monkeypatch.setattr(tritonserver.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServerError, match=r"inkling-triton\[server\]"):
        find_installation({"PATH": str(tmp_path)})
    executable = tmp_path / "tritonserver"
    executable.touch(mode=0o755)
    installation = find_installation({"PATH": str(tmp_path), "TRITON_SERVER_VERSION": "2.60.0"})
    assert installation == Installation(executable, None, "2.60.0")
    assert installation.link_backends(tmp_path / "backends") is None


def test_the_backend_folder_is_made_of_links(tmp_path):
    installation = find_installation({"PATH": ""})
    backends = installation.link_backends(tmp_path / "backends")
    links = list((backends / "python").iterdir())
    assert {link.name for link in links} >= {"libtriton_python.so", "triton_python_backend_stub"}
    assert all(link.is_symlink() and link.resolve().is_file() for link in links)


def test_the_settings_file_is_the_only_setting_the_models_see(tmp_path):
    environ = {"PATH": "/bin", "HOME": "/h", "INKLING_DEVICE": "cuda", "INKLING_SETTINGS": "old"}
    seen = server_environment(environ, Installation(Path("tritonserver")), tmp_path / "settings.toml")
    inkling = {name: value for name, value in seen.items() if name.startswith("INKLING_")}
    assert inkling == {"INKLING_SETTINGS": str(tmp_path / "settings.toml")}
    assert seen["HOME"] == "/h"


FAILED = "E1130 05:44:43.3 85 model_lifecycle.cc:642] \"failed to load '%s' version 1: Internal: %s"
LOG = [
    'I1130 05:44:42.1 85 pb_stub.cc:366] "Failed to initialize Python stub: E: x\\n\\nAt:\\n  m.py(9): i\\n"',
    FAILED % ("inkling_mtp", 'ModelError: target failed\\n\\nAt:\\n  /m.py(9): i\\n"'),
    FAILED % ("inkling_target", 'SettingsError: x is \\"x\\"\\n\\nAt:\\n  /m.py(9): i\\n"'),
    "I1130 05:44:43.3 85 model_lifecycle.cc:777] \"failed to load 'inkling_target'\"",
]


def test_the_reason_of_a_failed_load_is_the_models_own_target_first():
    assert load_failure(deque(LOG)).splitlines() == [
        'inkling_target: SettingsError: x is "x"',
        "inkling_mtp: ModelError: target failed",
    ]
    assert load_failure(deque(["I1130 05:44:42.1 85 x.cc:1] \"successfully loaded 'inkling_mtp'\""])) == ""


@pytest.mark.parametrize(
    ("line", "while_loading", "once_ready"),
    [
        ("inkling_target: loading weights 37 %", True, True),
        ('I1130 05:44:24.549889 8298 cuda_memory_manager.cc:117] "CUDA memory pool disabled"', False, False),
        ('W1130 05:44:24.549889 8298 pinned_memory_manager.cc:273] "Unable to allocate"', False, True),
        ("+------+------+", False, False),
        ("| Model | Version |", False, False),
        ("", False, False),
    ],
)
def test_models_are_heard_and_the_servers_tables_are_not(line, while_loading, once_ready):
    assert is_worth_showing(line, False, verbose=0) is while_loading
    assert is_worth_showing(line, True, verbose=0) is once_ready
    assert is_worth_showing(line, False, verbose=1)


def test_shared_memory_that_is_too_small_is_refused_with_its_size():
    check_shared_memory(1)
    with pytest.raises(
        ServerError, match=r"/dev/shm has \d+ MiB free; the three models need 1048576 MiB.*--shm-size"
    ):
        check_shared_memory(1 << 40)


def test_the_server_listens_on_this_machine_alone_by_default():
    assert ServerOptions().host == "127.0.0.1"


@server_test
def test_serve_ends_with_the_reason_when_a_model_process_dies(serve, tiny_checkpoint):
    command = serve("--checkpoint", str(tiny_checkpoint))
    command.wait_ready()
    stream = OpenStream(command.grpc_url, max_tokens=4000)
    command.wait_for(lambda: stream.num_tokens > 0, "first token")
    pid = command.stub("inkling_mtp")
    os.kill(pid, signal.SIGKILL)
    stream.join()
    assert "inkling_mtp" in str(stream.error) and "Socket closed" not in str(stream.error)
    assert command.wait_stopped() == 1
    assert f"error: inkling_mtp (pid {pid}) ended" in command.errors.read_text()
    assert command.leftovers() == []


@server_test
def test_management_interfaces_are_closed_and_those_of_load_tests_open(start_server, tiny_checkpoint):
    server = start_server(tiny_checkpoint)
    assert server._failure() == ""
    connection = http.client.HTTPConnection(server.http_url, timeout=30)

    def status(method: str, path: str) -> int:
        connection.request(method, path, "{}" if method == "POST" else None)
        response = connection.getresponse()
        response.read()
        return response.status

    shared = "/v2/systemsharedmemory/region/a/register"
    for path in ("/v2/repository/index", "/v2/repository/models/spec_ensemble/unload", shared):
        assert status("POST", path) == 403, path
    for path in ("/v2/logging", "/v2/trace/setting", "/v2/systemsharedmemory/status"):
        assert status("GET", path) == 403, path
    for path in ("/v2/models/spec_ensemble/config", "/v2/models/spec_ensemble/stats", "/v2/health/ready"):
        assert status("GET", path) == 200, path
    connection.close()
    client = grpc.InferenceServerClient(server.grpc_url)
    for call in (client.get_model_repository_index, client.get_log_settings, client.get_trace_settings,
                 client.get_system_shared_memory_status):  # fmt: skip
        with pytest.raises(InferenceServerException, match="restricted"):
            call()
    client.get_model_config("spec_ensemble")
    client.get_inference_statistics("spec_ensemble")
    client.close()


@server_test
def test_serve_ends_when_the_run_folder_cannot_be_made(serve, tiny_checkpoint):
    command = serve("--checkpoint", str(tiny_checkpoint), "--run-dir", "/proc/nowhere")
    assert command.wait_stopped() == 1
    assert "run folder /proc/nowhere" in command.errors.read_text()

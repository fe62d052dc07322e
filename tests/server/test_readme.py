"""Every command of the README, as it stands there but for addresses and sizes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from inkling.client import stream_http
from inkling.tritonserver import find_installation
from tests.make_targets import BIN, ROOT, make

pytestmark = pytest.mark.server
README = (ROOT / "README.md").read_text()
FENCED = [
    line.split("#")[0].strip()
    for block in re.findall(r"^```\n(.*?)^```", README, re.S | re.M)
    for line in block.replace("\\\n", "").splitlines()
]
COMMAND = r"(?:make|curl|tritonserver|(?:\.venv/bin/)?inkling) [^`]+"
COMMANDS = [line for line in FENCED if re.fullmatch(COMMAND, line)] + re.findall(f"`({COMMAND})`", README)
COMMANDS = {line.removeprefix(".venv/bin/") for line in COMMANDS}


def command(start: str) -> list[str]:
    """The words of the command of the README that begins so; it may also be mentioned without its options."""
    return shlex.split(max((line for line in COMMANDS if line.startswith(start)), key=len))


def run(words: list[str], **environ: str) -> str:
    path = f"{BIN}:{os.environ['PATH']}"
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=os.environ | environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


RUN_HERE = ("inkling serve", "inkling generate", "curl", "inkling check", "inkling plan", "inkling health")
RUN_HERE += ("tritonserver", "make demo", "make bench")
RUN_ELSEWHERE = {
    "make load": "tests/test_load_report.py",
    "make test": ".ci/run",
    "make qa": ".ci/run",
    "make soak-serve": "tests/qa/test_soak.py",  # three minutes of it
}


def test_every_command_is_run():
    starts = {" ".join(line.split()[: 2 if line.startswith(("make", "inkling")) else 1]) for line in COMMANDS}
    assert starts == {*RUN_HERE, *RUN_ELSEWHERE}
    code = Path(__file__).read_text()
    assert all(f'command("{start}")' in code for start in RUN_HERE)
    assert re.search(r"^make\b.* test qa$", (ROOT / ".ci" / "run").read_text(), re.M)
    assert '"load"' in (ROOT / RUN_ELSEWHERE["make load"]).read_text()


def test_a_checkpoint_is_served_and_asked(serve, monkeypatch):
    monkeypatch.chdir(ROOT)
    served = serve(*command("inkling serve")[2:])
    served.wait_ready()
    said = run([*command("inkling generate"), "--url", f"grpc://{served.grpc_url}"])
    assert said.strip()
    assert run([*command("inkling health"), "--url", f"http://{served.http_url}"]) == "healthy\n"
    curl = [word.replace("localhost:8000", served.http_url) for word in command("curl")]
    events = run(curl).split("data: ")[1:]
    assert "".join(json.loads(event)["text_output"] for event in events) == said.removesuffix("\n")
    served.signal(signal.SIGINT)
    assert served.wait_stopped() == 0


@pytest.mark.parametrize(
    ("words", "answer"),
    [(command("inkling check"), "is complete"), (command("inkling plan"), "sequences that fit: ")],
    ids=["check", "plan"],
)
def test_a_checkpoint_is_checked_and_planned(words: list[str], answer: str):
    assert answer in run(["demo/checkpoint" if word == "DIR" else word for word in words])


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


def test_a_bare_tritonserver_serves(tmp_path, demo_checkpoint):
    """The packaged one: its folders are told to it, as an image's are known to its own."""
    installation = find_installation(os.environ)
    kinds = ("http", "grpc", "metrics")
    ports = dict(zip(kinds, free_ports(3), strict=True))
    words = [
        *command("tritonserver"),
        f"--backend-directory={installation.link_backends(tmp_path / 'backends')}",
    ]
    words += [
        f"--{kind}-{option}" for kind in kinds for option in ("address=127.0.0.1", f"port={ports[kind]}")
    ]
    words[0] = str(installation.executable)
    environ = installation.environment(os.environ)
    run_root = tmp_path / "run"
    run_root.mkdir()
    environ |= {"INKLING_CHECKPOINT": str(demo_checkpoint), "INKLING_RUN_DIR": str(run_root)}
    log = tmp_path / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(words, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT)
    try:
        run(["curl", "-fsS", "--retry", "60", "--retry-delay", "1", "--retry-all-errors",
             f"127.0.0.1:{ports['http']}/v2/health/ready"])  # fmt: skip
        answer = list(stream_http(f"127.0.0.1:{ports['http']}", {"text_input": "a", "max_tokens": 3}))
        assert answer and list(run_root.iterdir())
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0, log.read_text()
        assert not list(run_root.iterdir())
    finally:
        server.kill()
        server.wait()


def test_the_demo_runs(tmp_path):
    said = make(tmp_path, command("make demo")[1])
    assert "the same with drafting on" in said and "--- request 4 over http" in said


@pytest.mark.qa  # it measures: nothing else may run
def test_the_benchmark_runs(tmp_path):
    table = tmp_path / "rows.csv"
    said = make(tmp_path, command("make bench")[1], BENCH=f"--rounds 1 --num-prompts 1 --table {table}")
    assert "| N=3, HTTP, 8 streams | " in said
    assert table.read_text().count("\n") == 5

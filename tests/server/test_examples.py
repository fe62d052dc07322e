"""The files of ``examples/``, run against a live server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from inkling.client import stream_http

pytestmark = pytest.mark.server
ROOT = Path(__file__).parents[2]
PROMPT = "def quicksort(values):"


def run(command: list[str], **environ: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(name: str, url: str) -> str:
    return run([sys.executable, f"examples/{name}", url])


@pytest.fixture(scope="module")
def expected(server) -> str:
    request = {"text_input": PROMPT, "max_tokens": 24}
    return "".join(response["text_output"] for response in stream_http(server.http_url, request))


def test_every_example_is_run_here():
    names = {path.name for path in (ROOT / "examples").iterdir()}
    code = Path(__file__).read_text()
    assert names == {"curl.sh", "http_client.py", "grpc_stream.py", "grpc_cancel.py"}
    assert all(f'"{name}"' in code or f"/{name}" in code for name in names)


def test_curl(server, expected):
    said = run(["bash", "examples/curl.sh"], URL=server.http_url, METRICS_URL=server.metrics_url)
    _, whole, streamed, settings, counters = re.split(r"--- .*\n", said)
    assert json.loads(whole)["text_output"] == expected
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line]
    assert len(events) > 1 and "".join(event["text_output"] for event in events) == expected
    assert events[-1]["finish_reason"] in ("length", "stop")
    assert json.loads(settings)["text_output"]
    assert float(counters.split()[-1]) > 0


def test_http(server, expected):
    said = example("http_client.py", server.http_url)
    assert "ready: True" in said and said.endswith(f"tokens: {expected}\n")


def test_grpc_streaming(server, expected):
    said = example("grpc_stream.py", server.grpc_url)
    assert said.startswith(expected + "\nfinish reason: ")


def test_grpc_cancel_ends_the_request_on_the_server(server):
    def steps() -> int:
        with urllib.request.urlopen(f"http://{server.http_url}/v2/models/inkling_target/stats") as response:
            return json.load(response)["model_stats"][0]["execution_count"]

    before = count = steps()
    assert example("grpc_cancel.py", server.grpc_url).endswith("\ncancelled\n")
    while count != (count := steps()):
        time.sleep(0.3)
    assert 5 <= count - before < 200, "2,000 tokens take 400 steps at least, with four drafts a step"

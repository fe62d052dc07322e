"""A model's process dies on the GPU: the server goes down with it, and nothing keeps memory of the GPU."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from inkling import process_group
from inkling.client import stream
from inkling.protocol import DRAFT_MODEL, TARGET_MODEL
from inkling.server import RunningServer, ServerOptions
from inkling.settings import Settings
from inkling.tritonserver import ServerError
from tests.cuda.server_promise import DEMO, gpu_used

pytestmark = pytest.mark.server
ROUNDING = 32 << 20  # of what the driver itself keeps


@pytest.mark.parametrize("model", [TARGET_MODEL, DRAFT_MODEL])
def test_a_killed_model_ends_the_server_and_frees_the_gpu(device: str, model: str) -> None:
    before = gpu_used(device)
    settings = Settings(
        str(DEMO), device=device, threads=1, max_context=256, cache_bytes=1 << 28, cuda_graphs="off"
    )
    with RunningServer(settings, ServerOptions(http_port=0, grpc_port=0, metrics_port=0)) as server:
        (answer,) = stream(
            f"http://{server.http_url}", {"input_ids": [1, 2, 3], "max_tokens": 8, "stream": False}
        )
        assert answer["output_ids"]
        if device == "cuda":
            assert gpu_used(device) > before + (1 << 30), "two contexts at least"
        members = [m.pid for m in process_group.members(server.pid)]
        (stub,) = [pid for pid in members if f"/{model}/" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(stub, signal.SIGKILL)
        with pytest.raises(ServerError, match=rf"{model} \(pid {stub}\) ended"):
            server.wait()
    assert not [m for m in process_group.members(server.pid) if not m.is_zombie]
    deadline = time.monotonic() + 10.0  # the driver takes its time after a process has gone
    while gpu_used(device) > before + ROUNDING and time.monotonic() < deadline:
        time.sleep(0.2)
    assert gpu_used(device) <= before + ROUNDING

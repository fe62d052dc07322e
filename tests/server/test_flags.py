"""What the server is told, and what is refused before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from inkling.errors import InklingError
from inkling.server import RunningServer, ServerOptions
from inkling.settings import Settings

DEMO = Path(__file__).parents[2] / "demo" / "checkpoint"
FREE_PORTS = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}


@pytest.mark.parametrize(
    ("device", "transport", "is_kept_off"),
    [("cuda", "ring", True), ("cuda", "dlpack", False), ("cpu", "ring", False)],
)
def test_the_server_itself_opens_a_gpu_only_for_tensors_that_travel_through_it(
    device, transport, is_kept_off
):
    server = RunningServer(Settings("synthetic:micro", device=device, hidden_transport=transport))
    flags = dict(
        flag.removeprefix("--").split("=", 1) for flag in server._flags([1, 2, 3], None) if "=" in flag
    )
    assert ("min-supported-compute-capability" in flags) is is_kept_off
    assert (flags.get("pinned-memory-pool-byte-size") == "0") is is_kept_off
    pool = flags.get("cuda-memory-pool-byte-size", "none")
    assert (pool.startswith("0:") and int(pool[2:]) > 0) is (device == "cuda" and not is_kept_off)


@pytest.mark.parametrize(
    ("settings", "ports", "reason"),
    [
        ({"checkpoint": "/nowhere"}, {}, "/nowhere/config.json: file is 'missing'; every checkpoint has one"),
        ({"num_draft_tokens": 9}, {}, "num_draft_tokens is 9; the checkpoint has 4 MTP depths"),
        ({}, {"http_port": 28511, "grpc_port": 28511}, "are [28511, 28511, "),
    ],
    ids=["checkpoint", "setting", "ports"],
)
def test_what_no_server_could_serve_is_refused_before_it_starts(tmp_path, settings, ports, reason):
    settings = {"checkpoint": str(DEMO), "run_dir": str(tmp_path), **settings}
    server = RunningServer(Settings(**settings), ServerOptions(**{**FREE_PORTS, **ports}))
    with pytest.raises(InklingError) as raised:
        server.start()
    assert reason in str(raised.value) and not server.log

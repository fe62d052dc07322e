"""What the server is told of the GPU."""

from __future__ import annotations

import pytest

from inkling.server import RunningServer
from inkling.settings import Settings


@pytest.mark.parametrize(
    ("device", "transport", "is_kept_off"), [("cuda", "ring", True), ("cuda", "dlpack", False), ("cpu", "ring", False)]
)
def test_the_server_itself_opens_a_gpu_only_for_tensors_that_travel_through_it(device, transport, is_kept_off):
    server = RunningServer(Settings("synthetic:micro", device=device, hidden_transport=transport))
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in server._flags([1, 2, 3], None) if "=" in flag)
    assert ("min-supported-compute-capability" in flags) is is_kept_off
    assert (flags.get("pinned-memory-pool-byte-size") == "0") is is_kept_off
    pool = flags.get("cuda-memory-pool-byte-size", "none")
    assert (pool.startswith("0:") and int(pool[2:]) > 0) is (device == "cuda" and not is_kept_off)

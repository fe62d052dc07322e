"""A server whose clients are done unloads its models at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inkling import server as server_module
from inkling.client import stream
from inkling.server import RunningServer, ServerOptions
from inkling.settings import Settings

pytestmark = pytest.mark.server


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_finished_streams_do_not_keep_a_model_loaded(
    tiny_checkpoint: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "UNLOAD_S", 30.0)  # the server's own patience decides
    options = ServerOptions(http_port=0, grpc_port=0, metrics_port=0)
    with RunningServer(Settings(str(tiny_checkpoint), threads=1, max_context=64), options) as server:
        url = f"{scheme}://{server.grpc_url if scheme == 'grpc' else server.http_url}"
        inputs = {"input_ids": [1, 2, 3], "max_tokens": 8}
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda _: list(stream(url, inputs)), range(96)))
    assert "Exit timeout expired" not in "\n".join(server.log)

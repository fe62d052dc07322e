"""Requests whose answers are read in the background, and when they ended."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any

from inkling.client import ResponseError, stream_grpc
from inkling.protocol import ENSEMBLE_MODEL, TARGET_MODEL


def target_steps(http_url: str) -> int:
    """How many steps the target has made, by Triton's own statistics."""
    connection = http.client.HTTPConnection(http_url, timeout=60)
    connection.request("GET", f"/v2/models/{TARGET_MODEL}/stats")
    stats = json.loads(connection.getresponse().read())
    connection.close()
    return stats["model_stats"][0]["execution_count"]


REQUEST = {"text_input": "a", "ignore_eos": True, "return_num_output_tokens": True, "return_output_ids": True}


class _InBackground:
    def __init__(self) -> None:
        self.ended = 0.0  # monotonic seconds
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.read()
        self.ended = time.monotonic()

    def read(self) -> None:
        raise NotImplementedError

    def join(self, timeout_s: float = 120.0) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"no answer within {timeout_s:g} s"


class OpenStream(_InBackground):
    """A gRPC stream."""

    def __init__(self, url: str, max_tokens: int, **inputs: Any):
        self.url, self.inputs = url, REQUEST | {"max_tokens": max_tokens} | inputs
        self.ids: list[int] = []
        self.error: ResponseError | None = None
        super().__init__()

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def read(self) -> None:
        try:
            for response in stream_grpc(self.url, self.inputs):
                self.ids += response["output_ids"]
        except ResponseError as error:
            self.error = error


class OpenPost(_InBackground):
    """One answer over HTTP, with its status; 0 when the connection closed instead."""

    def __init__(self, url: str, max_tokens: int):
        self.url, self.body = url, json.dumps(REQUEST | {"max_tokens": max_tokens})
        self.status, self.answer = 0, ""
        super().__init__()

    def read(self) -> None:
        connection = http.client.HTTPConnection(self.url, timeout=300)
        try:
            connection.request("POST", f"/v2/models/{ENSEMBLE_MODEL}/generate", self.body)
            response = connection.getresponse()
            self.status, self.answer = response.status, response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            self.answer = repr(error)
        finally:
            connection.close()

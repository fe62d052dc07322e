"""Streaming client of ``spec_ensemble``: one request, its responses one by one as dicts.

Inputs are plain Python values under the names of the server's interface; over gRPC the server's own metadata
says which Triton type each has. One-element outputs are scalars but for ``output_ids``; texts are ``str``.
"""

from __future__ import annotations

import http.client
import json
import queue
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from inkling.errors import InklingError
from inkling.protocol import ENSEMBLE_MODEL

LIST_OUTPUTS = {"output_ids", "output_log_probs"}  # a list also when one element long


class ResponseError(InklingError):
    """The server answered with an error, or cannot be reached. The message is the server's."""


def stream(url: str, inputs: Mapping[str, Any], timeout_s: float = 600.0) -> Iterator[dict[str, Any]]:
    """Responses over HTTP for ``http://host:port``, over gRPC for ``grpc://host:port`` or ``host:port``."""
    scheme, _, address = url.rpartition("://")
    if scheme not in ("", "grpc", "http"):
        raise ResponseError(f"url is {url!r}; it must begin with grpc:// or http://")
    send = stream_http if scheme == "http" else stream_grpc
    return send(address.rstrip("/"), inputs, timeout_s)


def stream_grpc(url: str, inputs: Mapping[str, Any], timeout_s: float = 600.0) -> Iterator[dict[str, Any]]:
    """Responses over a gRPC stream. Closing the iterator early cancels the request on the server.

    ``url``: host:port. ``timeout_s``: longest wait for one response. Raises ResponseError.
    """
    arrived: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
    client = grpc.InferenceServerClient(url)
    is_final = False
    try:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        tensors = _tensors(client, {"stream": True, **inputs})
        client.async_stream_infer(ENSEMBLE_MODEL, tensors, enable_empty_final_response=True)
        while not is_final:
            result, error = arrived.get(timeout=timeout_s)
            if error is not None:
                raise error
            response = result.get_response()
            is_final = response.parameters["triton_final_response"].bool_param
            if response.outputs:
                names = [output.name for output in response.outputs]
                yield {name: _value(name, result.as_numpy(name).ravel().tolist()) for name in names}
    except InferenceServerException as error:
        raise ResponseError(error.message()) from error
    except queue.Empty as error:
        raise ResponseError(f"no response from {url} within {timeout_s:g} s") from error
    finally:
        # a stream that is cancelled when it has ended can keep the server from unloading the model (Triton 24.10)
        client.stop_stream(cancel_requests=not is_final)
        client.close()


def stream_http(url: str, inputs: Mapping[str, Any], timeout_s: float = 600.0) -> Iterator[dict[str, Any]]:
    """Responses of ``generate_stream`` (server-sent events). ``url``: host:port. Raises ResponseError."""
    connection = http.client.HTTPConnection(url, timeout=timeout_s)
    try:
        body = json.dumps({"stream": True, **inputs})
        connection.request("POST", f"/v2/models/{ENSEMBLE_MODEL}/generate_stream", body)
        events = connection.getresponse()
        is_complete = False
        is_stream = events.getheader("Content-Type", "").startswith("text/event-stream")
        for line in events if is_stream else [events.read()]:
            text = line.decode().removeprefix("data: ").strip()
            if text:
                response = json.loads(text)
                if "error" in response:
                    raise ResponseError(response["error"])
                names = [name for name in response if not name.startswith("model_")]
                is_complete = "seed" in response  # it comes with the last response alone
                yield {name: _value(name, response[name]) for name in names}
        if not is_complete:
            raise ResponseError(f"{url}: the connection ended before the answer was complete")
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        raise ResponseError(f"{url}: {error}") from error
    finally:
        connection.close()


# Inputs that ask for what a Tally counts.
TALLIED = {"return_finish_reason": True, "return_num_output_tokens": True, "return_perf_metrics": True}


@dataclass
class Tally:
    """Counts over the responses of one request, or of several added up."""

    num_tokens: int = 0
    num_accepted: int = 0  # draft tokens
    finish_reason: str = ""

    @classmethod
    def of(cls, responses: Iterable[Mapping[str, Any]]) -> Tally:
        tally = cls()
        for response in responses:
            tally.num_tokens += response.get("num_output_tokens", 0)
            tally.num_accepted = response.get("total_accepted_draft_tokens", tally.num_accepted)
            tally.finish_reason = response.get("finish_reason", "") or tally.finish_reason
        return tally

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.num_tokens + other.num_tokens, self.num_accepted + other.num_accepted)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens for each step of the target. A step gives one token of the target's own and the drafts it
        accepted, so there were tokens - accepted steps."""
        return self.num_tokens / max(1, self.num_tokens - self.num_accepted)

    def __str__(self) -> str:
        reason = f", finish reason {self.finish_reason}" if self.finish_reason else ""
        return f"{self.num_tokens} tokens, mean accepted length {self.mean_accepted_length:.2f}{reason}"


def _tensors(client: grpc.InferenceServerClient, inputs: Mapping[str, Any]) -> list[grpc.InferInput]:
    types = {tensor.name: tensor.datatype for tensor in client.get_model_metadata(ENSEMBLE_MODEL).inputs}
    if unknown := sorted(set(inputs) - set(types)):
        raise ResponseError(f"unknown inputs {', '.join(unknown)}; known are {', '.join(sorted(types))}")
    tensors = []
    for name, value in inputs.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        try:
            if types[name] == "BYTES":
                array = np.array([str(v).encode() for v in values], object)
            else:
                array = np.array(values, triton_to_np_dtype(types[name]))
        except (ValueError, OverflowError, TypeError) as error:
            raise ResponseError(f"{name} is {value!r}; it must fit {types[name]}: {error}") from error
        tensor = grpc.InferInput(name, list(array.shape), types[name])
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


def _value(name: str, given: Any) -> Any:
    values = given if isinstance(given, list) else [given]
    values = [value.decode() if isinstance(value, bytes) else value for value in values]
    return values[0] if len(values) == 1 and name not in LIST_OUTPUTS else values

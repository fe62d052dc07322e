"""The bridge between ``spec_ensemble``'s Triton requests and the interface: tensors in, responses out.

``pb_utils`` is the module ``triton_python_backend_utils``; it exists inside a server's python stub only, so
it comes as an argument.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from inkling.engine.metrics import RequestTrace
from inkling.engine.outbox import Chunk
from inkling.errors import InklingError, RequestError
from inkling.interface import OUTPUTS, InterfaceContext, ParsedRequest, parse_request
from inkling.log_prob_outputs import LogProbOutputs
from inkling.parameters import NUMPY_TYPES, not_utf8

NO_LOG_PROBS = LogProbOutputs()


def read_request(request: Any, context: InterfaceContext, trace: RequestTrace) -> ParsedRequest:
    """A ``pb_utils.InferenceRequest`` as a validated request; ``trace`` gets its id. Raises RequestError.

    The server's HTTP frontend does not check that its JSON is UTF-8, and the stub decodes when asked.
    """
    try:
        trace.request_id = request.request_id()
        parameters = json.loads(request.parameters() or "{}")
    except UnicodeDecodeError as error:
        raise not_utf8("the request's id or the name or value of a parameter", error) from error
    tensors = {}
    for tensor in request.inputs():
        try:
            tensors[tensor.name()] = tensor.as_numpy()
        except Exception as error:  # bytes that do not hold the elements they announce
            raise RequestError(f"{tensor.name()} cannot be read: {error}") from error
    return parse_request(tensors, parameters, request.timeout(), context)


def send_error(pb_utils: Any, sender: Any, error: InklingError) -> None:
    """Ends a request with ``error``: its code, its message, FINAL."""
    code = getattr(pb_utils.TritonError, error.code)
    response = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


class TritonReply:
    """The responses of one request. Used by one thread at a time."""

    def __init__(self, pb_utils: Any, sender: Any, parsed: ParsedRequest):
        self._pb_utils = pb_utils
        self._sender = sender  # the request's response sender
        self._wanted = parsed.wanted
        self._log_probs = parsed.log_probs
        self._seed = parsed.seed
        self._unsent_prompt = parsed.prompt_text

    def send(self, chunk: Chunk) -> None:
        """One response; with FINAL when the chunk is final."""
        pb_utils = self._pb_utils
        if chunk.error is not None:
            send_error(pb_utils, self._sender, chunk.error)
            return
        outputs = response_outputs(chunk, self._wanted, self._seed, self._unsent_prompt, self._log_probs)
        response = pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array) for name, array in outputs.items()]
        )
        self._unsent_prompt = ""
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if chunk.final else 0)

    def is_cancelled(self) -> bool:
        return self._sender.is_cancelled()


def response_outputs(
    chunk: Chunk,
    wanted: frozenset[str],
    seed: int,
    prompt_text: str = "",
    log_probs: LogProbOutputs = NO_LOG_PROBS,
) -> dict[str, np.ndarray]:
    """Output name -> tensor, as ``interface.OUTPUTS`` declares them. Token counts are of this response."""
    drafts, accepted = chunk.total_draft_tokens, chunk.total_accepted_draft_tokens
    optional = {
        "output_ids": chunk.ids,
        "finish_reason": [chunk.finish_reason.encode()],
        "num_input_tokens": [chunk.num_input_tokens],
        "num_output_tokens": [len(chunk.ids)],
        "total_draft_tokens": [drafts],
        "total_accepted_draft_tokens": [accepted],
        "acceptance_rate": [accepted / drafts if drafts else 0.0],
    }
    values = {"text_output": [(prompt_text + chunk.text).encode()]}
    values |= {name: value for name, value in optional.items() if name in wanted}
    values |= log_probs.values(chunk)
    if chunk.final:
        values["seed"] = [seed]
    return {name: np.array(value, NUMPY_TYPES[OUTPUTS[name][0]]) for name, value in values.items()}

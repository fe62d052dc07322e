"""The engine's two models reached over Triton's business-logic calls, and the private side of that road.

``BlsTarget`` and ``BlsDraft`` run in ``spec_ensemble``; ``answer`` and ``read_control`` run in the models they call.
``pb_utils`` (``triton_python_backend_utils``) exists in a server's stub only, so it is handed in.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from inkling import errors
from inkling.errors import AccessError, InklingError, ModelError, ModelLostError
from inkling.liveness import Heartbeat
from inkling.protocol import CONTROL, DRAFT_MODEL, DRAFTS, HIDDEN, LOGPROBS, TARGET_MODEL, TOKENS, control_key

_log = logging.getLogger(__name__)


class BlsTarget:
    """``takes_hidden``: the hidden states come back as a tensor; otherwise the models share them by themselves."""

    def __init__(self, pb_utils: Any, heartbeat: Heartbeat, takes_hidden: bool):
        self._pb_utils = pb_utils
        self._heartbeat = heartbeat  # of this process
        self._outputs = [TOKENS, HIDDEN] if takes_hidden else [TOKENS]

    def step(self, control: np.ndarray) -> tuple[np.ndarray, Any]:
        """-> TOKENS int32 [draws], and the HIDDEN tensor as the server handed it over, or None."""
        outputs = self._step(control, self._outputs)
        return outputs[TOKENS].as_numpy(), outputs.get(HIDDEN)

    def step_scored(self, control: np.ndarray) -> tuple[np.ndarray, Any, np.ndarray]:
        """The same, and LOGPROBS int32 [scored, 2 + 2K]."""
        outputs = self._step(control, [*self._outputs, LOGPROBS])
        return outputs[TOKENS].as_numpy(), outputs.get(HIDDEN), outputs[LOGPROBS].as_numpy()

    def _step(self, control: np.ndarray, names: list[str]) -> dict[str, Any]:
        pb_utils = self._pb_utils
        inputs = [pb_utils.Tensor(CONTROL, control)]
        response = _call(pb_utils, self._heartbeat, TARGET_MODEL, inputs, names)
        return {name: pb_utils.get_output_tensor_by_name(response, name) for name in names}


class BlsDraft:
    def __init__(self, pb_utils: Any, heartbeat: Heartbeat):
        self._pb_utils = pb_utils
        self._heartbeat = heartbeat

    def step(self, control: np.ndarray, hidden: Any) -> np.ndarray:
        """-> DRAFTS int32. ``hidden`` is passed on unseen; None: the draft has it already."""
        pb_utils = self._pb_utils
        inputs = [pb_utils.Tensor(CONTROL, control)]
        inputs += [] if hidden is None else [hidden]
        response = _call(pb_utils, self._heartbeat, DRAFT_MODEL, inputs, [DRAFTS])
        return pb_utils.get_output_tensor_by_name(response, DRAFTS).as_numpy()


def _call(pb_utils: Any, heartbeat: Heartbeat, model: str, inputs: list[Any], outputs: list[str]) -> Any:
    request = pb_utils.InferenceRequest(model_name=model, requested_output_names=outputs, inputs=inputs)
    with heartbeat.step():
        response = request.exec()
    if response.has_error():
        error = _error_of(model, response.error().message())
        if isinstance(error, ModelLostError):
            heartbeat.lost_model(model)
        raise error
    return response


def _error_of(model: str, message: str) -> InklingError:
    """The exception that ``answer`` put into words. Other words are the server's: the model could not answer."""
    name, _, rest = message.partition(": ")
    kind = getattr(errors, name, None)
    if not isinstance(kind, type):
        return ModelLostError(f"{model} does not answer: {message}")
    if issubclass(kind, errors.ProtocolError):
        return kind(rest)
    return ModelError(f"{model} failed: {message}")


def read_control(pb_utils: Any, request: Any, model: str, key: bytes) -> np.ndarray:
    """CONTROL int32 of a private call. Raises AccessError unless it carries the run folder's key; the server counts
    inputs where one is optional, so a call from outside may come without it."""
    tensor = pb_utils.get_input_tensor_by_name(request, CONTROL)
    control = np.zeros(0, np.int32) if tensor is None else tensor.as_numpy()
    if not hmac.compare_digest(control_key(control), key):
        raise AccessError(f"{model} is private to this server; send requests to spec_ensemble")
    return control


def answer(pb_utils: Any, request: Any, step: Callable[[Any], list[Any]], heartbeat: Heartbeat) -> Any:
    """The response to one private call: the tensors ``step`` makes of it, or its error in words."""
    try:
        with heartbeat.step():
            return pb_utils.InferenceResponse(output_tensors=step(request))
    except Exception as error:
        if not isinstance(error, InklingError):
            _log.exception("a step failed")
            error = ModelError(f"{type(error).__name__}: {error}")
        code = getattr(pb_utils.TritonError, error.code)
        return pb_utils.InferenceResponse(
            error=pb_utils.TritonError(f"{type(error).__name__}: {error}", code)
        )

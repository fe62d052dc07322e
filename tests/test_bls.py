"""Errors on their way between the models: in the called model's words they are its own, in others it is lost."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from inkling.bls import BlsDraft, BlsTarget, read_control
from inkling.errors import (
    AccessError,
    GenerationError,
    InklingError,
    ModelError,
    ModelLostError,
    StepGapError,
)
from inkling.protocol import CONTROL, control_key


class Heart:
    """The heartbeat of a process that is not one."""

    def __init__(self):
        self.steps, self.is_lost = 0, False

    @contextmanager
    def step(self):
        yield
        self.steps += 1

    def lost_model(self, model: str) -> None:
        self.is_lost = True


def server_that_answers(message: str) -> SimpleNamespace:
    """``pb_utils`` whose every call ends with the error ``message``."""
    error = SimpleNamespace(message=lambda: message)
    response = SimpleNamespace(has_error=lambda: True, error=lambda: error)
    request = SimpleNamespace(exec=lambda: response)
    return SimpleNamespace(InferenceRequest=lambda **_: request, Tensor=lambda *_: None)


CASES = {
    "StepGapError: step 3": (StepGapError, False),
    "GenerationError: another target": (GenerationError, False),
    "ModelError: RuntimeError: bad shape": (ModelError, False),
    "AccessError: private": (ModelError, False),
    "Failed to process the request(s) for model 'x', message: Stub process 'x_0_0' is not healthy.": (
        ModelLostError,
        True,
    ),
    "Server not ready": (ModelLostError, True),
}


@pytest.mark.parametrize("message", CASES)
def test_a_called_models_error_keeps_its_kind_and_a_model_without_words_is_lost(message: str) -> None:
    kind, is_lost = CASES[message]
    for call in ("target", "draft"):
        heart = Heart()
        pb_utils = server_that_answers(message)
        with pytest.raises(InklingError) as caught:
            if call == "target":
                BlsTarget(pb_utils, heart, takes_hidden=False).step(np.zeros(1, np.int32))
            else:
                BlsDraft(pb_utils, heart).step(np.zeros(1, np.int32), None)
        assert type(caught.value) is kind
        assert (heart.is_lost, heart.steps) == (is_lost, 1)
    assert ModelLostError.code == "UNAVAILABLE"


def test_a_private_call_is_refused_without_the_key():
    """Also one without CONTROL, which the server lets through where another input is optional."""
    control = np.arange(200, dtype=np.int32)
    tensor = SimpleNamespace(as_numpy=lambda: control)
    pb_utils = SimpleNamespace(get_input_tensor_by_name=lambda request, name: request.get(name))
    assert read_control(pb_utils, {CONTROL: tensor}, "m", control_key(control)) is control
    short = SimpleNamespace(as_numpy=lambda: control[:3])
    for request, key in (({}, control_key(control)), ({CONTROL: short}, b"k"), ({CONTROL: tensor}, b"k")):
        with pytest.raises(AccessError, match="m is private"):
            read_control(pb_utils, request, "m", key)

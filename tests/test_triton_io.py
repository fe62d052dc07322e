"""Responses: which outputs, of which type, and that every request ends with FINAL."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from inkling.engine.outbox import Chunk
from inkling.errors import CancelledError, InklingError, QueueFullError
from inkling.interface import ASKED_BY, OUTPUTS
from inkling.parameters import NUMPY_TYPES
from inkling.triton_io import TritonReply, response_outputs

ALL = frozenset(name for outputs in ASKED_BY.values() for name in outputs)
CHUNK = Chunk(
    [7, 8], "hé", "stop", final=True, num_input_tokens=5, total_draft_tokens=8, total_accepted_draft_tokens=6
)


def test_outputs_have_the_declared_types_and_shapes():
    outputs = response_outputs(CHUNK, ALL, seed=2**64 - 1)
    assert set(outputs) == set(OUTPUTS)
    for name, array in outputs.items():
        declared, dims = OUTPUTS[name]
        assert array.dtype == NUMPY_TYPES[declared] and array.ndim == 1
        assert dims == (-1,) or array.shape == dims
    assert {name: array.tolist() for name, array in outputs.items()} == {
        "text_output": ["hé".encode()],
        "output_ids": [7, 8],
        "finish_reason": [b"stop"],
        "num_input_tokens": [5],
        "num_output_tokens": [2],
        "total_draft_tokens": [8],
        "total_accepted_draft_tokens": [6],
        "acceptance_rate": [0.75],
        "seed": [2**64 - 1],
    }


def test_only_what_was_asked_for_is_sent_and_the_seed_comes_last():
    first = Chunk([7], "h", num_input_tokens=5)
    assert set(response_outputs(first, frozenset(), 1)) == {"text_output"}
    assert set(response_outputs(CHUNK, frozenset(), 1)) == {"text_output", "seed"}
    assert response_outputs(first, ALL, 1)["finish_reason"].tolist() == [b""]


def test_no_drafts_no_acceptance():
    assert response_outputs(Chunk(final=True), ALL, 1)["acceptance_rate"].tolist() == [0.0]
    assert response_outputs(Chunk(final=True), ALL, 1)["output_ids"].shape == (0,)


FINAL = 1


@pytest.fixture
def reply():
    """A TritonReply with a sender that keeps what it was given: (outputs or error, flags)."""

    class TritonError(SimpleNamespace):
        INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = "INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL"

        def __init__(self, message: str, code: str):
            super().__init__(message=message, code=code)

    pb_utils = SimpleNamespace(
        TritonError=TritonError,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        Tensor=lambda name, array: (name, array),
        InferenceResponse=lambda tensors=(), error=None: error or dict(tensors),
    )
    sent: list = []
    sender = SimpleNamespace(
        send=lambda response, flags: sent.append((response, flags)), is_cancelled=lambda: True
    )
    parsed = SimpleNamespace(wanted=frozenset(), seed=3, prompt_text="prompt ")
    return SimpleNamespace(reply=TritonReply(pb_utils, sender, parsed), sent=sent)


def test_the_prompt_stands_before_the_first_text_only(reply):
    reply.reply.send(Chunk([1], "a"))
    reply.reply.send(Chunk([2], "b", "length", final=True))
    assert [outputs["text_output"].tolist() for outputs, _ in reply.sent] == [[b"prompt a"], [b"b"]]
    assert [flags for _, flags in reply.sent] == [0, FINAL]
    assert isinstance(reply.sent[0][0]["text_output"], np.ndarray)


@pytest.mark.parametrize("error", [QueueFullError("full"), CancelledError("gone"), InklingError("broken")])
def test_an_error_goes_out_alone_with_its_code_and_final(reply, error):
    reply.reply.send(Chunk(error=error, final=True))
    ((response, flags),) = reply.sent
    assert (response.message, response.code, flags) == (str(error), error.code, FINAL)


def test_cancellation_is_asked_of_the_sender(reply):
    assert reply.reply.is_cancelled()

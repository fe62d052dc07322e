"""Responses: which outputs, of which type, and that every request ends with FINAL."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from inkling.engine.log_probs import TokenLogProb
from inkling.engine.metrics import RequestTrace
from inkling.engine.outbox import Chunk
from inkling.errors import CancelledError, InklingError, QueueFullError, RequestError
from inkling.interface import ASKED_BY, OUTPUTS
from inkling.log_prob_outputs import LOG_PROBS_ASKED_BY, LogProbOutputs
from inkling.parameters import NUMPY_TYPES
from inkling.triton_io import TritonReply, read_request, response_outputs

ALL = frozenset(name for outputs in ASKED_BY.values() for name in outputs)
LOG_PROBS = LogProbOutputs(
    None,
    frozenset(name for outputs in LOG_PROBS_ASKED_BY.values() for name in outputs),
    num_top=1,
    num_logprobs=2,
    num_prompt_logprobs=1,
)
CHUNK = Chunk(
    [7, 8],
    "hé",
    "stop",
    final=True,
    num_input_tokens=5,
    total_draft_tokens=8,
    total_accepted_draft_tokens=6,
    log_probs=[
        TokenLogProb(7, -0.5, 1, ((7, -0.5), (9, -1.0))),
        TokenLogProb(8, -4.0, 30, ((2, -0.25), (3, -2.0))),
    ],
    cum_log_prob=-4.5,
    prompt_log_probs=[TokenLogProb(3, -3.0, 2, ((4, -0.125),))],
)


def test_outputs_have_the_declared_types_and_shapes():
    outputs = response_outputs(CHUNK, ALL, seed=2**64 - 1, log_probs=LOG_PROBS)
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
        "output_log_probs": [-0.5, -4.0],
        "cum_log_probs": [-4.5],
        "cumulative_logprob": [-4.5],
        "top_log_probs": [b'[{"7": -0.5}, {"2": -0.25}]'],
        "logprobs": [
            b'[{"7": {"logprob": -0.5, "rank": 1, "decoded_token": null}, '
            b'"9": {"logprob": -1.0, "rank": 2, "decoded_token": null}}, '
            b'{"8": {"logprob": -4.0, "rank": 30, "decoded_token": null}, '
            b'"2": {"logprob": -0.25, "rank": 1, "decoded_token": null}, '
            b'"3": {"logprob": -2.0, "rank": 2, "decoded_token": null}}]'
        ],
        "prompt_logprobs": [
            b'[null, {"3": {"logprob": -3.0, "rank": 2, "decoded_token": null}, '
            b'"4": {"logprob": -0.125, "rank": 1, "decoded_token": null}}]'
        ],
    }


def test_log_probs_are_of_the_response_and_the_prompts_come_once():
    later = Chunk([7], "h", log_probs=[TokenLogProb(7, -0.5, 1)], cum_log_prob=-9.0)
    outputs = response_outputs(later, frozenset(), 1, log_probs=LOG_PROBS)
    assert "prompt_logprobs" not in outputs
    assert outputs["output_log_probs"].tolist() == [-0.5] and outputs["cum_log_probs"].tolist() == [-9.0]
    without = LogProbOutputs(None, frozenset({"logprobs"}))
    assert response_outputs(later, frozenset(), 1, log_probs=without)["logprobs"].tolist() == [b"null"]


def test_only_what_was_asked_for_is_sent_and_the_seed_comes_last():
    first = Chunk([7], "h", num_input_tokens=5)
    assert set(response_outputs(first, frozenset(), 1)) == {"text_output"}
    assert set(response_outputs(CHUNK, frozenset(), 1)) == {"text_output", "seed"}
    assert response_outputs(first, ALL, 1)["finish_reason"].tolist() == [b""]


def test_no_drafts_no_acceptance():
    assert response_outputs(Chunk(final=True), ALL, 1)["acceptance_rate"].tolist() == [0.0]
    assert response_outputs(Chunk(final=True), ALL, 1)["output_ids"].shape == (0,)


@pytest.mark.parametrize("place", ["request_id", "parameters"])
def test_text_that_is_not_utf_8_is_refused(place):
    """The stub decodes it when it is asked for."""
    request = SimpleNamespace(request_id=lambda: "7", parameters=lambda: "{}")
    setattr(request, place, lambda: b"a\xff".decode())
    with pytest.raises(RequestError, match="id or .* parameter is not valid UTF-8 at byte 0xff at offset 1"):
        read_request(request, None, RequestTrace())


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
    parsed = SimpleNamespace(wanted=frozenset(), log_probs=LogProbOutputs(), seed=3, prompt_text="prompt ")
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

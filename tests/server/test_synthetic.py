"""A synthetic checkpoint behind the real server: ids in, ids out, and the ready line says what it serves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inkling.client import ResponseError, stream
from inkling.synthetic_weights import open_checkpoint
from tests.server.conftest import ServeCommand

pytestmark = pytest.mark.server
TINY = "synthetic:tiny?seed=0"


def test_serve_answers_ids_and_says_that_its_weights_are_synthetic(
    serve: Callable[..., ServeCommand],
) -> None:
    command = serve("--checkpoint", TINY, "--threads", "1")
    command.wait_ready()
    assert command.output.read_text().rstrip().endswith("/metrics synthetic weights")
    successor = open_checkpoint(TINY).cycle.successor.tolist()
    expected = [successor[5]]
    while len(expected) < 40:
        expected.append(successor[expected[-1]])
    url = f"grpc://{command.grpc_url}"
    responses = list(stream(url, {"input_ids": [9, 5], "max_tokens": 40, "return_perf_metrics": True}))
    assert [token for response in responses for token in response["output_ids"]] == expected
    assert responses[-1]["total_accepted_draft_tokens"] > 20
    with pytest.raises(ResponseError, match="has no tokenizer.json; send input_ids"):
        list(stream(url, {"text_input": "text", "max_tokens": 4}))

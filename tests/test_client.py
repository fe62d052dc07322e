"""The client's own arithmetic and refusals; streams are tested against a live server."""

from __future__ import annotations

import http.server
import socket
import threading

import pytest

from inkling.client import ResponseError, Tally, stream, stream_http


def test_a_tally_counts_tokens_of_each_response_and_the_last_total_of_drafts():
    responses = [
        {"text_output": "a", "num_output_tokens": 1},
        {"text_output": "bcd", "num_output_tokens": 3, "total_accepted_draft_tokens": 2},
        {"num_output_tokens": 4, "total_accepted_draft_tokens": 5, "finish_reason": "length"},
        {},
    ]
    tally = Tally.of(responses)
    assert (tally.num_tokens, tally.num_accepted, tally.finish_reason) == (8, 5, "length")
    assert str(tally) == "8 tokens, mean accepted length 2.67, finish reason length"


@pytest.mark.parametrize(
    ("num_tokens", "num_accepted", "length"),
    [(0, 0, 0.0), (5, 0, 1.0), (12, 9, 4.0), (3, 3, 3.0)],  # 3 of 3: the last step was cut to its drafts
)
def test_mean_accepted_length_is_tokens_a_step(num_tokens, num_accepted, length):
    assert Tally(num_tokens, num_accepted).mean_accepted_length == length


def test_tallies_add_up():
    total = Tally(8, 5, "length") + Tally(4, 3, "stop")
    assert (total.num_tokens, total.num_accepted, total.finish_reason) == (12, 8, "")


def test_a_url_of_another_scheme_is_refused():
    with pytest.raises(ResponseError, match="'https://x:1'; it must begin with grpc:// or http://"):
        stream("https://x:1", {})


@pytest.mark.parametrize("scheme", ["http://", "grpc://", ""])
def test_a_server_that_is_not_there_is_an_error(scheme):
    with socket.socket() as bound:  # bound and not listening: refuses connections
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(ResponseError, match="refused"):
            list(stream(f"{scheme}127.0.0.1:{bound.getsockname()[1]}", {"text_input": "a"}))


def test_a_stream_that_ends_early_is_no_answer():
    """A server that dies closes the connection; what came before must not pass for the whole."""

    class Half(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(b'data: {"text_output": "half an ans"}\n\n')

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Half) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        answer = stream_http(f"127.0.0.1:{server.server_port}", {"text_input": "a"})
        assert next(answer) == {"text_output": "half an ans"}
        with pytest.raises(ResponseError, match="before the answer was complete"):
            next(answer)

"""The demo: a real server, streamed requests over gRPC and HTTP, the mean accepted length.

Run by ``make demo``. Exits 0 when every request was answered and speculation changed no token.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from inkling.cli import printed
from inkling.client import TALLIED, Tally, stream, stream_http
from inkling.server import RunningServer, ServerOptions
from inkling.settings import Settings

FOLDER = Path(__file__).parent
NUM_PROMPTS, MAX_TOKENS = 4, 64
BAR = "\u2503"  # between prompt and answer
ANY_PORTS = ServerOptions(http_port=0, grpc_port=0, metrics_port=0)


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    prompts = [entry["text"] for entry in json.loads((FOLDER / "prompts.json").read_text())[:NUM_PROMPTS]]
    settings = Settings(checkpoint=str(FOLDER / "checkpoint"), draft_length="fixed", log_format="off")
    with RunningServer(settings, ANY_PORTS, report=note) as server:
        print(f"ready {server.http_url} {server.grpc_url}")
        urls = (f"grpc://{server.grpc_url}", f"http://{server.http_url}")
        total = Tally()
        for number, prompt in enumerate(prompts):
            url = urls[number % 2]
            print(f"\n--- request {number + 1} over {url.partition(':')[0]}: the prompt, then the answer")
            print(f"{prompt}{BAR}", end="")
            tally = Tally.of(printed(stream(url, request(prompt))))
            print(f"--- {tally}")
            total += tally
        print(f"\nall requests: {total}")
        compare_with_drafting_off(server.http_url, prompts)


def request(prompt: str, **more: Any) -> dict[str, Any]:
    return {"text_input": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True, **TALLIED, **more}


def compare_with_drafting_off(url: str, prompts: list[str]) -> None:
    """The promise on these prompts: the same ids with drafting on and off. One stream, so speeds compare."""
    answers: dict[str, list[int]] = {}
    seconds: dict[str, float] = {}
    for label, more in (("off", {"num_draft_tokens": 0}), ("on", {})):
        start = time.perf_counter()
        answers[label] = [
            token
            for prompt in prompts
            for response in stream_http(url, request(prompt, return_output_ids=True, **more))
            for token in response["output_ids"]
        ]
        seconds[label] = time.perf_counter() - start
    if answers["on"] != answers["off"]:
        sys.exit("drafting changed the answer")
    speeds = {label: len(answers[label]) / seconds[label] for label in seconds}
    print(
        f"{len(answers['on'])} tokens, the same with drafting on ({speeds['on']:.0f} tokens/s) "
        f"and off ({speeds['off']:.0f} tokens/s)"
    )


if __name__ == "__main__":
    main()
